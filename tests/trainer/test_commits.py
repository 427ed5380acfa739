"""Producers free their copies only of what nobody can ask for again."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from sample_bus.journal_writer import JournalWriter
from tests.fakes.fake_consumer import FakeConsumer, FakeStreams
from tests.trainer.runs import offer_group, trainer
from trainer.commits import Commits


@pytest.mark.parametrize("at_once", [True, False])
async def test_without_periodic_checkpoints_what_is_settled_is_committed_at_once(tmp_path: Path, at_once: bool) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        commits = Commits(run.consumer, run.journal, at_once=at_once)
        run.intake._on_settled = commits.settled
        running = asyncio.ensure_future(commits.run())
        for number in range(3):
            offer_group(streams, number)
        await run.take_step()
        for _ in range(5):
            await asyncio.sleep(0)
        assert streams.kept().start == (4 if at_once else 0)
        commits.saved(run.consumer.position())
        assert streams.kept().start == 4
        commits.hold()
        run.intake.close_unfinished()
        commits.finish()
        assert len(run.consumer.settled) == 6
        assert streams.kept().start == 4, "what was let go after the checkpoint at the end may be asked for again"
        running.cancel()


async def test_nothing_is_committed_while_the_journal_does_not_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        commits = Commits(run.consumer, run.journal, at_once=True)
        run.intake._on_settled = commits.settled
        running = asyncio.ensure_future(commits.run())
        offer_group(streams, 0)
        offer_group(streams, 1)
        await run.rest()
        with monkeypatch.context() as full:
            full.setattr(os, "pwritev", _no_space)
            await run.take_step()
            for _ in range(5):
                await asyncio.sleep(0)
            assert run.journal.is_blocked
            commits.finish()
            assert streams.kept().start == 0
        async with asyncio.timeout(30):
            await run.journal.flush()
        for _ in range(5):
            await asyncio.sleep(0)
        assert streams.kept().start == 4
        running.cancel()


async def test_the_last_settlement_of_a_run_is_committed_too(tmp_path: Path) -> None:
    streams = FakeStreams()
    consumer, journal = FakeConsumer(streams), JournalWriter(tmp_path / "log")
    commits = Commits(consumer, journal, at_once=True)
    commits.finish()
    assert consumer.commits == []
    commits.settled()
    commits.finish()
    assert len(consumer.commits) == 1
    journal.close()


def _no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
