from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import WireError
from sample_bus.sample import NO_VERSION, Sample
from tests.fakes.samples import end_to_end, make_sample


def is_consistent(sample: Sample) -> bool:
    """The invariant of `Sample` once more, token by token."""
    length, starts, versions = len(sample.tokens), sample.version_starts.tolist(), sample.versions.tolist()
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)) or starts[-1] >= length:
        return False
    if any(version < NO_VERSION for version in versions):
        return False
    kept = sample.kept_cache.tolist()
    if any(flag > 1 or (flag and version == NO_VERSION) for flag, version in zip(kept, versions, strict=True)):
        return False
    for at in range(length):
        run = max(number for number, start in enumerate(starts) if start <= at)
        mask, logprob = int(sample.loss_mask[at]), float(sample.behavior_logprobs[at])
        if sample.tokens[at] < 0 or mask > 1 or not math.isfinite(logprob) or logprob > 1e-3:
            return False
        if (mask == 0 and logprob != 0) or (mask == 1 and versions[run] == NO_VERSION):
            return False
    return math.isfinite(sample.reward) and math.isfinite(sample.temperature) and sample.temperature > 0


TOKENS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 7, 2**31 - 1, -1]),
        st.sampled_from([0, 0, 0, 1, 1, 1, 2, 255]),
        st.sampled_from([0.0, 0.0, -0.0, -1.5, -80.0, 5e-4, 0.1, math.nan, math.inf, -math.inf]),
    ),
    min_size=1,
    max_size=5,
)
RUNS = st.lists(
    st.tuples(st.integers(-1, 5), st.sampled_from([NO_VERSION, NO_VERSION, 0, 3, -2]), st.sampled_from([0, 0, 1, 2])),
    min_size=1,
    max_size=3,
)
NUMBER = st.sampled_from([1.0, 1.0, 1.0, 0.0, -1.0, math.nan, math.inf])


@given(TOKENS, RUNS, st.booleans(), NUMBER, NUMBER)
def test_validate_accepts_exactly_what_the_invariant_allows(
    tokens: list[tuple[int, int, float]], runs: list[tuple[int, int, int]], tidy: bool, reward: float, temperature: float
) -> None:
    if tidy:  # mostly valid ones, or hardly any would be
        tokens = [(abs(token), mask % 2, min(logprob, 0.0) if mask % 2 else 0.0) for token, mask, logprob in tokens]
        runs = [(0, runs[0][1], runs[0][2] % 2)]
    sample = make_sample(
        tokens=np.array([token for token, _, _ in tokens], np.int32),
        loss_mask=np.array([mask for _, mask, _ in tokens], np.uint8),
        behavior_logprobs=np.array([logprob for _, _, logprob in tokens], np.float32),
        version_starts=np.array([start for start, _, _ in runs], np.int32),
        versions=np.array([version for _, version, _ in runs], np.int32),
        kept_cache=np.array([kept for _, _, kept in runs], np.uint8),
        reward=reward,
        temperature=temperature,
    )
    if is_consistent(sample):
        sample.validate()
    else:
        with pytest.raises(WireError):
            sample.validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([], np.int32)}, "tokens: got shape"),
        ({"tokens": np.zeros((1, 5), np.int32)}, "tokens: got shape"),
        ({"tokens": np.zeros(5, np.int64)}, r"tokens: got int64\[5\], expected int32\[5\]"),
        ({"loss_mask": np.zeros(4, np.uint8)}, r"loss_mask: got uint8\[4\], expected uint8\[5\]"),
        ({"behavior_logprobs": np.zeros(5)}, r"behavior_logprobs: got float64\[5\], expected float32\[5\]"),
        ({"versions": np.array([1], np.int32)}, "version_starts: got"),
        ({"versions": np.array([], np.int32), "version_starts": np.array([], np.int32)}, "version_starts: got"),
        ({"kept_cache": np.zeros(1, np.uint8)}, r"kept_cache: got uint8\[1\]"),
        ({"kept_cache": np.zeros(2, np.int32)}, r"kept_cache: got int32\[2\], expected uint8"),
        ({"kept_cache": np.array([1, 0], np.uint8)}, "kept_cache: got 1 for tokens that no policy sampled"),
        ({"seat": 1}, "seat: got 1, expected 0 to 0"),
        ({"segment_starts": np.zeros(0, np.int32)}, r"segment_starts: got int32\[0\]"),
        ({"segment_starts": np.array([0, 5], np.int32)}, r"segment_starts: got \[0, 5\], expected rising from 0 below 5"),
        ({"segment_starts": np.array([0, 0], np.int32)}, "segment_starts: got"),
        ({"segment_starts": np.array([0, 4], np.int32)}, "loss_mask: got 1 where a segment begins"),
        ({"token_rewards": np.zeros(4, np.float32)}, r"token_rewards: got float32\[4\], expected float32\[0\] or"),
        ({"token_rewards": np.array([0, 0, np.nan, 0, 0], np.float32)}, r"token_rewards\[2\]: got nan"),
        ({"token_rewards": np.array([0, 0, 2e12, 0, 0], np.float32)}, r"token_rewards\[2\]: got 1999999991808"),
        ({"reward": 1e39}, r"reward: got 1e\+39, expected a finite number of at most 1e\+12"),
        ({"reward_parts": {"format": float("inf")}}, r"reward_parts\[format\]: got inf"),
        ({"reward_parts": {"": 1.0}}, "reward_parts: got the name ''"),
        ({"counts": {"tools": 1.0}}, r"counts\[tools\]: got 1.0, expected a finite int"),
        ({"counts": {str(index): 1 for index in range(33)}}, "counts: got 33 entries, expected at most 32"),
    ],
)
def test_wrong_shapes_and_types_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        make_sample(**change).validate()  # type: ignore[arg-type]


def test_tokens_on_a_kept_cache_are_counted_by_run() -> None:
    sample = make_sample(
        prompt=[1, 2],
        reply=[3, 4, 5],
        version_starts=np.array([0, 2, 3], np.int32),
        versions=np.array([-1, 8, 9], np.int32),
        kept_cache=np.array([0, 0, 1], np.uint8),
    )
    assert sample.num_kept_cache_tokens == 2
    assert make_sample().num_kept_cache_tokens == 0


def test_runs_expand_to_one_version_for_each_token() -> None:
    sample = make_sample(
        prompt=[1, 2], reply=[3, 4, 5], version_starts=np.array([0, 2, 4], np.int32), versions=np.array([-1, 8, 6], np.int32)
    )
    assert sample.token_versions().tolist() == [-1, -1, 8, 8, 6]
    assert (sample.oldest_version, sample.num_trained_tokens, sample.num_tokens) == (6, 3, 5)


def test_segments_are_spans_of_the_tokens() -> None:
    """B32: all the sequences of a rollout are one sample."""
    sample = end_to_end([make_sample(prompt=[1], reply=[2, 3]), make_sample(prompt=[1, 2], reply=[4])])
    sample.validate()
    assert (sample.num_segments, sample.segments(), sample.num_trained_tokens) == (2, [(0, 3), (3, 6)], 3)
    assert make_sample(prompt=[1], reply=[2, 3]).segments() == [(0, 3)]
