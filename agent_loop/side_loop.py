"""An event loop in a thread of its own, for code that is not ours.

Invariant: the caller waits for a result until its deadline and no longer, whatever the code does: sleeps, spins, swallows its
cancellation, or blocks this loop. A loop that is found blocked is left to itself, and a new one takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
_ANSWERS_WITHIN_S = 0.5
"""A loop that takes longer to run one callback is blocked."""


class SideLoop:
    """Made where it is needed; `run` belongs to one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, str] = {}
        self._next = 0
        self.num_replaced = 0
        """Times that the loop was found blocked."""

    async def run(self, work: Callable[[], Awaitable[T]], *, timeout_s: float, what: str) -> T:
        """The result of `work`, which runs on the side. Raises TimeoutError at the deadline, and what `work` raises.

        Cancelling the call cancels the work; nobody waits for it to end.
        """
        loop = self._started()
        number, self._next = self._next, self._next + 1
        self._running[number] = what

        async def guarded() -> tuple[T | None, BaseException | None]:
            try:
                return await work(), None
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - handed on; a SystemExit must not end the side loop
                return None, error

        future = asyncio.run_coroutine_threadsafe(guarded(), loop)
        waiting = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait((waiting,), timeout=timeout_s)
            if not done:
                future.cancel()
                await self._replace_if_blocked(loop)
                raise TimeoutError(f"{what} gave no result within {timeout_s:g} s")
            if waiting.cancelled():
                raise RuntimeError(f"{what} was cancelled from within")
            value, error = waiting.result()
        except asyncio.CancelledError:
            future.cancel()
            raise
        finally:
            self._running.pop(number, None)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread; what still runs on it is cancelled, and left to itself if it does not end."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name=self.name, daemon=True).start()
        return self._loop

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        done, _ = await asyncio.wait((asyncio.wrap_future(answered),), timeout=_ANSWERS_WITHIN_S)
        if not done and loop is self._loop:
            self.num_replaced += 1
            log.warning("asynchronous code blocks its event loop", loop=self.name, running=sorted(set(self._running.values())))
            loop.call_soon_threadsafe(loop.stop)
            self._loop = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks: set[asyncio.Task[Any]] = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
    finally:
        loop.close()
