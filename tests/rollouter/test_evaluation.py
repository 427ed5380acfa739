"""An accuracy is the mean over scored rollouts, never a 0 that stands for a failure."""

from __future__ import annotations

import pytest

from rollouter.errors import EvaluationFailed, TooManyFailures
from rollouter.evaluation import HOPELESS_ATTEMPTS, Prospects, Tally
from rollouter.failures import FailureReason
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


def test_an_evaluation_whose_first_attempts_all_fail_ends_at_once() -> None:
    prospects = Prospects("evaluation 1 of version 0", max_in_a_row=64)
    for number in range(HOPELESS_ATTEMPTS - 1):
        prospects.attempt_failed(f"rollout {number}: raised KeyError", FailureReason.REWARD_FAILED)
    with pytest.raises(EvaluationFailed, match="the first 16 attempts all failed; first: rollout 0: raised KeyError"):
        prospects.attempt_failed("rollout 15: raised KeyError", FailureReason.REWARD_FAILED)


def test_an_evaluation_goes_on_when_something_was_scored_or_an_engine_was_away() -> None:
    prospects = Prospects("evaluation", max_in_a_row=1000)
    for _ in range(2 * HOPELESS_ATTEMPTS):
        prospects.attempt_failed("connection lost", FailureReason.ENGINE_UNAVAILABLE)
    prospects.attempt_failed("raised", FailureReason.REWARD_FAILED)
    prospects.succeeded()
    for _ in range(2 * HOPELESS_ATTEMPTS):
        prospects.attempt_failed("raised", FailureReason.REWARD_FAILED)


def test_rollouts_of_an_evaluation_count_as_failures_in_a_row() -> None:
    prospects = Prospects("evaluation", max_in_a_row=3)
    prospects.given_up("a/0", FailureReason.ENGINE_UNAVAILABLE, "lost")
    prospects.succeeded()
    prospects.given_up("a/1", FailureReason.ENGINE_UNAVAILABLE, "gone")
    prospects.given_up("a/2", FailureReason.ENGINE_UNAVAILABLE, "lost")
    with pytest.raises(TooManyFailures, match=r"3 rollouts failed in a row .*; first: rollout a/1: engine unavailable: gone"):
        prospects.given_up("a/3", FailureReason.ENGINE_UNAVAILABLE, "lost")
