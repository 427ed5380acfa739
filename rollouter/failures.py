"""Why rollouts fail, and when so many failed that the run must stop. Pure.

Invariant: a failure has one reason and is never a reward of 0; the streak ends with the first rollout that succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_loop.errors import BadGeneration, EngineError, EngineUnavailable, LoopError, NoRoom, RequestRefused, RewardError
from rollouter.errors import TooManyFailures
from sample_bus.errors import SampleTooLarge, WireError


class FailureReason(StrEnum):
    TIMEOUT = "timeout"
    ENGINE_UNAVAILABLE = "engine unavailable"
    REQUEST_REFUSED = "request refused"
    BAD_GENERATION = "bad generation"
    REWARD_FAILED = "reward failed"
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


FINAL = frozenset({FailureReason.REQUEST_REFUSED, FailureReason.NO_ROOM, FailureReason.SAMPLE_TOO_LARGE})
"""Another attempt could not end otherwise."""

NO_FAULT = frozenset(
    {FailureReason.STALE, FailureReason.SIBLINGS_FAILED, FailureReason.SIBLINGS_LOST, FailureReason.INTERRUPTED}
)
"""Given up for what happened elsewhere."""

TASK_FAULT = frozenset(FailureReason) - NO_FAULT - {FailureReason.ENGINE_UNAVAILABLE}
"""Counts towards the quarantine of the task."""

_REASONS: tuple[tuple[type[BaseException], FailureReason], ...] = (
    (TimeoutError, FailureReason.TIMEOUT),
    (EngineUnavailable, FailureReason.ENGINE_UNAVAILABLE),
    (RequestRefused, FailureReason.REQUEST_REFUSED),
    (BadGeneration, FailureReason.BAD_GENERATION),
    (EngineError, FailureReason.ENGINE_UNAVAILABLE),
    (RewardError, FailureReason.REWARD_FAILED),
    (NoRoom, FailureReason.NO_ROOM),
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
    """Rollouts given up in a row."""

    limit: int
    length: int = 0
    first: str = ""

    def succeeded(self) -> None:
        self.length = 0
        self.first = ""

    def failed(self, rollout_id: str, reason: FailureReason, message: str) -> None:
        """Count a rollout that was given up. Raises TooManyFailures at the limit, with the first one's words."""
        if reason in NO_FAULT:
            return
        if self.length == 0:
            self.first = f"rollout {rollout_id}: {reason}: {message}"
        self.length += 1
        if self.length >= self.limit:
            raise TooManyFailures(
                f"{self.length} rollouts failed in a row (rollouter.max_consecutive_failures={self.limit}); first: {self.first}"
            )
