"""A sequence of events that several tasks follow, each at its own pace. Lives in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    def __init__(self) -> None:
        self._events: list[T] = []
        self._closed = False
        self._more = asyncio.Event()

    @property
    def newest(self) -> T | None:
        return self._events[-1] if self._events else None

    def add(self, event: T) -> None:
        self._events.append(event)
        self.pulse()

    def close(self) -> None:
        """End all followers once they have seen everything."""
        self._closed = True
        self.pulse()

    async def follow(self, *, from_newest: bool = False) -> AsyncIterator[T]:
        """All events from the first (or from the newest) on, then each new one, until closed."""
        position = max(0, len(self._events) - 1) if from_newest else 0
        while True:
            while position < len(self._events):
                position += 1
                yield self._events[position - 1]
            if self._closed:
                return
            await self._more.wait()

    async def wait_next(self) -> None:
        """Wait for the next event, close or `pulse`."""
        await self._more.wait()

    def pulse(self) -> None:
        """Wake everybody who waits."""
        self._more.set()
        self._more = asyncio.Event()
