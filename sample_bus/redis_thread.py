"""A thread that serves one part of an end's traffic with Redis, and its mailbox.

Invariant: the event loop touches nothing of the thread's state and the other way round; commands go in by the mailbox, events
come out in batches, both in order. The thread sleeps in `wait_readable` on its connections and on `wake_fd`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable

import structlog

from sample_bus.carrier import Deliver
from sample_bus.events import Crashed, Event

log = structlog.get_logger()

_GRACE_S = 1.0
"""Beyond the flush, before a command under way is broken off."""
_END_S = 15.0
"""Deadline for the thread's end after that; a connect under way ends earlier."""


class IoThread:
    def __init__(self, name: str, *, deliver: Deliver) -> None:
        """`deliver` is called in the running event loop."""
        self.name = name
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[], None]] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._events: list[Event] = []
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    # ── called in the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def start(self, serve: Callable[[], None]) -> None:
        """Run `serve` in the thread; an error that leaves it is reported as Crashed."""
        self._thread = threading.Thread(target=lambda: self._run(serve), name=f"bus-{self.name}", daemon=True)
        self._thread.start()

    def command(self, command: Callable[[], None]) -> None:
        """Have the thread call `command`."""
        if self._ended.is_set():
            return
        self._commands.append(command)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self.wake_fd, 1)

    async def end(self, *, flush_s: float, abort: Callable[[], None]) -> None:
        """Wait for the thread, which was told to stop; `abort` breaks off what it waits for in vain."""
        if self._thread is None:
            self._finish()
            return
        try:
            async with asyncio.timeout(flush_s + _GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            abort()
            async with asyncio.timeout(_END_S):
                await self._ended.wait()
        self._thread.join()

    def _finish(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            os.close(self.wake_fd)

    # ── called in the thread ─────────────────────────────────────────────────────────────────────────────────────────

    def run_commands(self) -> None:
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            pass
        self._woken = False
        while self._commands:
            self._commands.popleft()()

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def hand_over(self) -> None:
        """Let the event loop have what was emitted."""
        if self._events:
            batch, self._events = self._events, []
            self._call_loop(lambda: self._deliver(batch))

    def _run(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception as error:
            log.exception("bus thread failed", thread=self.name)
            self.emit(Crashed(error=f"{type(error).__name__}: {error}"))
        finally:
            self.hand_over()
            self._call_loop(self._finish)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop was closed without closing the bus: nobody is left to tell
            log.debug("event loop is gone", thread=self.name)


class Backoff:
    """When to try again. Pure; doubles from `first_s` to `longest_s`."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def failed(self) -> float:
        """Seconds to wait after one more failure in a row."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s

    def worked(self) -> None:
        self._next_s = self._first_s
