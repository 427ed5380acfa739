"""An event loop in a thread of its own, for code that is not ours.

Invariant: the caller waits for a result until its deadline and no longer, whatever the code does: sleeps, spins, swallows its
cancellation, blocks this loop, or tries to end it. A loop that is found blocked keeps the calls that it has begun, and a new
one takes the others. No call begins while too many of its kind were given up and do not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from agent_loop.errors import ToolLost, ToolUnavailable

log = structlog.get_logger()

T = TypeVar("T")
_ANSWERS_WITHIN_S = 0.5
"""A loop that takes longer to run one callback is blocked."""
_BEGINS_WITHIN_S = 1.0
_ENDS_WITHIN_S = 1.0
_MAX_STUCK = 64
_LOST_AFTER_S = 30.0
_LOST_AFTER_TIMEOUTS = 3.0
"""Calls that hang beyond their deadline for so long in all places hang for good."""


class SideLoop:
    """Made where it is needed; closed once nothing is asked of it any more."""

    def __init__(self, name: str, *, max_stuck: int = _MAX_STUCK) -> None:
        """`max_stuck`: calls of one kind that were given up and have not ended, above which no other of the kind begins."""
        self.name = name
        self._max_stuck = max_stuck
        self._stuck: Counter[str] = Counter()
        self._full_since: dict[str, float] = {}
        """By kind: when it was found that no call of it may begin."""
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._retired: set[_LoopThread] = set()
        self.num_replaced = 0
        """Times that the loop was found blocked."""

    async def run(self, work: Callable[[], Awaitable[T]], *, timeout_s: float, what: str) -> T:
        """The result of `work`, which runs on the side. Raises TimeoutError at the deadline, and what `work` raises.

        Raises ToolUnavailable where it is not the work's fault: too many of its kind (`what`) hang, another one blocks the
        loop, or the loop is closed; ToolLost where they have hung for so long that none of them is going to end. Cancelling the
        call cancels the work; nobody waits for it to end.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s
        while True:
            thread = self._started()
            if self._stuck[what] >= self._max_stuck:
                await thread.answers()  # so that those end that end when they are cancelled
            if self._stuck[what] >= self._max_stuck:
                raise self._refusal(what, full_s=clock() - self._full_since.setdefault(what, clock()), timeout_s=timeout_s)
            self._full_since.pop(what, None)
            call = _Call(what=what, ended=self._ended)
            future = thread.submit(call, work)
            waiting = asyncio.wrap_future(future)
            try:
                done, _ = await asyncio.wait((waiting,), timeout=min(_BEGINS_WITHIN_S, until - clock()))
                is_lost = not done and call.withdraw()
                if not done and not is_lost:
                    done, _ = await asyncio.wait((waiting,), timeout=max(0.0, until - clock()))
            except asyncio.CancelledError:
                self._give_up(call, future)
                raise
            if done:
                return _result(waiting, what, thread)
            self._give_up(call, future)
            if is_lost:
                self._replace(thread)
                if clock() < until:
                    continue
                raise ToolUnavailable(f"{what} did not begin within {timeout_s:g} s: its event loop is blocked")
            if not await thread.answers():
                blocking = thread.current_call()
                self._replace(thread)
                if blocking is not call:
                    by = blocking.what if blocking else "a callback"
                    raise ToolUnavailable(f"{what}: its event loop was blocked by {by}")
            raise TimeoutError(f"{what} gave no result within {timeout_s:g} s")

    def _refusal(self, what: str, *, full_s: float, timeout_s: float) -> ToolUnavailable:
        words = f"{what}: {self._stuck[what]} calls of it were given up and do not end (tools.max_concurrent)"
        if full_s < max(_LOST_AFTER_S, _LOST_AFTER_TIMEOUTS * timeout_s):
            return ToolUnavailable(words)
        return ToolLost(f"{words}, for {full_s:.0f} s: threads cannot be killed; give it a deadline of its own, or a process")

    def close(self) -> None:
        """End the threads; what still runs on them is cancelled, and left to itself if it does not end."""
        thread, self._thread = self._thread, None
        for one in (*self._retired, *([thread] if thread else [])):
            one.end()
        self._retired.clear()

    def _started(self) -> _LoopThread:
        if self._thread is None or not self._thread.is_alive:
            self._thread = _LoopThread(self.name)
        return self._thread

    def _replace(self, thread: _LoopThread) -> None:
        if thread is not self._thread:
            return
        self.num_replaced += 1
        log.warning("asynchronous code blocks its event loop", loop=self.name, running=thread.running())
        self._thread = None
        self._retired = {one for one in self._retired if one.is_alive} | {thread}
        thread.retire()

    def _give_up(self, call: _Call, future: Future[Any]) -> None:
        future.cancel()
        with self._lock:
            if not call.num_holders:
                return
            call.is_given_up = True
            self._stuck[call.what] += 1
            is_full = self._stuck[call.what] == self._max_stuck
        if is_full:
            log.warning("calls that were given up do not end", of=call.what, num=self._max_stuck)

    def _ended(self, call: _Call, by: int) -> None:
        with self._lock:
            call.num_holders += by
            if call.is_given_up and not call.num_holders:
                call.is_given_up = False
                self._stuck[call.what] -= 1


