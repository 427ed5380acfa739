"""Each trained token is predicted from exactly its own sequence, and nothing is computed twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.sample import Sample
from tests.fakes.samples import end_to_end, make_sample
from tests.trainer.sequences import of_lengths, siblings
from trainer.errors import PackingError
from trainer.packing import PackedBatch, attention_mask, pack

UNBOUNDED = 1 << 30


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Of one or two segments."""
    samples: list[Sample] = []
    for index in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        reply = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        sample = make_sample(
            prompt=prompt,
            reply=reply,
            logprobs=[-0.1 * (place + 1) for place in range(len(reply))],
            group_id=f"g{index}",
            temperature=draw(st.sampled_from([0.5, 1.0])),
        )
        untrained = draw(st.sets(st.integers(len(prompt), len(prompt) + len(reply) - 1)))
        sample.loss_mask[list(untrained)] = 0
        sample.behavior_logprobs[list(untrained)] = 0
        if samples and draw(st.integers(0, 3)) == 0:
            samples[-1] = end_to_end([samples[-1], sample])
        else:
            samples.append(sample)
    return samples


def sequences_of(batch: PackedBatch) -> list[tuple[int, int, tuple[int, ...], int, float, float]]:
    """(sample, position, tokens seen, token predicted, behavior logprob, temperature) of each trained token, off the mask."""
    mask = attention_mask(batch.subtree_ends)
    found = []
    for place, row in enumerate(batch.token_rows):
        seen = np.flatnonzero(mask[batch.row_nodes[row]])
        ordered = seen[np.argsort(batch.position_ids[seen])]
        assert batch.position_ids[ordered].tolist() == list(range(len(ordered)))
        found.append(
            (
                int(batch.token_samples[place]),
                int(batch.token_positions[place]),
                tuple(batch.input_ids[ordered].tolist()),
                int(batch.token_ids[place]),
                float(batch.behavior_logprobs[place]),
                float(batch.row_temperatures[row]),
            )
        )
    return found


def expected_sequences(samples: list[Sample]) -> list[tuple[int, int, tuple[int, ...], int, float, float]]:
    return [
        (
            index,
            int(position),
            tuple(sample.tokens[start:position].tolist()),
            int(sample.tokens[position]),
            float(sample.behavior_logprobs[position]),
            float(np.float32(sample.temperature)),
        )
        for index, sample in enumerate(samples)
        for start, end in sample.segments()
        for position in np.flatnonzero(sample.loss_mask[start:end]) + start
    ]


@given(sample_lists(), st.integers(1, 40), st.integers(1, 20), st.booleans(), st.integers(1, 3))
def test_every_trained_token_sees_its_own_sequence_and_only_that(
    samples: list[Sample], max_tokens: int, max_rows: int, share: bool, min_microbatches: int
) -> None:
    batches = pack(samples, max_tokens=max_tokens, max_rows=max_rows, share_prefixes=share, min_microbatches=min_microbatches)
    found = [entry for batch in batches for entry in sequences_of(batch)]
    assert sorted(found) == sorted(expected_sequences(samples))
    assert len(batches) % min_microbatches == 0


@given(sample_lists(), st.integers(1, 40))
def test_a_microbatch_stays_in_its_budget_unless_one_segment_alone_is_longer(samples: list[Sample], max_tokens: int) -> None:
    for batch in pack(samples, max_tokens=max_tokens, max_rows=UNBOUNDED):
        longest = max(end - start for sample in samples for start, end in sample.segments())
        assert batch.num_nodes <= max(max_tokens, longest)


@given(sample_lists())
def test_each_distinct_prefix_is_computed_once(samples: list[Sample]) -> None:
    prefixes = {
        tuple(sample.tokens[start:end].tolist())
        for sample in samples
        for start, stop in sample.segments()
        if sample.loss_mask[start:stop].any()
        for end in range(start + 1, start + int(np.flatnonzero(sample.loss_mask[start:stop])[-1]) + 1)
    }
    batches = pack(samples, max_tokens=UNBOUNDED, max_rows=UNBOUNDED)
    assert sum(batch.num_nodes for batch in batches) == len(prefixes)
    for batch in batches:
        rows = list(zip(batch.row_nodes.tolist(), batch.row_temperatures.tolist(), strict=True))
        assert len(rows) == len(set(rows))


def test_logprobs_stay_with_their_tokens_when_samples_of_unlike_lengths_are_packed() -> None:
    """B56"""
    samples = of_lengths(3, 1, 4)
    (batch,) = pack(samples, max_tokens=UNBOUNDED, max_rows=UNBOUNDED)
    for sample, position, logprob in zip(batch.token_samples, batch.token_positions, batch.behavior_logprobs, strict=True):
        assert logprob == samples[sample].behavior_logprobs[position]
    assert len(batch.token_ids) == 8


def test_plain_packing_computes_every_sequence_for_itself() -> None:
    samples = siblings()
    (batch,) = pack(samples, max_tokens=UNBOUNDED, max_rows=UNBOUNDED, share_prefixes=False)
    assert batch.num_nodes == sum(sample.num_tokens - 1 for sample in samples)


def test_tokens_after_the_last_trained_one_are_not_computed() -> None:
    sample = make_sample(prompt=[1, 2], reply=[3, 4, 5, 6])
    sample.loss_mask[4:] = 0
    sample.behavior_logprobs[4:] = 0
    (batch,) = pack([sample], max_tokens=UNBOUNDED, max_rows=UNBOUNDED)
    assert batch.input_ids.tolist() == [1, 2, 3]


def test_samples_without_trained_tokens_are_left_out() -> None:
    """B80"""
    sample = make_sample()
    sample.loss_mask[:] = 0
    assert pack([sample], max_tokens=8, max_rows=8) == []


def test_ranks_without_work_get_an_empty_microbatch() -> None:
    batches = pack([make_sample()], max_tokens=UNBOUNDED, max_rows=UNBOUNDED, min_microbatches=4)
    assert [len(batch.token_ids) for batch in batches] == [2, 0, 0, 0]


def test_a_trained_first_token_is_refused_naming_its_rollout() -> None:
    sample = make_sample(prompt=[], reply=[4, 5], group_id="task-9/0")
    with pytest.raises(PackingError, match=r"rollout task-9/0/0"):
        pack([sample], max_tokens=8, max_rows=8)


def test_a_single_trained_token_gives_arrays_that_torch_takes() -> None:
    (batch,) = pack([make_sample(reply=[8], logprobs=[-0.5])], max_tokens=8, max_rows=8)
    assert torch.from_numpy(batch.row_nodes).tolist() == [2]
    assert torch.from_numpy(batch.row_temperatures).tolist() == [1.0]


def test_segments_share_the_prefix_that_they_have_in_common() -> None:
    """B59: a rewritten history costs what is new in it."""
    sample = end_to_end([make_sample(prompt=[1, 2, 3], reply=[4, 5]), make_sample(prompt=[1, 2, 3, 6], reply=[7, 8])])
    (batch,) = pack([sample], max_tokens=UNBOUNDED, max_rows=UNBOUNDED)
    assert batch.num_nodes == 6
    assert batch.token_positions.tolist() == [3, 4, 9, 10]
