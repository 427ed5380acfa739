"""Why attempts failed since this process began: by reason, how many and what the first one said, for whoever watches. Pure.

Invariant: training rollouts and those of evaluations are noted apart; what is nobody's fault is not noted.
"""

from __future__ import annotations

from collections.abc import Callable

from configs.shortened import in_a_line
from rollouter.failures import NO_FAULT, FailureReason
from sample_bus.messages import FailureNote

MAX_WORDS = 600
"""Characters of the first failure's words that are kept."""


class FailureNotes:
    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._notes: dict[tuple[FailureReason, bool], FailureNote] = {}
        self._on_change = on_change

    def add(self, reason: FailureReason, message: str, *, is_evaluation: bool) -> None:
        """An attempt failed for `reason`, in the words of `message`."""
        if reason in NO_FAULT:
            return
        known = self._notes.get((reason, is_evaluation))
        if known is None:
            first = in_a_line(message, MAX_WORDS)
            known = FailureNote(reason=reason.value, is_evaluation=is_evaluation, count=0, first=first)
        self._notes[reason, is_evaluation] = known.model_copy(update={"count": known.count + 1})
        self._on_change()

    def all(self) -> tuple[FailureNote, ...]:
        """In the order in which each reason was first seen."""
        return tuple(self._notes.values())
