"""What the rollouter says about itself: topic `rollouter`, on changes, at most every 100 ms, and at each heartbeat.

Invariant: the last state before the end is published; a burst of changes costs one message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sample_bus.messages import RollouterStatus
from sample_bus.protocols import Control

MIN_INTERVAL_S = 0.1
RATE_WINDOW_S = 10.0


class Rate:
    """Growth of a counter over the last `window_s` seconds. Pure: time is an argument."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()

    def take(self, now: float, total: int) -> None:
        """The counter stands at `total`; one point is kept per tenth of a second at most."""
        while len(self._points) > 1 and self._points[1][0] <= now - self._window_s:
            self._points.popleft()
        if len(self._points) > 1 and now - self._points[-2][0] < MIN_INTERVAL_S:
            self._points[-1] = (now, total)
        else:
            self._points.append((now, total))

    def per_s(self) -> float:
        """Growth per second over the window, 0.0 with fewer than two points."""
        if len(self._points) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


class StatusBoard:
    """Publishes what `compose` says."""

    def __init__(self, control: Control, compose: Callable[[], RollouterStatus], *, heartbeat_interval_s: float) -> None:
        self._control = control
        self._compose = compose
        self._heartbeat_interval_s = heartbeat_interval_s
        self._changed = asyncio.Event()

    def change(self) -> None:
        """Something that the status shows has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # nothing changed; rates may have
            self._changed.clear()
            await self.publish()
            await asyncio.sleep(MIN_INTERVAL_S)

    async def publish(self) -> None:
        await self._control.publish("rollouter", self._compose())
