"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds; `advance` moves it forward."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"advance: got {seconds} s, expected >= 0: this clock never goes back")
        self._now += seconds
