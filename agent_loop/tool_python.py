"""Code that a model wrote, run: in a limited process here, or by a sandbox service.

Invariant: a process of the `python` tool ends with its call, its group with it; memory, processor time, files and output are
bounded. It runs as this user: it is kept from exhausting the host, not from reading it. Where that matters take a sandbox.
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

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "A Python program; what it prints is its result."}},
    "required": ["code"],
    "additionalProperties": False,
}
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_FILE_BYTES = 64 << 20
_REAPED_WITHIN_S = 2.0
_BOOT = """
import resource, sys
memory, cpu_s, file_bytes = map(int, sys.argv[1:4])
for what, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 128),
):
    resource.setrlimit(what, (limit, limit))
code = sys.stdin.buffer.read().decode("utf-8", "replace")
sys.argv = ["program.py"]
exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
"""


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
        with tempfile.TemporaryDirectory(prefix="headrace-python-", ignore_cleanup_errors=True) as directory:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-c",
                _BOOT,
                str(self._memory_bytes),
                str(int(self._timeout_s) + 1),
                str(_MAX_FILE_BYTES),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=directory,
                env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            return await self._finish(process, str(arguments["code"]))

    async def _finish(self, process: asyncio.subprocess.Process, code: str) -> str:
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        output = bytearray()
        reading = asyncio.create_task(_read(process.stdout, output))
        status: int | None = None
        try:
            async with asyncio.timeout(0.95 * self._timeout_s):  # in time to say so before the call's own deadline
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(code.encode("utf-8", "replace"))
                    await process.stdin.drain()
                process.stdin.close()
                status = await process.wait()
                await asyncio.wait((reading,), timeout=0.2)  # a child of it may hold the pipe open
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait((reading, asyncio.ensure_future(process.wait())), timeout=_REAPED_WITHIN_S)
            reading.cancel()
        text = output.decode("utf-8", "replace")
        if status is None:
            return f"{text}\nkilled after {self._timeout_s:g} s".lstrip("\n")
        if status < 0:
            return f"{text}\nkilled by signal {-status}".lstrip("\n")
        return text


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


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    """Everything, of which the first bytes are kept: a full pipe would stop the program."""
    while chunk := await stream.read(1 << 16):
        into += chunk[: _MAX_OUTPUT_BYTES - len(into)]
