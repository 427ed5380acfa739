"""Why rollouts fail, and when so many failed that the run must stop. Pure.

Invariant: a failure has one reason and is never a reward of 0; the streak ends with the first rollout that succeeds, while the
share is that of the newest rollouts, whatever succeeded in between.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from agent_loop.errors import (
    BadGeneration,
    BadGroundTruth,
    EngineError,
    EngineUnavailable,
    LoopError,
    NoRoom,
    ProgramUnavailable,
    RequestRefused,
    RewardError,
    RewardTimeout,
    RewardUnavailable,
    ToolLost,
    ToolUnavailable,
    Unscored,
)
from rollouter.errors import TooManyFailures
from sample_bus.errors import SampleTooLarge, WireError


class FailureReason(StrEnum):
    TIMEOUT = "timeout"
    ENGINE_UNAVAILABLE = "engine unavailable"
    REQUEST_REFUSED = "request refused"
    BAD_GENERATION = "bad generation"
    REWARD_FAILED = "reward failed"
    """The reward's code raised, or returned no number."""
    REWARD_UNAVAILABLE = "reward unavailable"
    """Its infrastructure failed as often as it was asked (reward.max_attempts): a judge, a sandbox, its process."""
    REWARD_TIMEOUT = "reward timeout"
    """Killed at reward.timeout_s."""
    BAD_GROUND_TRUTH = "bad ground truth"
    """The row's fault: nothing could be scored against it."""
    UNSCORED = "unscored"
    """The reward gave None."""
    TOOL_UNAVAILABLE = "tool unavailable"
    TOOL_LOST = "tool lost"
    """It hangs wherever it may be called, for good."""
    PROGRAM_UNAVAILABLE = "program unavailable"
    """A tool's infrastructure failed as often as it was asked: a sandbox, an MCP server."""
    NO_ROOM = "no room"
    AGENT_LOOP_FAILED = "agent loop failed"
    BAD_SAMPLE = "bad sample"
    """Refused before the offer, or by the trainer's end, which could not decode it."""
    SAMPLE_TOO_LARGE = "sample too large"
    GROUP_DEADLINE = "group deadline"
    """Its group was open for rollouter.group_timeout_s."""
    STALE = "stale"
    """Could no longer arrive within max_staleness; not a fault."""
    SIBLINGS_FAILED = "siblings failed"
    """A sibling was given up and the group goes with it; not a fault."""
    SIBLINGS_LOST = "siblings lost"
    """Its group's records went down with an older stream of this rollouter; not a fault."""
    INTERRUPTED = "interrupted"
    """This process was killed while it ran; not a fault, unless it happens again and again."""


FINAL = frozenset(
    {
        FailureReason.REQUEST_REFUSED,
        FailureReason.NO_ROOM,
        FailureReason.SAMPLE_TOO_LARGE,
        FailureReason.BAD_GROUND_TRUTH,
        FailureReason.UNSCORED,
        FailureReason.REWARD_UNAVAILABLE,
        FailureReason.TOOL_LOST,
    }
)
"""Another attempt could not end otherwise; or, of a reward that is unavailable, was made already where it was asked."""

NO_FAULT = frozenset(
    {FailureReason.STALE, FailureReason.SIBLINGS_FAILED, FailureReason.SIBLINGS_LOST, FailureReason.INTERRUPTED}
)
"""Given up for what happened elsewhere."""

_INFRASTRUCTURE = frozenset(
    {
        FailureReason.ENGINE_UNAVAILABLE,
        FailureReason.REWARD_UNAVAILABLE,
        FailureReason.TOOL_UNAVAILABLE,
        FailureReason.TOOL_LOST,
        FailureReason.PROGRAM_UNAVAILABLE,
    }
)

TASK_FAULT = frozenset(FailureReason) - NO_FAULT - _INFRASTRUCTURE
"""Counts towards the quarantine of the task."""

_REASONS: tuple[tuple[type[BaseException], FailureReason], ...] = (
    (TimeoutError, FailureReason.TIMEOUT),
    (EngineUnavailable, FailureReason.ENGINE_UNAVAILABLE),
    (RequestRefused, FailureReason.REQUEST_REFUSED),
    (BadGeneration, FailureReason.BAD_GENERATION),
    (EngineError, FailureReason.ENGINE_UNAVAILABLE),
    (RewardUnavailable, FailureReason.REWARD_UNAVAILABLE),
    (RewardTimeout, FailureReason.REWARD_TIMEOUT),
    (BadGroundTruth, FailureReason.BAD_GROUND_TRUTH),
    (Unscored, FailureReason.UNSCORED),
    (RewardError, FailureReason.REWARD_FAILED),
    (ToolLost, FailureReason.TOOL_LOST),
    (ToolUnavailable, FailureReason.TOOL_UNAVAILABLE),
    (NoRoom, FailureReason.NO_ROOM),
    (ProgramUnavailable, FailureReason.PROGRAM_UNAVAILABLE),
    (LoopError, FailureReason.AGENT_LOOP_FAILED),
    (WireError, FailureReason.BAD_SAMPLE),
    (SampleTooLarge, FailureReason.SAMPLE_TOO_LARGE),
)


def reason_of(error: BaseException) -> FailureReason:
    """The reason under which `error` is counted; what is not known came out of the agent loop."""
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return FailureReason.AGENT_LOOP_FAILED


@dataclass(slots=True, kw_only=True)
class FailureStreak:
    """Rollouts given up, in a row and among the newest ones: the failure budget of a run."""

    limit: int
    max_fraction: float = 1.0
    """Share of the newest `window` rollouts above which it stops the run; 1 never does."""
    window: int = 256
    length: int = 0
    first: str = ""
    """Words of the streak's first failure."""
    _newest: deque[tuple[FailureReason, str] | None] = field(default_factory=deque)
    """Reason and words of each of the newest rollouts; None: it succeeded."""

    def succeeded(self) -> None:
        self.length = 0
        self.first = ""
        self._push(None)

    def failed(self, rollout_id: str, reason: FailureReason, message: str) -> None:
        """Count a rollout that was given up. Raises TooManyFailures at a limit, with the first one's words, and for a tool that
        is lost: rollouts that call it would fail, and those that do not would be trained."""
        if reason in NO_FAULT:
            return
        words = f"rollout {rollout_id}: {reason}: {message}"
        if reason is FailureReason.TOOL_LOST:
            raise TooManyFailures(words)
        if self.length == 0:
            self.first = words
        self._push((reason, words))
        self._check_share()
        self.length += 1
        if self.length >= self.limit:
            raise TooManyFailures(
                f"{self.length} rollouts failed in a row (rollouter.max_consecutive_failures={self.limit}); first: {self.first}"
            )

    def _push(self, outcome: tuple[FailureReason, str] | None) -> None:
        self._newest.append(outcome)
        if len(self._newest) > self.window:
            self._newest.popleft()

    def _check_share(self) -> None:
        failures = [outcome for outcome in self._newest if outcome is not None]
        if len(self._newest) < self.window or len(failures) <= self.max_fraction * self.window:
            return
        counts = Counter(reason.value for reason, _ in failures)
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        raise TooManyFailures(
            f"{len(failures)} of the last {self.window} rollouts failed (rollouter.max_failed_fraction={self.max_fraction:g}): "
            f"{reasons}; first: {failures[0][1]}"
        )
