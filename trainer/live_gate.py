"""When weights that are streamed from where they are trained may change: once those who need them have them.

Invariant: nothing is waited for beyond the deadline, and the wait ends at once when the publisher closes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from dataclasses import dataclass, field

from weight_sync.cache import RECEIVER


def awaited_of(*, staged: Set[str], engines: Set[str], has_rollouter: bool, has_cache: bool) -> frozenset[str]:
    """Who has to stage a version before it may go. A host's cache holds all of it, for every engine that comes later.

    engines: those that live. Pure.
    """
    if not has_rollouter or RECEIVER in staged or (engines and engines <= staged):
        return frozenset()
    return frozenset({RECEIVER}) if has_cache else frozenset(engines - staged)


@dataclass(slots=True, eq=False)
class LiveGate:
    """One version. The event loop says who has it; the thread that trains waits."""

    policy_version: int
    why: str
    """Why it is no copy."""
    due_at: float
    """On the monotonic clock."""
    staged: set[str] = field(default_factory=set)
    awaited: frozenset[str] = frozenset()
    _may_change: threading.Event = field(default_factory=threading.Event)

    def look(self, *, engines: Set[str], has_rollouter: bool, has_cache: bool) -> None:
        self.awaited = awaited_of(staged=self.staged, engines=engines, has_rollouter=has_rollouter, has_cache=has_cache)
        if self.awaited:
            self._may_change.clear()
        else:
            self._may_change.set()

    def give_up(self) -> None:
        """Let the waiting thread go on."""
        self.due_at = 0.0
        self._may_change.set()

    @property
    def is_open(self) -> bool:
        return self._may_change.is_set()

    @property
    def left_s(self) -> float:
        return max(0.0, self.due_at - time.monotonic())

    def wait(self) -> bool:
        """Blocks until nobody is awaited any more, or until the deadline; whether nobody was."""
        return self._may_change.wait(self.left_s)

    def __str__(self) -> str:
        names = ", ".join(sorted(self.awaited))
        return (
            f"{names} to stage policy version {self.policy_version}, which is streamed from the live weights ({self.why}); "
            f"weight_sync.stage_timeout_s ends the wait"
        )
