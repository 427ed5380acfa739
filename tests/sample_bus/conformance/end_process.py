"""A process with one end of the bus, told what to do over its standard input, for tests that stop and kill it.

python -m tests.sample_bus.conformance.end_process (hub INCARNATION | link NAME) PLACE

Each line in is {"do": NAME, …}; each line out is what that gave, or {"error": TEXT}. Commands run one after the other, but for
those whose name begins with `start`: these are answered at once and go on by themselves.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from sample_bus.errors import BusError
from sample_bus.position import BusPosition
from sample_bus.protocols import Hub, Link
from sample_bus.sample import SampleId
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import closed_seat, sample, task_of

Answer = dict[str, Any]
Command = Callable[..., Awaitable[Answer]]


class HubCommands:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def seek(self, position: list[dict[str, Any]]) -> Answer:
        self._hub.seek(BusPosition.from_plain(position))
        return {}

    async def lease(self, number: int) -> Answer:
        leases = [await self._hub.lease() for _ in range(number)]
        return {"ids": [list(lease.id) for lease in leases], "tasks": [task_of(lease) for lease in leases]}

    async def acknowledge(self, ids: list[list[Any]]) -> Answer:
        self._hub.acknowledge([SampleId(*one) for one in ids])
        return {}

    async def position(self) -> Answer:
        return {"position": self._hub.position().as_plain()}

    async def commit(self, position: list[dict[str, Any]]) -> Answer:
        self._hub.commit(BusPosition.from_plain(position))
        return {}


class LinkCommands:
    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name
        self._offers: list[asyncio.Task[SampleId]] = []

    async def offer(self, numbers: list[int], size: int = 2) -> Answer:
        ids = [await self._link.offer(sample(number, producer=self._name, size=size)) for number in numbers]
        return {"ids": [list(one) for one in ids]}

    async def close_seats(self, numbers: list[int]) -> Answer:
        ids = [await self._link.close_seat(closed_seat(number, producer=self._name)) for number in numbers]
        return {"ids": [list(one) for one in ids]}

    async def start_offers(self, numbers: list[int], size: int = 2) -> Answer:
        self._offers += [
            asyncio.create_task(self._link.offer(sample(number, producer=self._name, size=size))) for number in numbers
        ]
        return {}

    async def finish_offers(self) -> Answer:
        return {"ids": [list(await offer) for offer in self._offers]}

    async def num_offered(self) -> Answer:
        return {"number": sum(offer.done() for offer in self._offers)}

    async def limit_files(self, num_bytes: int) -> Answer:
        """No file of this process may grow beyond so many bytes (negative: no limit)."""
        _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes if num_bytes >= 0 else resource.RLIM_INFINITY, hard))
        return {}


async def serve(commands: object) -> None:
    """Do what each line says until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"ready": True})
    while line := await reader.readline():
        words = json.loads(line)
        command: Command = getattr(commands, words.pop("do"))
        try:
            say(await command(**words))
        except BusError as error:
            say({"error": f"{type(error).__name__}: {error}"})


def say(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main(end: str, name: str, place: Place) -> None:
    if end == "hub":
        async with place.hub(incarnation=name) as hub:
            await serve(HubCommands(hub))
    else:
        async with place.link(name) as link:
            await serve(LinkCommands(link, name))


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an error
    asyncio.run(main(sys.argv[1], sys.argv[2], Place.from_text(sys.argv[3])))
