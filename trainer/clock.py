"""Where the trainer's wall clock goes.

Invariant: each moment since `start` belongs to exactly one activity, so the shares sum to 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from sample_bus.messages import TimeShares


class Activity(StrEnum):
    WAITING = "waiting"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    OTHER = "other"


class ActivityClock:
    """Attributes elapsed time to the current activity."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._current = Activity.OTHER
        self._since: float | None = None

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Attribute the time inside to `activity`; the first use starts the clock."""
        before = self._current
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[Activity, float]:
        """Seconds of each activity so far."""
        self._switch(self._current, start=False)
        return dict(self._seconds)

    def shares(self) -> TimeShares:
        """Fractions of the time since the clock started; all 0 before."""
        seconds = self.seconds()
        total = sum(seconds.values())
        if total == 0:
            return TimeShares()
        return TimeShares(**{str(activity): value / total for activity, value in seconds.items()})

    def _switch(self, activity: Activity, *, start: bool = True) -> None:
        now = self._now()
        if self._since is None:
            if not start:
                return
        else:
            self._seconds[self._current] += now - self._since
        self._since = now
        self._current = activity
