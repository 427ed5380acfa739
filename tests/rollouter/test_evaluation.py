"""An accuracy is the mean over scored rollouts, never a 0 that stands for a failure."""

from __future__ import annotations

import pytest

from rollouter.errors import EvaluationFailed
from rollouter.evaluation import Tally
from sample_bus.messages import EvaluationRequest

REQUEST = EvaluationRequest(incarnation="t1", request_id=3, policy_version=5)


def test_failed_rollouts_are_left_out_of_the_mean() -> None:
    """B105, B173"""
    result = Tally(rewards=(1.0, 0.0, 1.0), versions=frozenset({6, 5}), num_failed=5).result(REQUEST, seconds=1.5)
    assert result.accuracy == pytest.approx(2 / 3)
    assert (result.num_samples, result.policy_version, result.generating_versions) == (3, 5, (5, 6))


def test_nothing_scored_is_no_result() -> None:
    """B108"""
    tally = Tally(rewards=(), versions=frozenset(), num_failed=8, first_failure="rollout a/0: reward failed: raised KeyError")
    with pytest.raises(EvaluationFailed, match="all 8 rollouts failed; first: rollout a/0: reward failed: raised KeyError"):
        tally.result(REQUEST, seconds=1.0)
    with pytest.raises(EvaluationFailed, match=r"all 8 rollouts failed; first: none ended within evaluation\.timeout_s"):
        Tally(rewards=(), versions=frozenset(), num_failed=8).result(REQUEST, seconds=1.0)
