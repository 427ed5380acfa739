"""What follows when an attempt fails: another one, a fresh rollout, or a closed seat; and what becomes of the siblings. Pure.

Invariant: every chain of failures ends with a closed seat after a bounded number of attempts, counted over restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rollouter.failures import FINAL, FailureReason

MAX_INTERRUPTIONS = 8
"""Deaths of this process in a row in which one rollout may be caught without having got any further; then it may be what causes
them."""

_IN_VAIN = frozenset({FailureReason.STALE, FailureReason.SIBLINGS_FAILED, FailureReason.SIBLINGS_LOST})
"""The group is lost whatever else its seats bring: neither another attempt nor a fresh rollout would help."""


class Move(StrEnum):
    RETRY = "retry"
    """The next attempt of the same rollout, from its beginning."""
    CONTINUE = "continue"
    """The next attempt of the same rollout, from what the one before recorded."""
    REFILL = "refill"
    """The rollout is given up and a fresh one takes its seat."""
    CLOSE = "close"
    """The rollout is given up and its seat closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatPolicy:
    on_failed_seat: Literal["train_survivors", "drop", "refill"]
    min_survivors: int
    max_attempts: int
    max_refills: int
    """Fresh rollouts of one seat at most, where `on_failed_seat` is `refill`."""

    def next_move(self, reason: FailureReason, *, num_failed: int, num_interrupted: int, num_refills: int) -> Move:
        """`num_failed`: attempts of the present rollout that failed, this one included; `num_interrupted`: those of the seat
        that deaths of this process cut off and that got no further, this one included; `num_refills`: fresh rollouts that the
        seat has had."""
        if reason in _IN_VAIN:
            return Move.CLOSE
        if reason is FailureReason.INTERRUPTED:
            return Move.RETRY if num_interrupted < MAX_INTERRUPTIONS else Move.CLOSE
        if reason is not FailureReason.GROUP_DEADLINE and reason not in FINAL and num_failed < self.max_attempts:
            return Move.RETRY
        if self.on_failed_seat == "refill" and num_refills < self.max_refills:
            return Move.REFILL
        return Move.CLOSE

    def is_in_vain(self, reason: FailureReason, *, group_size: int, num_closed: int) -> bool:
        """Whether a group of which a seat is closed for `reason`, and `num_closed` in all, will be dropped by the trainer: what
        its other seats still do is in vain then."""
        return reason in _IN_VAIN or self.on_failed_seat == "drop" or group_size - num_closed < self.min_survivors
