"""A program that plays rollouts, as a process of its own.

Invariant: the program and everything below it end with whoever waits for it, whatever it does, and with this process. Nobody
waits for what a program that has ended left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agent_loop.errors import ProgramUnavailable
from agent_loop.rewards.process import kill_tree
from configs.parent_death import die_with

_SETPRIV = shutil.which("setpriv")
_KEPT_BYTES = 1 << 16
_SHOWN_BYTES = 500
_REST_S = 0.5
"""For output on its way."""
_PROXIES = ("NO_PROXY", "no_proxy")
_MARK_VARIABLE = "HEADRACE_PROGRAM_MARK"
"""A number drawn for each program: by it everything that it started is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    status: int
    output: bytes = b""
    """The end of its standard output: 64 KiB."""
    errors: bytes = b""
    """The end of its standard error: 64 KiB."""

    @property
    def words(self) -> str:
        """The end of what it said, for an error."""
        return end_of(self.errors.strip() or self.output)


async def run_program(
    command: Sequence[str], variables: Mapping[str, str], *, into: IO[bytes] | None = None, grace_s: float = 0.0
) -> Ended:
    """Play `command` to its end, with `variables` beside this process's environment; what it prints goes `into` a file, if
    there is one.

    A command `python` is the Python that this process runs on. Cancelled, the program is asked to end by SIGTERM where it has
    `grace_s` for it, and then killed. Raises ProgramUnavailable when it cannot be started.
    """
    mark = secrets.token_hex(16)
    async with contextlib.AsyncExitStack() as stack:
        output = errors = None
        if into is None:
            output, errors = [await stack.enter_async_context(_tail()) for _ in range(2)]
        try:
            process = await asyncio.create_subprocess_exec(
                *_dying_with_this(sys.executable if command[0] == "python" else command[0], *command[1:]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=into if output is None else output.end,
                stderr=asyncio.subprocess.STDOUT if errors is None else errors.end,
                env={**os.environ, **variables, _MARK_VARIABLE: mark},
                start_new_session=True,
                preexec_fn=None if _SETPRIV else die_with(os.getpid(), signal.SIGKILL),
            )
        except OSError as error:
            raise ProgramUnavailable(f"gateway.command: {command[0]} cannot be started: {error.strerror or error}") from error
        try:
            status = await process.wait()
        finally:
            try:
                if process.returncode is None and grace_s > 0:
                    await _ask_to_end(process, grace_s)
            finally:  # also where who waits for the end has no patience
                await asyncio.shield(asyncio.to_thread(_kill_all, process.pid, process.returncode is not None, mark))
        if output is None or errors is None:
            return Ended(status=status)
        kept = [await tail.rest() for tail in (output, errors)]
        return Ended(status=status, output=kept[0], errors=kept[1])


def _dying_with_this(*command: str) -> tuple[str, ...]:
    """The command, killed when this process ends. What Python runs between fork and exec makes it copy this process first,
    which holds up the event loop; so util-linux's setpriv does it where it is installed.

    Raises FileNotFoundError, as exec would, for a command that is not there.
    """
    if _SETPRIV is None:
        return command
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return (_SETPRIV, "--pdeathsig", "KILL", "--", *command)


def beside_proxies(host: str) -> dict[str, str]:
    """Variables that keep HTTP clients from asking a proxy for `host`."""
    before = next((os.environ[name] for name in _PROXIES if os.environ.get(name)), "")
    return dict.fromkeys(_PROXIES, ",".join(filter(None, (before, host))))


def end_of(output: bytes) -> str:
    """The end of a program's output, for an error."""
    return output[-_SHOWN_BYTES:].decode("utf-8", "replace").strip()


async def _ask_to_end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await process.wait()


def _kill_all(pid: int, is_reaped: bool, mark: str) -> None:
    """Kill the program, everything below it, and what went into a session of its own: that still has the variable which only
    this program was given. Takes some milliseconds."""
    kill_tree(pid, is_reaped=is_reaped)
    given = f"{_MARK_VARIABLE}={mark}".encode()
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                if given in (place / "environ").read_bytes().split(b"\0"):
                    os.kill(int(place.name), signal.SIGKILL)


class _Tail:
    """A pipe of our own: asyncio waits for the end of the pipes that it makes, also after the process has ended."""

    def __init__(self, end: int, reader: asyncio.StreamReader) -> None:
        self.end = end
        """What the program writes to."""
        self._is_given = False
        """Whether it is the program's alone."""
        self._kept = bytearray()
        self._reading = asyncio.create_task(self._keep(reader))

    async def rest(self) -> bytes:
        """The end of what was written; the program and all that it started have ended."""
        self._give()
        await asyncio.wait((self._reading,), timeout=_REST_S)
        return bytes(self._kept)

    def close(self) -> None:
        self._give()
        self._reading.cancel()

    def _give(self) -> None:
        if not self._is_given:
            self._is_given = True
            os.close(self.end)

    async def _keep(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(1 << 16):
            self._kept += chunk
            if len(self._kept) > _KEPT_BYTES:
                del self._kept[:-_KEPT_BYTES]


@contextlib.asynccontextmanager
async def _tail() -> AsyncIterator[_Tail]:
    begin, end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(begin, "rb", 0)
    )
    tail = _Tail(end, reader)
    try:
        yield tail
    finally:
        tail.close()
        transport.close()
