"""The test's side of `end_process`: an end of the bus in another process, which can be stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from tests.sample_bus.conformance.places import Place
from tests.sample_bus.ends import HANG_S, ROOT


class Remote:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, name: str, **words: Any) -> dict[str, Any]:
        """What the command gave. Raises AssertionError if the process ended or the command failed."""
        await self.tell(name, **words)
        return await self.answer()

    async def tell(self, name: str, **words: Any) -> None:
        """Give the command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **words}).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(HANG_S):
            line = await self._process.stdout.readline()
        assert line, "the process ended without an answer"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    async def tasks(self, number: int) -> list[str]:
        """Tasks of the next so many leases of a hub."""
        found: list[str] = (await self.do("lease", number=number))["tasks"]
        return found

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._wait()

    async def close(self) -> None:
        """End it in good order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._wait()

    async def _wait(self) -> None:
        async with asyncio.timeout(HANG_S):
            await self._process.wait()


@asynccontextmanager
async def remote(place: Place, end: Literal["hub", "link"], name: str) -> AsyncIterator[Remote]:
    """A hub of incarnation `name`, or a rollouter's link called `name`; killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.sample_bus.conformance.end_process", end, name, place.as_text()),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    peer = Remote(process)
    try:
        assert await peer.answer() == {"ready": True}
        yield peer
    finally:
        await peer.kill()
