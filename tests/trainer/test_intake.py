"""Every sample received is queued, handed out once, or dropped with a counted reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from sample_bus.ledger import Ledger
from sample_bus.messages import RolloutCounts
from sample_bus.protocols import ConsumerStatistics, Leased
from sample_bus.sample import SampleId
from tests.fakes.samples import lease, make_sample
from trainer.intake import Intake


class QueueConsumer:
    """A consumer fed by the test."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Leased] = asyncio.Queue()
        self.settled: list[SampleId] = []
        self.num_dropped = 0

    async def lease(self) -> Leased:
        leased = await self.queue.get()
        self.queue.task_done()
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        self.settled += ids
        self.num_dropped += len(ids) if dropped else 0

    def consumer_statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(received=0, queued=0, queued_bytes=0, rejected=0, duplicates=0)


def _feed(
    consumer: QueueConsumer, group: int, *, seq: int, version: int = 0, epoch: int = 1, seats: Sequence[int] = (0, 1)
) -> None:
    for seat in seats:
        sample = make_sample(group_id=f"g{group}", seat=seat, group_size=2, policy_version=version)
        consumer.queue.put_nowait(lease(sample, seq + seat, epoch=epoch))


def _intake(consumer: QueueConsumer, *, max_staleness: int | None = None) -> Intake:
    return Intake(consumer, group_size=2, samples_per_step=4, max_staleness=max_staleness, incarnation="first")


async def test_batch_is_the_oldest_whole_groups() -> None:
    consumer = QueueConsumer()
    intake = _intake(consumer)
    running = asyncio.ensure_future(intake.run())
    _feed(consumer, 0, seq=0, seats=(0,))
    _feed(consumer, 1, seq=2)
    _feed(consumer, 2, seq=4)
    _feed(consumer, 3, seq=6)
    async with asyncio.timeout(30):
        batch = await intake.next_batch(lambda: 0)
    assert [group.group_id for group in batch] == ["g1", "g2"]
    assert consumer.settled == []
    intake.settle_trained(batch)
    assert len(consumer.settled) == 4
    counts = intake.counts()
    assert (counts.received, counts.trained, counts.queued) == (7, 4, 3)
    assert "group g0 lacks seats [1]" in intake.waiting_for()
    running.cancel()


@pytest.mark.parametrize(("bound", "kept"), [(5, 0), (6, 1)])
async def test_group_that_aged_in_the_queue_is_dropped_when_the_batch_is_taken(bound: int, kept: int) -> None:
    """B30: finished at version 3, wanted at version 9."""
    consumer = QueueConsumer()
    intake = _intake(consumer, max_staleness=bound)
    running = asyncio.ensure_future(intake.run())
    version = 3
    _feed(consumer, 0, seq=0, version=3)
    batch = asyncio.ensure_future(intake.next_batch(lambda: version))
    await asyncio.sleep(0)
    version = 9
    _feed(consumer, 1, seq=2, version=9)
    if not kept:
        _feed(consumer, 2, seq=4, version=9)
    async with asyncio.timeout(30):
        groups = await batch
    assert ("g0" in [group.group_id for group in groups]) == bool(kept)
    assert intake.counts().dropped == ({} if kept else {"stale": 2})
    running.cancel()


async def test_books_balance_after_drops_restarts_and_the_end_of_the_run() -> None:
    consumer = QueueConsumer()
    intake = _intake(consumer)
    running = asyncio.ensure_future(intake.run())
    _feed(consumer, 0, seq=0, seats=(0,))
    _feed(consumer, 1, seq=2)
    _feed(consumer, 2, seq=4)
    _feed(consumer, 5, seq=0, epoch=2)
    _feed(consumer, 6, seq=2, epoch=2, seats=(0,))
    async with asyncio.timeout(30):
        batch = await intake.next_batch(lambda: 0)
    intake.settle_trained(batch)
    await consumer.queue.join()
    intake.close_group("g6", "seat 1: reward raised")
    intake.close_unfinished()
    running.cancel()
    counts = intake.counts()
    assert counts.dropped == {"producer lost": 1, "group incomplete": 1, "run ended": 2}
    assert (counts.trained, counts.queued) == (4, 0)
    assert len(consumer.settled) == len(set(consumer.settled)) == 8
    assert consumer.num_dropped == 4
    assert Ledger(rollouts=RolloutCounts(admitted=8, offered=8), samples=counts).closes