async def in_thread(work: Callable[[], T], *, name: str) -> T:
    """What `work` returns, in a daemon thread of its own: when it is given up nobody waits for it, and it counts as hanging for
    as long as it runs. Raises ToolUnavailable where no thread can be started."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    call = _CALL.get()

    def settle(error: BaseException | None, value: Any) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        error, value = None, None
        try:
            value = work()
        except BaseException as raised:  # noqa: BLE001 - it is handed on, whatever it is
            error = RuntimeError(f"{type(raised).__name__}: {raised}") if isinstance(raised, StopIteration) else raised
        finally:
            if call is not None:
                call.ended(call, -1)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error, value)

    if call is not None:
        call.ended(call, 1)
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        if call is not None:
            call.ended(call, -1)
        raise ToolUnavailable(f"{name}: no thread can be started: {error}") from error
    return await future


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class _Call:
    """Waits, has begun, or was withdrawn before it began."""

    what: str
    ended: Callable[[_Call, int], None]
    """Told of each coroutine or thread of it that begins (1) or ends (-1)."""
    num_holders: int = 0
    is_given_up: bool = False
    _first: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """False: it was withdrawn."""
        return self._first.acquire(blocking=False)

    withdraw = begin
    """False: it has begun."""


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


class _LoopThread:
    """One loop in its thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._calls: weakref.WeakKeyDictionary[asyncio.Task[Any], _Call] = weakref.WeakKeyDictionary()
        self._begun: set[_Call] = set()
        self._is_retired = False
        self.is_ending = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.is_ending

    def submit(self, call: _Call, work: Callable[[], Awaitable[T]]) -> Future[tuple[T | None, BaseException | None]]:
        return asyncio.run_coroutine_threadsafe(self._guarded(call, work), self._loop)

    async def answers(self) -> bool:
        """Whether it runs a callback in time."""
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        done, _ = await asyncio.wait((asyncio.wrap_future(answered),), timeout=_ANSWERS_WITHIN_S)
        return bool(done)

    def running(self) -> list[str]:
        return sorted({call.what for call in tuple(self._begun)})

    def current_call(self) -> _Call | None:
        """Whose code runs on it now."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._calls.get(task)

    def retire(self) -> None:
        """End once the calls that it has begun are over."""
        self._is_retired = True
        self._loop.call_soon_threadsafe(self._end_if_idle)

    def end(self) -> None:
        self.is_ending = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _guarded(self, call: _Call, work: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
        if not call.begin():
            return None, None
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        _CALL.set(call)
        self._calls[task] = call
        self._begun.add(call)
        call.ended(call, 1)
        try:
            return await work(), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
            return None, error
        finally:
            call.ended(call, -1)
            self._begun.discard(call)
            self._end_if_idle()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        call = _CALL.get()
        if call is not None:
            self._calls[task] = call
        return task

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._begun:
            self.end()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self.is_ending:
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - asyncio lets a SystemExit of any task end its loop
                log.warning("asynchronous code tried to end its event loop", running=self.running(), error=type(error).__name__)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_ENDS_WITHIN_S))
        self._loop.close()


def _result(waiting: asyncio.Future[tuple[T | None, BaseException | None]], what: str, thread: _LoopThread) -> T:
    if waiting.cancelled():
        if thread.is_ending:
            raise ToolUnavailable(f"{what} was cut off: its event loop was closed")
        raise RuntimeError(f"{what} was cancelled from within")
    value, error = waiting.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
