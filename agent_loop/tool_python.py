"""Code that a model wrote, run: in a limited process here, or by a sandbox service.

Invariant: a process of the `python` tool ends with its call, and with this process, and so does all that it started. Memory,
processor time and files of each process are bounded, and its output. How many processes it starts is not, and it runs as this
user: it may exhaust the host, read it, and kill what watches it. Where that matters take a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import aiohttp

from agent_loop.errors import ToolUnavailable
from agent_loop.tools import ToolContext
from configs.parent_death import adopt_orphans, die_with

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "A Python program; what it prints is its result."}},
    "required": ["code"],
    "additionalProperties": False,
}
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_FILE_BYTES = 64 << 20
_REAPED_WITHIN_S = 1.0
_DRAINED_WITHIN_S = 0.2
"""A process that got away may hold the pipe open."""
_BOOT = """
import os, resource, signal, sys
memory, cpu_s, file_bytes = map(int, sys.argv[1:4])
code = sys.stdin.buffer.read().decode("utf-8", "replace")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

def below():
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [program]

def end(number=None, frame=None):
    while True:
        for pid in below():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    if number is not None:
        os._exit(1)

signal.signal(signal.SIGTERM, end)
program = os.fork()
if program:
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    end()
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
for what, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 128),
):
    resource.setrlimit(what, (limit, limit))
sys.argv = ["program.py"]
exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
"""
"""A process that outlives the program and ends what that leaves behind, sessions of its own included: whatever is orphaned
below it becomes its child."""


class PythonTool:
    """`Tool`: each call is a process of its own, started anew in an empty directory."""

    name = "python"
    description = "Runs a Python program and returns what it prints."
    parameters = _PARAMETERS

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """What the program printed, its error behind it; says so when it was killed."""
        prepare = die_with(os.getpid())

        def before() -> None:
            prepare()
            adopt_orphans()

        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="headrace-python-", ignore_cleanup_errors=True) as directory:
            reading_end, writing_end = os.pipe()  # not asyncio's: there a process is over when all of its pipes are
            kept = _Kept()
            pipe, _ = await loop.connect_read_pipe(lambda: kept, os.fdopen(reading_end, "rb", 0))
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-c",
                    _BOOT,
                    str(self._memory_bytes),
                    str(int(self._timeout_s) + 1),
                    str(_MAX_FILE_BYTES),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=writing_end,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=directory,
                    env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                    preexec_fn=before,
                )
                os.close(writing_end)
                writing_end = -1
                status = await self._finish(process, str(arguments["code"]), kept)
            finally:
                if writing_end >= 0:
                    os.close(writing_end)
                pipe.close()
        text = kept.output.decode("utf-8", "replace")
        if status is None:
            return f"{text}\nkilled after {self._timeout_s:g} s".lstrip("\n")
        if status < 0:
            return f"{text}\nkilled by signal {-status}".lstrip("\n")
        return text

    async def _finish(self, process: asyncio.subprocess.Process, code: str, kept: _Kept) -> int | None:
        """Its exit status; None: it was killed at its deadline."""
        assert process.stdin is not None, "a pipe was asked for"
        try:
            async with asyncio.timeout(0.95 * self._timeout_s):  # in time to say so before the call's own deadline
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(code.encode("utf-8", "replace"))
                    await process.stdin.drain()
                process.stdin.close()
                status = await process.wait()
            await asyncio.wait((kept.ended,), timeout=_DRAINED_WITHIN_S)
            return status
        except TimeoutError:
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # it ends what is below it
                await asyncio.wait((asyncio.ensure_future(process.wait()),), timeout=_REAPED_WITHIN_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class SandboxTool:
    """`Tool`: the program goes to a service that speaks SandboxFusion's interface."""

    name = "python"
    description = PythonTool.description
    parameters = _PARAMETERS

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._timeout_s = timeout_s

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """What the program printed, and its error. Raises ToolUnavailable when the service gives no usable answer."""
        body = {"code": arguments["code"], "language": "python", "run_timeout": 0.9 * self._timeout_s}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s)) as session,
                session.post(self._url, json=body) as answer,
            ):
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    raise ToolUnavailable(f"sandbox {self._url}: got status {answer.status}, expected 200: {text}")
                told = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ToolUnavailable(f"sandbox {self._url}: {type(error).__name__}: {error}") from error
        result = told.get("run_result") if isinstance(told, dict) else None
        if not isinstance(result, dict) or told.get("status") == "SandboxError":
            raise ToolUnavailable(f"sandbox {self._url}: got {str(told)[:200]}, expected a run_result")
        text = f"{result.get('stdout') or ''}{result.get('stderr') or ''}"
        return text if result.get("status") != "TimeLimitExceeded" else f"{text}\nkilled: it took too long".lstrip("\n")


class _Kept(asyncio.Protocol):
    """Takes everything, of which the first bytes are kept: a full pipe would stop the program."""

    def __init__(self) -> None:
        self.output = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.output += data[: _MAX_OUTPUT_BYTES - len(self.output)]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
