"""Every record received is queued, handed out once, or dropped with a counted reason; the journal says which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sample_bus.journal import Queued, RecordsDropped, RecordsGone
from sample_bus.protocols import Lease
from tests.fakes.fake_consumer import FakeStreams
from tests.trainer.runs import names, offer_group, records, trainer
from trainer.groups import DropReason


async def test_batch_is_the_oldest_whole_groups(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(0,))
        for number in (1, 2, 3):
            offer_group(streams, number)
        batch = await run.begin_step()
        assert names(batch) == ["g1", "g2"]
        assert not batch.replayed
        assert run.consumer.settled == []
        run.finish_step(batch)
        assert len(run.consumer.settled) == 4
        counts = run.intake.counts()
        assert (counts.received, counts.trained, counts.queued) == (7, 4, 3)
        assert "group g0 lacks seats [1]" in run.intake.waiting_for()


@pytest.mark.parametrize(("bound", "kept"), [(5, 0), (6, 1)])
async def test_group_that_aged_in_the_queue_is_dropped_when_the_batch_is_taken(tmp_path: Path, bound: int, kept: int) -> None:
    """B30: finished at version 3, wanted at version 9."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", max_staleness=bound) as run:
        run.version = 3
        offer_group(streams, 0, version=3)
        batch = asyncio.ensure_future(run.begin_step())
        await asyncio.sleep(0)
        run.version = 9
        offer_group(streams, 1, version=9)
        if not kept:
            offer_group(streams, 2, version=9)
        assert ("g0" in names(await batch)) == bool(kept)
        assert run.intake.counts().dropped == ({} if kept else {"stale": 2})


async def test_closed_seats_are_settled_with_their_group_and_counted_apart(tmp_path: Path) -> None:
    """B13: three of four are trained; the step takes as many groups, whatever their survivors."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(0, 1, 2), closed=(3,), size=4)
        offer_group(streams, 1, seats=(0, 2), closed=(1, 3), size=4)
        batch = await run.take_step()
        assert [(len(group.members), len(group.closures)) for group in batch.groups] == [(3, 1), (2, 2)]
        counts = run.intake.counts()
        assert (counts.received, counts.trained, counts.closed, counts.queued, counts.refunded) == (5, 5, 3, 0, 0)
        assert run.intake.settled_counts() == counts
        assert len(run.consumer.settled) == 8
    assert [record.closed for record in records(tmp_path / "log", Queued)].count("timeout") == 3


async def test_samples_and_closed_seats_of_a_dropped_group_are_refunded(tmp_path: Path) -> None:
    """B76: a group whose last survivor is alone costs the budget nothing."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(2,), closed=(0, 1, 3), size=4)
        await run.rest()
        counts = run.intake.counts()
        assert (counts.dropped, counts.closed, counts.refunded) == ({"group incomplete": 1}, 3, 4)
        assert run.consumer.num_dropped == 4


async def test_late_results_are_counted(tmp_path: Path) -> None:
    """B40: 33 results for 32 seats; the surplus is refused, and counted as such."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", groups_per_step=1) as run:
        offer_group(streams, 0)
        await run.take_step()
        offer_group(streams, 0, seats=(1,))
        await run.rest()
        counts = run.intake.counts()
        assert (counts.trained, counts.late_results, counts.dropped) == (2, 1, {"duplicate seat": 1})


async def test_books_balance_after_drops_lost_streams_and_the_end_of_the_run(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(0,))
        offer_group(streams, 1)
        offer_group(streams, 2)
        await run.rest()
        streams.lose()
        offer_group(streams, 5, epoch=2)
        offer_group(streams, 6, seats=(0,), epoch=2)
        await run.take_step()
        await run.rest()
        run.intake.close_unfinished()
        counts = run.intake.counts()
        assert counts.dropped == {"producer lost": 1, "run ended": 3}
        assert (counts.received, counts.trained, counts.queued) == (8, 4, 0)
        assert len(run.consumer.settled) == len(set(run.consumer.settled)) == 8
        assert run.consumer.num_dropped == counts.refunded == 4
    dropped = [record.reason for record in records(tmp_path / "log", RecordsDropped)]
    assert set(dropped) == {"producer lost", "run ended"}


async def test_groups_of_a_lost_stream_are_given_up_before_the_new_stream_brings_anything(tmp_path: Path) -> None:
    """The rollouter waits for their places at a staleness threshold of 0."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(0,))
        await run.rest()
        streams.lose()
        offer_group(streams, 1, epoch=2)
        run.intake.note_streams(run.consumer.position())
        assert run.intake.counts().refunded == 1


async def test_records_that_no_producer_has_any_more_are_booked_as_lost_with_a_trainer(tmp_path: Path) -> None:
    """No checkpoint: what an earlier process settled and committed is gone, closed seats are no samples."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 0, seats=(0, 1, 2), closed=(3,), size=4)
        offer_group(streams, 1)
        await run.take_step()
        run.consumer.commit(run.consumer.position())
    async with trainer(streams, tmp_path / "log", incarnation="second") as run:
        await run.rest()
        counts = run.intake.counts()
        assert (counts.received, counts.dropped, counts.refunded) == (5, {"lost with a trainer": 5}, 0)
        offer_group(streams, 2)
        offer_group(streams, 3)
        batch = await run.take_step()
        assert not batch.replayed
        assert names(batch) == ["g2", "g3"]
    assert [record.num_records for record in records(tmp_path / "log", RecordsGone)] == [6]


async def test_every_leased_record_is_kept_once_for_later(tmp_path: Path) -> None:
    class Notebook:
        def __init__(self) -> None:
            self.kept: list[Lease] = []

        def keep(self, lease: Lease) -> None:
            self.kept.append(lease)

    streams, notebook = FakeStreams(), Notebook()
    async with trainer(streams, tmp_path / "log") as run:
        run.intake._retained = notebook
        offer_group(streams, 0, seats=(0,), closed=(1,))
        await run.rest()
        assert [lease.id.seq for lease in notebook.kept] == [0, 1]
        assert run.intake.counts().dropped == {DropReason.GROUP_INCOMPLETE: 1}
