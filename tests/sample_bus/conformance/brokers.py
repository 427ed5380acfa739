"""A Redis server that a test kills, restarts and troubles, and the bus that it carries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.sample_bus.conformance.places import Place
from tests.sample_bus.redis_server import RedisServer, redis_server


class Broker:
    def __init__(self, server: RedisServer, directory: Path, changes: dict[str, Any]) -> None:
        self._server = server
        self.place = Place(
            transport="redis",
            address=server.address,
            directory=str(directory),
            broker_port=server.port,
            changes=changes,
        )

    async def kill(self) -> None:
        """SIGKILL."""
        await asyncio.to_thread(self._server.kill)

    async def restart(self) -> None:
        """Start it again on what it left, and wait until it answers."""
        await asyncio.to_thread(self._server.start)

    def erase(self) -> None:
        """Take its data away while it is down."""
        self._server.forget()

    def command(self, *words: str) -> Any:
        return self._server.command(*words)

    def configure(self, name: str, value: str) -> None:
        self.command("CONFIG", "SET", name, value)


@asynccontextmanager
async def running(directory: Path, changes: dict[str, Any] | None = None) -> AsyncIterator[Broker]:
    """A server whose place's bus has these settings; its appended file is synced each second."""
    with redis_server() as server:
        yield Broker(server, directory, changes or {})
