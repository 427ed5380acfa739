"""One reward process, from outside: started, asked, killed with everything below it, and started again.

Invariant: a call ends by its deadline with outcomes or an error; whatever missed the deadline no longer runs, and neither does
anything that it started, unless it hid in another session after its process had died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

import psutil
import structlog

from agent_loop.errors import RewardError, RewardTimeout, RewardUnavailable
from agent_loop.rewards.frames import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    Answer,
    FunctionSpec,
    Outcome,
    Ready,
    Reply,
    Request,
    Start,
    parse,
)
from agent_loop.rewards.loading import Form
from configs.schema import RewardSettings

log = structlog.get_logger()

_COMMAND = (sys.executable, "-m", "agent_loop.rewards.worker")
_MAX_LAST_WORDS = 2000
_GRACE_S = 1.0
"""For an async call that was taken back to end."""
_KILL_TIMEOUT_S = 10.0
_DRAIN_S = 0.2
"""For what a process wrote before it died."""


def forms_of(specs: Sequence[FunctionSpec], settings: RewardSettings) -> tuple[Form, ...]:
    """Load `specs` in a process of their own, run their self tests there, and tell how each is called. Blocks.

    Raises RewardError for what does not load.
    """
    with subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(_start(specs, settings).encode(), timeout=settings.start_timeout_s)
        except subprocess.TimeoutExpired:
            paths = ", ".join(spec.path for spec in specs)
            raise RewardError(f"{paths} took longer to load than reward.start_timeout_s={settings.start_timeout_s:g}") from None
        finally:
            kill_tree(process.pid, is_reaped=process.poll() is not None)
    size = int.from_bytes(out[:PREFIX_BYTES], "big")
    if len(out) < PREFIX_BYTES or len(out) < PREFIX_BYTES + size:
        raise RewardError(f"reward process {_end(process.returncode)} before its functions were loaded{_last(errors)}")
    ready = Ready.decode(parse(out[PREFIX_BYTES : PREFIX_BYTES + size]))
    if ready.refused:
        raise RewardError(ready.refused)
    return ready.forms


def kill_tree(pid: int, *, is_reaped: bool) -> None:
    """Kill a process that leads its group, everything below it, and the group; of a reaped one, whose id may be another's
    by now, the group alone. Blocks for some milliseconds."""
    if not is_reaped:
        with contextlib.suppress(psutil.Error):
            _kill_below(psutil.Process(pid))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_below(process: psutil.Process) -> None:
    process.suspend()
    found: dict[int, psutil.Process] = {}
    for _ in range(10):  # what is not suspended yet may start more
        fresh = [child for child in process.children(recursive=True) if child.pid not in found]
        for child in fresh:
            found[child.pid] = child
            with contextlib.suppress(psutil.Error):
                child.suspend()
        if not fresh:
            break
    process.kill()
    for child in found.values():
        with contextlib.suppress(psutil.Error):
            child.kill()


class RewardProcess:
    """A place for one process at a time."""

    def __init__(self, specs: Sequence[FunctionSpec], settings: RewardSettings) -> None:
        self._specs = tuple(specs)
        self._settings = settings
        self._lives: list[_Life] = []
        self._starting = asyncio.Lock()
        self.num_started = 0

    @property
    def pid(self) -> int | None:
        """Of the process that takes calls now."""
        return self._lives[-1].pid if self._lives and self._lives[-1].takes_calls else None

    async def start(self) -> None:
        """Have a process that takes calls. Raises RewardUnavailable, RewardTimeout."""
        await self._life()

    async def call(self, function: int, replies: Sequence[Reply], *, may_share: bool) -> tuple[Outcome, ...]:
        """Score `replies` in one call; one outcome each. `may_share`: other calls run in the process at the same time.

        Raises RewardTimeout at the deadline, RewardUnavailable when the process died, RewardError for what cannot be carried.
        """
        life = await self._life()
        try:
            return await life.call(function, replies, timeout_s=self._settings.timeout_s)
        except _Overdue as overdue:
            if not may_share or not await life.take_back(overdue.number):
                await self._end(life)
            raise RewardTimeout(
                f"reward {self._specs[function].path} took longer than reward.timeout_s={self._settings.timeout_s:g} for "
                f"{len(replies)} replies of {sum(len(one.solution_str) for one in replies)} characters (data source "
                f"{replies[0].data_source})"
            ) from None
        finally:
            if life.retires and not life.is_busy:
                await self._end(life)

    async def close(self) -> None:
        """Kill what runs."""
        for life in tuple(self._lives):
            await self._end(life)

    async def _life(self) -> _Life:
        async with self._starting:
            if not self._lives or not self._lives[-1].takes_calls:
                for life in tuple(self._lives):
                    if not life.is_busy:
                        await self._end(life)
                self._lives.append(await _begin(self._specs, self._settings))
                self.num_started += 1
            return self._lives[-1]

    async def _end(self, life: _Life) -> None:
        if life in self._lives:
            self._lives.remove(life)
        await life.end()


class _Overdue(Exception):
    """Raised when a call has no answer by its deadline."""

    def __init__(self, number: int) -> None:
        super().__init__(f"call {number}")
        self.number = number


class _Ears(asyncio.subprocess.SubprocessStreamProtocol):
    """Hears of the process's end when it ends: `wait` does only when nobody holds its pipes any more, and a fork of it may."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=1 << 16, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        self.exited.set()
        super().process_exited()


