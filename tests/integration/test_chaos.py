"""Producer, consumer and broker are killed at random moments: nothing is lost, nothing has its effect twice, the books close.

HEADRACE_CHAOS_SEED repeats a run's plan of kills; HEADRACE_CHAOS_KILLS makes it longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.chaos import kills
from tests.integration.chaos.oracle import outcome_of
from tests.sample_bus.conformance import brokers
from tests.sample_bus.conformance.places import Place

KILLS = int(os.environ.get("HEADRACE_CHAOS_KILLS", "30"))
BUS = {"on_lost": "wait", "max_queued_samples": 40, "connect_timeout_s": 120.0}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one, for the socket."""
    path = Path(tempfile.mkdtemp(prefix="hr-chaos-"))
    (path / "run").mkdir()
    yield path
    shutil.rmtree(path)


def new_seed() -> int:
    given = os.environ.get("HEADRACE_CHAOS_SEED")
    return int(given) if given else random.SystemRandom().randrange(1 << 32)


async def check(
    place: Place, run_dir: Path, broker: brokers.Broker | None, *, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run with so many deaths, in an existing empty directory."""
    seed = new_seed()
    planned = kills.plan(seed, number, with_broker=broker is not None)
    say(capsys, f"chaos on {place.transport}: HEADRACE_CHAOS_SEED={seed} HEADRACE_CHAOS_KILLS={number}")
    async with kills.running(place, run_dir, broker) as run:
        await run.progress()
        await run.carry_out(planned)
        await run.progress()
        await run.finish()
        say(capsys, run.check_books())
        outcome = await asyncio.to_thread(outcome_of, run_dir)
    say(capsys, outcome.line())
    assert outcome.problems == ()
    assert outcome.num_trained > outcome.num_closed > 0


def say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{line}")


@pytest.mark.parametrize("number", [4, pytest.param(KILLS, marks=pytest.mark.slow)])
async def test_kills_of_both_ends_lose_and_double_nothing_over_zmq(
    directory: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    place = Place(transport="zmq", address=f"ipc://{directory}/bus", directory=str(directory), changes=BUS)
    await check(place, directory / "run", None, number=number, capsys=capsys)


@pytest.mark.parametrize("number", [4, pytest.param(KILLS, marks=pytest.mark.slow)])
async def test_kills_of_both_ends_and_the_broker_lose_and_double_nothing_over_redis(
    directory: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    async with brokers.running(directory, changes=BUS) as broker:
        await check(broker.place, directory / "run", broker, number=number, capsys=capsys)
