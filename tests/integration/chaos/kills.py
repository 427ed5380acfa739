"""Kills the processes of a run at random moments and starts them again, then lets the run come to its end.

Everything random follows from a seed, which the test prints: who is killed, and how long after what. Invariant: a process that
ends by itself before its time fails the run with the end of its log.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from console.journals import Journals
from tests.sample_bus.conformance.brokers import Broker
from tests.sample_bus.conformance.places import Place

ROOT = Path(__file__).parents[3]
PROGRESS_S = 120.0
END_S = 240.0
"""Deadlines against hangs."""


class Victim(StrEnum):
    PRODUCER = "producer"
    CONSUMER = "consumer"
    BROKER = "broker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    victims: tuple[Victim, ...]
    after_progress: bool
    """Wait until the run has gone on since the last kill; else strike while it starts."""
    delay_s: float
    """From then on."""
    down_s: float
    """How long they stay down."""


def plan(seed: int, number: int, *, with_broker: bool) -> list[Kill]:
    """At least `number` deaths."""
    draw = random.Random(seed)
    single = [Victim.PRODUCER, Victim.CONSUMER, *([Victim.BROKER] if with_broker else [])]
    kills: list[Kill] = []
    while sum(len(kill.victims) for kill in kills) < number:
        victims = draw.sample(single, 2 if draw.random() < 0.2 else 1)
        after_progress = draw.random() < 0.75
        kills.append(
            Kill(
                victims=tuple(victims),
                after_progress=after_progress,
                delay_s=draw.uniform(0.0, 0.25 if after_progress else 0.9),
                down_s=draw.choice([0.0, draw.uniform(0.0, 0.6)]),
            )
        )
    return kills


class Run:
    """The processes of one run."""

    def __init__(self, place: Place, run_dir: Path, broker: Broker | None) -> None:
        self.place = place
        self.run_dir = run_dir
        self._broker = broker
        self._processes: dict[Victim, asyncio.subprocess.Process] = {}
        self._logs: dict[Victim, BinaryIO] = {}

    async def start(self, victim: Victim) -> None:
        if victim is Victim.BROKER:
            assert self._broker is not None
            await self._broker.restart()
            return
        log = self._logs.setdefault(victim, (self.run_dir / f"{victim}.out").open("ab"))
        self._processes[victim] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"tests.integration.chaos.{victim}", self.place.as_text(), str(self.run_dir)),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    async def kill(self, victim: Victim) -> None:
        if victim is Victim.BROKER:
            assert self._broker is not None
            await self._broker.kill()
            return
        process = self._processes[victim]
        assert process.returncode is None, f"the {victim} ended by itself ({process.returncode}):\n{self.tail(victim)}"
        process.kill()
        await process.wait()

    async def carry_out(self, kills: list[Kill]) -> None:
        for kill in kills:
            if kill.after_progress:
                await self.progress()
            await asyncio.sleep(kill.delay_s)
            self.check_books()
            for victim in kill.victims:
                await self.kill(victim)
            self.check_books()
            await asyncio.sleep(kill.down_s)
            for victim in kill.victims:
                await self.start(victim)

    def check_books(self) -> str:
        """The identity as `headrace ledger` finds it, at whatever moment. Raises AssertionError if it does not close."""
        books = Journals.of(self.run_dir).read().books()
        assert books.closes, f"{books.line()}\n" + "\n".join(books.problems)
        return books.line()

    async def progress(self) -> None:
        """Wait until the trainer has written more into its journal than now."""
        before = self._written()
        try:
            async with asyncio.timeout(PROGRESS_S):
                while self._written() <= before:
                    self._check_alive()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"nothing was trained for {PROGRESS_S} s:\n{self.tails()}") from None

    async def finish(self) -> None:
        """Say that it is enough and see both processes end well."""
        (self.run_dir / "enough").touch()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(self._ended_well(victim) for victim in self._processes))
        except TimeoutError:
            raise AssertionError(f"the run did not end within {END_S} s:\n{self.tails()}") from None

    async def _ended_well(self, victim: Victim) -> None:
        code = await self._processes[victim].wait()
        assert code == 0, f"the {victim} ended with {code}:\n{self.tails()}"

    async def close(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        for log in self._logs.values():
            log.close()

    def tail(self, victim: Victim) -> str:
        return "\n".join((self.run_dir / f"{victim}.out").read_text().splitlines()[-25:])

    def tails(self) -> str:
        return "\n".join(f"── {victim}\n{self.tail(victim)}" for victim in self._processes)

    def _written(self) -> int:
        return sum(path.stat().st_size for path in self.run_dir.glob("journal/*/trainer.log"))

    def _check_alive(self) -> None:
        for victim, process in self._processes.items():
            assert process.returncode is None, f"the {victim} ended by itself ({process.returncode}):\n{self.tail(victim)}"


@asynccontextmanager
async def running(place: Place, run_dir: Path, broker: Broker | None) -> AsyncIterator[Run]:
    run = Run(place, run_dir, broker)
    try:
        await run.start(Victim.CONSUMER)
        await run.start(Victim.PRODUCER)
        yield run
    finally:
        await run.close()
