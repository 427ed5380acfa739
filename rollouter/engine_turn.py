"""The turn of an engine that switches while the others serve: one at a time, and none for longer than a switch may take.

Invariant: a turn is passed on once: when the switch has ended, or at its deadline, so that an engine that answers no more does
not keep the others from theirs.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Turn:
    """Use it as an async context manager: it is this engine's turn inside."""

    def __init__(self, lock: asyncio.Lock | None) -> None:
        """`lock` is shared by the engines that take turns; None: they do not."""
        self._lock = lock
        self._is_held = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._lock is not None:
            await self._lock.acquire()
            self._is_held = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def end_in(self, seconds: float) -> None:
        """The deadline begins: the engine is about to pause."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass_on)

    def _pass_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_held and self._lock is not None:
            self._is_held = False
            self._lock.release()
