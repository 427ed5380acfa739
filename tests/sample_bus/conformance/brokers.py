"""A real Redis server that a test kills, restarts and troubles."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis

from tests.sample_bus.conformance.places import Place
from tests.sample_bus.ends import HANG_S


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class Broker:
    def __init__(self, directory: Path, changes: dict[str, Any]) -> None:
        self.port = free_port()
        self._data = directory / "redis"
        self._process: asyncio.subprocess.Process | None = None
        self.place = Place(
            transport="redis",
            address=f"redis://127.0.0.1:{self.port}/0#run",
            directory=str(directory),
            broker_port=self.port,
            changes=changes,
        )

    async def restart(self) -> None:
        """Start it on what its data directory holds, and wait until it answers."""
        self._data.mkdir(parents=True, exist_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._data), "--save", ""),
            *("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(HANG_S):
            while not await asyncio.to_thread(self._answers):
                assert self._process.returncode is None, "redis-server did not start"
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            async with asyncio.timeout(HANG_S):
                await self._process.wait()

    def erase(self) -> None:
        """Take its data away while it is down."""
        shutil.rmtree(self._data)

    def command(self, *words: str) -> Any:
        with redis.Redis(port=self.port, socket_timeout=HANG_S) as client:
            return client.execute_command(*words)

    def configure(self, name: str, value: str) -> None:
        self.command("CONFIG", "SET", name, value)

    def _answers(self) -> bool:
        try:
            return bool(self.command("PING"))
        except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
            return False


@asynccontextmanager
async def running(directory: Path, changes: dict[str, Any] | None = None) -> AsyncIterator[Broker]:
    """A server whose place's bus has these settings."""
    broker = Broker(directory, changes or {})
    await broker.restart()
    try:
        yield broker
    finally:
        await broker.kill()