class _Life:
    """One process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, exited: asyncio.Event) -> None:
        self._process = process
        self._exited = exited
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self._hello: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._last_words = b""
        self._ended = False
        self.retires = False
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._hear_words())]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def takes_calls(self) -> bool:
        return not self._ended and not self.retires

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    async def ready(self, start: Start, timeout_s: float) -> Ready:
        """Hand it its functions. Raises RewardUnavailable, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._send(start.encode())
            return await self._hello

    async def call(self, function: int, replies: Sequence[Reply], *, timeout_s: float) -> tuple[Outcome, ...]:
        """Raises _Overdue, after which the call is still there to be taken back; RewardUnavailable, RewardError."""
        if self._ended:
            raise self._death()
        self._number += 1
        number = self._number
        data = Request(number=number, function=function, replies=tuple(replies)).encode()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(data)
                answer = await asyncio.shield(future)
        except TimeoutError:
            raise _Overdue(number) from None
        except BaseException:
            self._waiting.pop(number, None)
            raise
        self._waiting.pop(number, None)
        if len(answer.outcomes) != len(replies):
            raise RewardUnavailable(f"reward process gave {len(answer.outcomes)} outcomes, expected {len(replies)}")
        return answer.outcomes

    async def take_back(self, number: int) -> bool:
        """End an overdue call, leaving the others alone. False if that did not work."""
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._send(Request(number=number, function=0, replies=()).encode())
                await asyncio.wait((self._waiting[number],))
        except (TimeoutError, RewardUnavailable):
            return False
        finally:
            self._waiting.pop(number, None)
        return not self._ended

    async def end(self) -> None:
        """Kill it and everything below it; whoever waits for it is told."""
        self.retires = True
        await asyncio.to_thread(kill_tree, self.pid, is_reaped=self._process.returncode is not None)
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._exited.wait()
        except TimeoutError:
            log.warning("reward process does not die", pid=self.pid)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all()
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()  # pipes that a hidden grandchild holds open would keep it

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise self._death() from error

    async def _listen(self) -> None:
        """Take answers until the process dies or says what is none."""
        reading = asyncio.create_task(self._read())
        exiting = asyncio.create_task(self._exited.wait())
        try:
            await asyncio.wait((reading, exiting), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait((reading,), timeout=_DRAIN_S)
            await asyncio.wait((exiting,), timeout=_DRAIN_S)
        finally:
            reading.cancel()
            exiting.cancel()
            await asyncio.gather(reading, exiting, return_exceptions=True)
        self._ended = True
        await asyncio.to_thread(kill_tree, self.pid, is_reaped=self._process.returncode is not None)
        self._fail_all()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                size = int.from_bytes(await self._process.stdout.readexactly(PREFIX_BYTES), "big")
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                value = parse(await self._process.stdout.readexactly(size))
                if not self._hello.done():
                    self._hello.set_result(Ready.decode(value))
                    continue
                answer = Answer.decode(value)
                self.retires = self.retires or answer.retire
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)
        except asyncio.IncompleteReadError:
            return
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("reward process said what is no answer", pid=self.pid, error=f"{type(error).__name__}: {error}")

    async def _hear_words(self) -> None:
        assert self._process.stderr is not None
        while words := await self._process.stderr.read(1 << 16):
            self._last_words = (self._last_words + words)[-_MAX_LAST_WORDS:]
            log.debug("reward printed", pid=self.pid, text=words[-_MAX_LAST_WORDS:].decode(errors="replace"))

    def _fail_all(self) -> None:
        self._ended = True
        futures: list[asyncio.Future[Any]] = [*self._waiting.values(), self._hello]
        for future in futures:
            if not future.done():
                future.set_exception(self._death())
                future.exception()  # nobody may wait for it any more

    def _death(self) -> RewardUnavailable:
        return RewardUnavailable(f"reward process {self.pid} {_end(self._process.returncode)}{_last(self._last_words)}")


async def _begin(specs: Sequence[FunctionSpec], settings: RewardSettings) -> _Life:
    loop = asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: _Ears(loop), *_COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment(), start_new_session=True
        )
    except OSError as error:
        raise RewardUnavailable(f"a reward process cannot be started: {error.strerror or error}") from error
    life = _Life(asyncio.subprocess.Process(transport, protocol, loop), protocol.exited)
    try:
        ready = await life.ready(_start(specs, settings), settings.start_timeout_s)
    except BaseException as error:
        await asyncio.shield(life.end())
        if isinstance(error, TimeoutError):
            raise RewardUnavailable(
                f"a reward process was not ready within reward.start_timeout_s={settings.start_timeout_s:g}"
            ) from None
        raise
    if ready.refused:
        await life.end()
        raise RewardUnavailable(f"a reward process could not load its functions again: {ready.refused}")
    return life


def _start(specs: Sequence[FunctionSpec], settings: RewardSettings) -> Start:
    return Start(
        functions=tuple(specs),
        sys_path=tuple(sys.path),
        max_memory_bytes=settings.max_memory_bytes,
        timeout_s=settings.timeout_s,
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)  # noqa: PTH109 - a plain string is wanted
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


def _end(returncode: int | None) -> str:
    if returncode is None:
        return "ended"
    if returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"ended with exit status {returncode}"


def _last(words: bytes) -> str:
    lines = words.decode(errors="replace").strip().splitlines()
    return f"; it last said: {lines[-1]}" if lines else ""
