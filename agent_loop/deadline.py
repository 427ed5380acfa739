"""When an attempt has to have ended."""

from __future__ import annotations

import asyncio


class Deadline:
    """Belongs to one attempt and one event loop. An agent loop that waits for somebody else to begin may hold it meanwhile."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends_at: float | None = asyncio.get_running_loop().time() + timeout_s
        self._limit: asyncio.Timeout | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds; None while it is held."""
        return None if self._ends_at is None else self._ends_at - asyncio.get_running_loop().time()

    def limit(self) -> asyncio.Timeout:
        """A context that is cancelled at the deadline, wherever it is moved to."""
        self._limit = asyncio.timeout_at(self._ends_at)
        return self._limit

    def hold(self) -> None:
        """There is none until `begin`."""
        self._move(None)

    def begin(self) -> None:
        """The whole time is left from now."""
        self._move(asyncio.get_running_loop().time() + self.timeout_s)

    def _move(self, ends_at: float | None) -> None:
        self._ends_at = ends_at
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(ends_at)
