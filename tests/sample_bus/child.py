"""A process with one end of the bus, for tests that stop and kill it.

python -m tests.sample_bus.child hub ADDRESS INCARNATION             leases, never acknowledges, says each task_id
python -m tests.sample_bus.child rollouter ADDRESS NAME NUMBER SIZE  offers NUMBER samples of SIZE tokens, says `offered`, stays
python -m tests.sample_bus.child burst ADDRESS NAME NUMBER SIZE      the same, but exits at once after the last offer
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import structlog

from sample_bus.protocols import Leased
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import hub_at, link_to


def say(what: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"what": what, **more}) + "\n")
    sys.stdout.flush()


async def hub(address: str, incarnation: str) -> None:
    async with hub_at(address, incarnation=incarnation, max_queued_samples=4) as end:
        say("open")
        while True:
            leased = await end.lease()
            assert isinstance(leased, Leased)
            say("leased", task_id=leased.sample.task_id)


async def rollouter(address: str, name: str, number: int, size: int, *, stay: bool) -> None:
    async with link_to(address, name=name) as link:
        await link.wait_connected(30)
        async with asyncio.TaskGroup() as tasks:
            for index in range(number):
                tasks.create_task(link.offer(make_sample(reply=[1] * size, task_id=f"{name}-{index}")))
        if not stay:
            os._exit(0)
        say("offered")
        await asyncio.sleep(60)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    command, address, name, *numbers = sys.argv[1:]
    if command == "hub":
        asyncio.run(hub(address, name))
    else:
        asyncio.run(rollouter(address, name, int(numbers[0]), int(numbers[1]), stay=command == "rollouter"))
