"""Each failure has one reason; a streak of them stops the run with the first one's words."""

from __future__ import annotations

import pytest

from agent_loop.errors import (
    BadGeneration,
    BadGroundTruth,
    EngineUnavailable,
    LoopError,
    NoRoom,
    ProgramUnavailable,
    RequestRefused,
    RewardError,
    RewardTimeout,
    RewardUnavailable,
    ToolError,
    ToolLost,
    ToolUnavailable,
    Unscored,
)
from rollouter.errors import TooManyFailures
from rollouter.failures import FINAL, NO_FAULT, TASK_FAULT, FailureReason, FailureStreak, reason_of
from sample_bus.errors import SampleTooLarge, WireError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), FailureReason.TIMEOUT),
        (EngineUnavailable(), FailureReason.ENGINE_UNAVAILABLE),
        (RequestRefused(), FailureReason.REQUEST_REFUSED),
        (BadGeneration(), FailureReason.BAD_GENERATION),
        (RewardError(), FailureReason.REWARD_FAILED),
        (RewardUnavailable(), FailureReason.REWARD_UNAVAILABLE),
        (RewardTimeout(), FailureReason.REWARD_TIMEOUT),
        (BadGroundTruth(), FailureReason.BAD_GROUND_TRUTH),
        (Unscored(), FailureReason.UNSCORED),
        (ToolUnavailable(), FailureReason.TOOL_UNAVAILABLE),
        (ProgramUnavailable(), FailureReason.PROGRAM_UNAVAILABLE),
        (ToolLost(), FailureReason.TOOL_LOST),
        (ToolError(), FailureReason.AGENT_LOOP_FAILED),
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


def test_a_share_of_failures_stops_the_run_although_some_succeed_and_says_of_what_kind_they_are() -> None:
    """B108, for a reward that fails for most rows only."""
    streak = FailureStreak(limit=1000, max_fraction=0.5, window=8)
    for number in range(4):
        streak.failed(f"r{number}", FailureReason.REWARD_FAILED, "KeyError: 'golden'")
        streak.succeeded()
    streak.failed("r4", FailureReason.REWARD_UNAVAILABLE, "503")
    with pytest.raises(
        TooManyFailures,
        match=r"5 of the last 8 rollouts failed .*: reward failed 3, reward unavailable 2; first: rollout r1: .*golden",
    ):
        streak.failed("r5", FailureReason.REWARD_UNAVAILABLE, "503")


def test_a_share_is_taken_of_a_full_window_only() -> None:
    streak = FailureStreak(limit=1000, max_fraction=0.0, window=3)
    streak.failed("r1", FailureReason.TIMEOUT, "late")
    streak.failed("r2", FailureReason.TIMEOUT, "late")
    with pytest.raises(TooManyFailures):
        streak.failed("r3", FailureReason.TIMEOUT, "late")


def test_an_unavailable_reward_is_asked_again_in_one_place_and_never_the_tasks_fault() -> None:
    """B105"""
    assert FailureReason.REWARD_UNAVAILABLE in FINAL - TASK_FAULT
    assert FailureReason.TOOL_UNAVAILABLE not in FINAL | TASK_FAULT | NO_FAULT, (
        "another attempt may find it; the row is not to blame"
    )
    assert FailureReason.BAD_GROUND_TRUTH in FINAL & TASK_FAULT


def test_a_tool_that_is_lost_ends_the_run_at_once_whatever_else_succeeds() -> None:
    """What is left to train on would be the rollouts that never call it."""
    streak = FailureStreak(limit=64, max_fraction=1.0)
    for _ in range(500):
        streak.succeeded()
    with pytest.raises(TooManyFailures, match="tool lost: tool browse: 8 calls"):
        streak.failed("t/0", FailureReason.TOOL_LOST, "tool browse: 8 calls of it do not end")
    assert FailureReason.TOOL_LOST not in TASK_FAULT
    assert FailureReason.TOOL_LOST in FINAL
