"""What the rollouter does when the trainer's process is killed."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from configs.schema import Settings
from sample_bus.errors import PeerLost
from tests.fakes.fake_engine import FakeEngine
from tests.rollouter.stand_in import DEADLINE_S, make_settings, running_rollouter


@asynccontextmanager
async def _trainer(settings: Settings, incarnation: str, version: int) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.rollouter.fake_trainer",
        settings.bus.address,
        str(settings.run_dir),
        incarnation,
        str(version),
        settings.bus.on_lost,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        while line := (await process.stdout.readline()).decode().strip():
            if line.startswith("trained"):
                return line
    raise AssertionError("the trainer's process ended")


async def test_killed_trainer_ends_the_rollouter_when_it_is_told_to_fail(tmp_path: Path) -> None:
    """B14"""
    settings = make_settings(tmp_path, bus__heartbeat_timeout_s=1.0)
    engine = FakeEngine()
    async with _trainer(settings, "first", 0) as trainer, running_rollouter(settings, engine) as rollouter:
        assert await _line(trainer) == "trained 8 [('first', 0)]"
        trainer.kill()
        with pytest.raises(PeerLost, match=r"silent|last heard"):
            await rollouter.ended()
    assert engine.closed


async def test_killed_trainer_is_waited_for_and_its_successor_served(tmp_path: Path) -> None:
    """B17: the engines take the successor's version before a sample is made for it, and its evaluation, which bears the same
    number as the dead one's and is asked for before the engines hold its version."""
    settings = make_settings(tmp_path, bus__heartbeat_timeout_s=1.0, bus__on_lost="wait")
    engine = FakeEngine()
    async with running_rollouter(settings, engine) as rollouter:
        async with _trainer(settings, "first", 7) as trainer:
            assert await _line(trainer) == "trained 8 [('first', 7)]"
        async with _trainer(settings, "second", 5) as successor:
            assert await _line(successor) == "trained 8 [('second', 5)]"
        assert not rollouter.task.done()
    assert engine.synced == [("first", 7), ("second", 5)]
