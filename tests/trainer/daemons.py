"""A real trainer daemon in this process on a tiny model, and a scripted rollouter that offers fixed samples to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from configs.loader import load
from configs.paths import bus_address
from configs.schema import Settings
from sample_bus.journal import Record, read_journal
from sample_bus.messages import EndOfRun, TrainerStatus
from sample_bus.open import open_link
from sample_bus.protocols import Link
from tests.fakes.samples import make_closed, make_sample
from trainer.daemon import run

HANG_S = 120.0
"""Deadline against hangs; nothing is measured with it."""
GROUP_SIZE = 4
VOCABULARY = 15


def settings_for(run_dir: Path, **changes: Any) -> Settings:
    """Two groups of four a step, four steps, every step published."""
    values = {
        "run_dir": run_dir,
        "model.source": "tiny-sort",
        "model.warm_start_steps": 0,
        "model.cache_dir": run_dir.parent / "cache",
        "num_steps": 4,
        "group_size": GROUP_SIZE,
        "samples_per_step": 2 * GROUP_SIZE,
        "trainer.num_threads": 1,
        "trainer.learning_rate": 1e-3,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "bus.heartbeat_interval_s": 0.2,
        "bus.connect_timeout_s": 60,
        "bus.on_lost": "wait",
        "tracking.backends": "[jsonl]",
        **changes,
    }
    return load(None, [f"{key}={value}" for key, value in values.items()])


async def offer_group(link: Link, number: int, *, closed: Sequence[int] = ()) -> None:
    """The same samples for the same number, whoever offers them; seats in `closed` stay empty."""
    draw = np.random.default_rng([7, number])
    for seat in range(GROUP_SIZE):
        place: dict[str, Any] = {"group_id": f"g{number}", "seat": seat, "group_size": GROUP_SIZE}
        reply, logprobs = draw.integers(3, VOCABULARY, size=5).tolist(), (-2.7 - draw.random(5)).tolist()
        reward = float(draw.integers(0, 2))
        if seat in closed:
            await link.close_seat(make_closed(**place))
        else:
            await link.offer(make_sample(prompt=(4, 7, 13, 14), reply=reply, logprobs=logprobs, reward=reward, **place))


@asynccontextmanager
async def rollouter(settings: Settings) -> AsyncIterator[Link]:
    address = bus_address(settings)
    spool = settings.run_dir / "spool"
    async with open_link(settings.bus, address=address, name="rollouter", role="rollouter", spool_dir=spool) as link:
        await link.wait_connected(HANG_S)
        yield link


@asynccontextmanager
async def daemon(settings: Settings) -> AsyncIterator[asyncio.Task[None]]:
    """The trainer's task; it is over when the block is left."""
    task = asyncio.create_task(run(settings))
    try:
        yield task
        async with asyncio.timeout(HANG_S):
            await asyncio.wait((task,))
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def status_where(link: Link, condition: Any) -> TrainerStatus:
    async with asyncio.timeout(HANG_S):
        async for status in link.watch("trainer", TrainerStatus):
            if condition(status):
                return status
    raise AssertionError("the bus closed first")


async def end_of(link: Link) -> EndOfRun:
    async with asyncio.timeout(HANG_S):
        async for end in link.watch("end", EndOfRun):
            return end
    raise AssertionError("the bus closed first")


def journal(run_dir: Path, *kinds: type[Record]) -> list[Any]:
    """The trainer's records of the run that was there last."""
    run_id = (run_dir / "run_id").read_text().strip()
    path = run_dir / "journal" / run_id / "trainer.log"
    return [record for record in read_journal(path) if not kinds or isinstance(record, kinds)]


def opened_file(descriptor: int) -> str:
    """Path of an open file of this process."""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
