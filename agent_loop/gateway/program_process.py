"""A program that plays rollouts, as a process of its own.

Invariant: the program and everything below it end with whoever waits for it, whatever it does, and with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from agent_loop.errors import LoopError
from agent_loop.rewards.process import kill_tree
from configs.parent_death import die_with

_KEPT_BYTES = 1 << 16
_SHOWN_BYTES = 500


async def run_program(
    command: Sequence[str], variables: Mapping[str, str], *, into: IO[bytes] | None = None, grace_s: float = 0.0
) -> tuple[int, bytes]:
    """(exit status, the end of its output: 64 KiB, of which none is kept when it goes `into` a file).

    A command `python` is the Python that this process runs on. Cancelled, the program is asked to end by SIGTERM where it has
    `grace_s` for it, and then killed. Raises LoopError when it cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable if command[0] == "python" else command[0], *command[1:]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if into is None else into,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),
        )
    except OSError as error:
        raise LoopError(f"gateway.command: {command[0]} cannot be started: {error.strerror or error}") from error
    kept = bytearray()
    reading = asyncio.create_task(_keep_end(process.stdout, kept))
    try:
        return await process.wait(), await _rest(reading, kept)
    finally:
        if process.returncode is None and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        await asyncio.to_thread(kill_tree, process.pid, is_reaped=process.returncode is not None)
        reading.cancel()


async def _rest(reading: asyncio.Task[None], kept: bytearray) -> bytes:
    # Whoever left the program's group may hold the pipe open: what is there by now is read, and no more.
    await asyncio.wait((reading,), timeout=1.0)
    return bytes(kept)


async def _keep_end(stream: Any, kept: bytearray) -> None:
    while stream is not None and (chunk := await stream.read(1 << 16)):
        kept += chunk
        if len(kept) > _KEPT_BYTES:
            del kept[:-_KEPT_BYTES]


def end_of(output: bytes) -> str:
    """The end of a program's output, for an error."""
    return output[-_SHOWN_BYTES:].decode("utf-8", "replace").strip()
