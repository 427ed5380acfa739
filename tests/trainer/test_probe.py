"""The probe: what an engine says beside what the trainer computed, at the same version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.messages import RoundResult
from sample_bus.sample import Sample
from trainer.probe import Probe, compare, probe_ids, row_of_probe

logprobs = st.lists(st.floats(-20, 0), min_size=5, max_size=5)


class Scripted:
    """A policy whose logprobs are -1, -2, … at one version after the other."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seen: list[Sample] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        self.num_calls += 1
        self.seen += samples
        scores = np.full(samples[0].num_tokens, -float(self.num_calls), np.float32)
        scores[0] = 0.0
        return [scores]


def result(version: int, got: Sequence[float]) -> RoundResult:
    return RoundResult(policy_version=version, engine="engine-0", committed=True, probe_logprobs=tuple(got))


def scored(*versions: int) -> Probe:
    policy = Scripted()
    probe = Probe(policy, (1, 2, 3, 4))  # type: ignore[arg-type]  # of the policy nothing else is used
    for version in versions:
        probe.score(version)
    for sample in policy.seen:
        sample.validate()
    return probe


def test_the_engines_logprobs_are_compared_with_those_of_its_own_version() -> None:
    probe = scored(1, 2, 3)
    for version in (1, 2, 3):
        report = probe.take(result(version, [-float(version)] * 3))
        assert report is not None
        assert (report.mismatch_mean_abs, report.mismatch_max_abs, report.is_stale) == (0.0, 0.0, False)


def test_an_engine_that_computes_with_the_version_before_is_told_apart() -> None:
    """B141, B69: it says that it holds the new version, and its logprobs are the old ones."""
    report = scored(1, 2).take(result(2, [-1.0] * 3))
    assert report is not None
    assert report.is_stale
    assert row_of_probe(report)["probe_is_stale_engine-0"] == 1.0
    assert row_of_probe(report)["probe_mismatch_mean_abs_engine-0"] == 1.0


@pytest.mark.parametrize(("version", "got"), [(9, [-1.0] * 3), (1, []), (1, [-1.0])])
def test_what_cannot_be_compared_is_no_report(version: int, got: list[float]) -> None:
    assert scored(1, 2).take(result(version, got)) is None


def test_only_a_few_versions_are_kept() -> None:
    probe = scored(*range(10))
    assert probe.take(result(5, [-6.0] * 3)) is None
    assert probe.take(result(6, [-7.0] * 3)) is not None


@given(logprobs, st.lists(st.floats(-0.02, 0.02), min_size=5, max_size=5))
def test_where_a_version_changes_nothing_no_rounding_counts_as_stale(mine: list[float], rounding: list[float]) -> None:
    got = np.add(mine, rounding).tolist()
    assert not compare("e", 2, got, mine, mine).is_stale


@given(logprobs, logprobs)
def test_stale_means_nearer_to_the_version_before(mine: list[float], before: list[float]) -> None:
    distance = float(np.abs(np.subtract(mine, before)).mean())
    assert compare("e", 2, before, mine, before).is_stale == (distance > 1e-4)
    assert not compare("e", 2, mine, mine, before).is_stale


def test_the_probe_is_the_same_everywhere_and_fits_model_and_engine() -> None:
    assert probe_ids(300, max_model_len=2048) == probe_ids(300, max_model_len=2048)
    assert len(probe_ids(300, max_model_len=2048)) == 24
    ids = probe_ids(7, max_model_len=9)
    assert len(ids) == 8
    assert set(ids) <= set(range(7))
