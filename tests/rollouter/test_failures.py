"""Each failure has one reason; a streak of them stops the run with the first one's words."""

from __future__ import annotations

import pytest

from agent_loop.errors import BadGeneration, EngineUnavailable, LoopError, NoRoom, RequestRefused, RewardError
from rollouter.errors import TooManyFailures
from rollouter.failures import NO_FAULT, FailureReason, FailureStreak, reason_of
from sample_bus.errors import SampleTooLarge, WireError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), FailureReason.TIMEOUT),
        (EngineUnavailable(), FailureReason.ENGINE_UNAVAILABLE),
        (RequestRefused(), FailureReason.REQUEST_REFUSED),
        (BadGeneration(), FailureReason.BAD_GENERATION),
        (RewardError(), FailureReason.REWARD_FAILED),
        (NoRoom(), FailureReason.NO_ROOM),
        (LoopError(), FailureReason.AGENT_LOOP_FAILED),
        (WireError(), FailureReason.BAD_SAMPLE),
        (SampleTooLarge(), FailureReason.SAMPLE_TOO_LARGE),
        (ZeroDivisionError(), FailureReason.AGENT_LOOP_FAILED),
    ],
)
def test_reason_of_an_error(error: Exception, reason: FailureReason) -> None:
    """B105"""
    assert reason_of(error) is reason


def test_streak_stops_at_its_limit_with_the_first_reason() -> None:
    """B108"""
    streak = FailureStreak(limit=3)
    streak.failed("r1", FailureReason.REWARD_FAILED, "KeyError: 'answer'")
    streak.failed("r2", FailureReason.TIMEOUT, "late")
    with pytest.raises(
        TooManyFailures, match=r"3 rollouts failed in a row .* first: rollout r1: reward failed: KeyError: 'answer'"
    ):
        streak.failed("r3", FailureReason.TIMEOUT, "late")


def test_burst_then_success_recovers() -> None:
    """B168"""
    streak = FailureStreak(limit=21)
    for round_number in range(5):
        for number in range(20):
            streak.failed(f"r{round_number}.{number}", FailureReason.ENGINE_UNAVAILABLE, "gone")
        streak.succeeded()
    assert streak.length == 0


def test_what_was_no_fault_does_not_count() -> None:
    streak = FailureStreak(limit=1)
    for reason in NO_FAULT:
        streak.failed("r1", reason, "")
    assert streak.length == 0
