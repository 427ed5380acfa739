"""How late the event loop is, and what held it up: nothing that blocks may hide in a daemon that serves thousands of rollouts.

Invariant: a lag above `warn_s` leaves one warning that names the code which was running on the loop meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

import structlog

log = structlog.get_logger()

BEAT_S = 0.02
_SEEN_FRAMES = 3


class LoopLag:
    """Measures while `run` runs on the loop. `num_beats` beats make the window of `recent_ms`."""

    def __init__(
        self,
        *,
        warn_s: float = 0.25,
        num_beats: int = 500,
        clock: Callable[[], float] = time.monotonic,
        on_block: Callable[[float, str], None] | None = None,
    ) -> None:
        """`on_block(lag_s, where)` is told, on the loop, after each lag above `warn_s`; None: it is logged."""
        self._warn_s = warn_s
        self._clock = clock
        self._on_block = on_block or _warn
        self._lags: deque[float] = deque(maxlen=num_beats)
        self._worst_s = 0.0
        self._beat = threading.Event()
        self._is_over = False
        self._where = ""

    @property
    def recent_ms(self) -> float:
        """The longest lag in the window, in milliseconds."""
        return max(self._lags, default=0.0) * 1e3

    @property
    def worst_ms(self) -> float:
        """The longest lag since the start, in milliseconds."""
        return self._worst_s * 1e3

    async def run(self) -> None:
        """Beat until cancelled."""
        watched = threading.get_ident()
        watcher = threading.Thread(target=self._watch, args=(watched,), name="loop-lag", daemon=True)
        watcher.start()
        try:
            while True:
                due = self._clock() + BEAT_S
                await asyncio.sleep(BEAT_S)
                self.take(self._clock() - due)
        finally:
            self._is_over = True
            self._beat.set()

    def take(self, lag_s: float) -> None:
        """A beat came so many seconds late."""
        lag_s = max(0.0, lag_s)
        self._lags.append(lag_s)
        self._worst_s = max(self._worst_s, lag_s)
        where, self._where = self._where, ""
        self._beat.set()
        if lag_s > self._warn_s:
            self._on_block(lag_s, where or "unknown")

    def _watch(self, watched: int) -> None:
        """In a thread: whenever a beat is overdue, note what the loop's thread is doing."""
        while not self._is_over:
            self._beat.clear()
            if self._beat.wait(self._warn_s + BEAT_S):
                time.sleep(self._warn_s / 2)  # a beat came: the next look is due when one could be overdue again
                continue
            frame = sys._current_frames().get(watched)  # noqa: SLF001  (the documented way to see another thread)
            if frame is not None:
                self._where = _place_of(frame)
            self._beat.wait()


def _place_of(frame: FrameType | None) -> str:
    """The innermost calls, innermost first: `time.sleep` called from C shows as the Python line that calls it."""
    places: list[str] = []
    while frame is not None and len(places) < _SEEN_FRAMES:
        places.append(f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places)


def _warn(lag_s: float, where: str) -> None:
    log.warning("the event loop was blocked", lag_ms=round(lag_s * 1e3), where=where)
