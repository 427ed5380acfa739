"""A trainer that was killed takes the same batches again, then goes on; what it cannot take again it says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sample_bus.journal import StepBegan
from tests.fakes.fake_consumer import FakeStreams
from tests.trainer.runs import SavedRun, names, offer_group, records, trainer
from trainer.plan import Batch


def _ids(batch: Batch) -> list[int]:
    return [lease.id.seq for group in batch.groups for lease in group.records]


async def test_the_steps_after_the_checkpoint_take_the_same_records_again(tmp_path: Path) -> None:
    """B38: what was in flight at the kill is trained once in effect; B88: the next batch is the next unseen one."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        for number in (0, 2, 1):
            offer_group(streams, number)
        offer_group(streams, 3, seats=(0,))
        await run.take_step()
        saved = run.save()
        run.consumer.commit(saved.position)
        for number in (4, 5, 6, 7):
            offer_group(streams, number)
        first = [await run.take_step(), await run.begin_step()]
    assert streams.kept().start == 4
    async with trainer(streams, path, saved, incarnation="second") as run:
        assert "taken again" in run.intake.waiting_for()
        again = [await run.take_step(), await run.take_step()]
        assert [_ids(batch) for batch in again] == [_ids(batch) for batch in first]
        assert [names(batch) for batch in again] == [names(batch) for batch in first]
        assert all(batch.replayed and batch.options == {"trainer.learning_rate": 0.1} for batch in again)
        offer_group(streams, 3, seats=(1,))
        after = await run.take_step()
        assert (names(after), after.replayed) == (["g7", "g3"], False)
        counts = run.intake.counts()
        assert (counts.received, counts.trained, counts.queued, counts.dropped) == (16, 16, 0, {})
    assert [record.step for record in records(path, StepBegan)] == [1, 2, 3, 2, 3, 4]


async def test_a_dropped_group_holds_no_position_back(tmp_path: Path) -> None:
    """B37: the second of many groups is dropped; the position passes it, and a restart asks for nothing old."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        offer_group(streams, 0)
        offer_group(streams, 1, seats=(0,), closed=(1,))
        for number in range(2, 75):
            offer_group(streams, number)
        for _ in range(37):
            await run.take_step()
        saved = run.save()
        run.consumer.commit(saved.position)
    assert (saved.position.of("rollouter", 1).watermark, saved.position.of("rollouter", 1).beyond) == (150, ())
    assert len(streams.kept()) == 0
    async with trainer(streams, path, saved, incarnation="second") as run:
        offer_group(streams, 75)
        offer_group(streams, 76)
        assert names(await run.take_step()) == ["g75", "g76"]


async def test_drops_are_taken_again_whatever_the_version_is_now(tmp_path: Path) -> None:
    """A group that was too old at version 9 is not trained by the process that stands at version 0 again."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path, max_staleness=4) as run:
        run.version = 9
        for number in range(5):
            offer_group(streams, number, version=0 if number == 1 else 9)
        await run.take_step()
        await run.begin_step()
        before = run.intake.counts()
    async with trainer(streams, path, max_staleness=4, incarnation="second") as run:
        batches = [await run.take_step(), await run.take_step()]
        assert [names(batch) for batch in batches] == [["g0", "g2"], ["g3", "g4"]]
        offer_group(streams, 1, seats=(0,))
        await run.rest()
        counts = run.intake.counts()
        assert before.dropped == {"stale": 2}
        assert counts.dropped == {"stale": 3}


async def test_a_late_result_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    """B40: its group was trained before the checkpoint, by another process."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        offer_group(streams, 0)
        offer_group(streams, 1)
        await run.take_step()
        saved = run.save()
        offer_group(streams, 2)
        offer_group(streams, 3)
        await run.take_step()
    async with trainer(streams, path, saved, incarnation="second") as run:
        offer_group(streams, 1, seats=(0,))
        offer_group(streams, 2, seats=(0,))
        await run.take_step()
        await run.rest()
        counts = run.intake.counts()
        assert (counts.trained, counts.late_results, counts.queued) == (8, 2, 0)


async def test_steps_whose_records_are_gone_are_named_and_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint of step 2 is lost after its position was committed: step 1's records are nowhere, step 3's go on."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        for number in range(6):
            offer_group(streams, number)
        for _ in range(2):
            await run.take_step()
        run.consumer.commit(run.save().position)
        await run.take_step()
    async with trainer(streams, path, incarnation="second") as run:
        batch = await run.take_step()
        assert (names(batch), batch.replayed) == (["g4", "g5"], False)
        counts = run.intake.counts()
        assert (counts.received, counts.trained, counts.dropped) == (12, 4, {"lost with a trainer": 8})
    said = capsys.readouterr().out
    assert "steps cannot be taken again" in said
    assert "[1, 2, 3]" in said


async def test_a_producer_with_another_stream_ends_the_plan(tmp_path: Path) -> None:
    """Its disk was lost with it: what it had offered and no checkpoint covers is booked as lost with the producer."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        for number in range(4):
            offer_group(streams, number)
        await run.take_step()
        await run.begin_step()
    streams.lose()
    async with trainer(streams, path, incarnation="second") as run:
        for number in (7, 8):
            offer_group(streams, number, epoch=2)
        batch = await run.take_step()
        assert (names(batch), batch.replayed) == (["g7", "g8"], False)
        counts = run.intake.counts()
        assert (counts.received, counts.trained, counts.dropped) == (12, 4, {"producer lost": 8})


async def test_what_was_lost_is_booked_once_over_many_restarts(tmp_path: Path) -> None:
    """Lost before the checkpoint: its counts hold it. Lost after it: every process that goes on from there books it again."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        offer_group(streams, 0, seats=(0, 1, 2), closed=(3,), size=4)
        offer_group(streams, 1, seats=(0,))
        await run.rest()
    streams.lose()
    saved, expected = SavedRun(), {"producer lost": 4}
    for life in range(3):
        async with trainer(streams, path, saved, incarnation=f"before {life}") as run:
            offer_group(streams, 2 + life, epoch=2)
            await run.rest()
            assert run.intake.counts().dropped == expected
            if life == 2:
                await run.take_step()
                saved = run.save()
                run.consumer.commit(saved.position)
                offer_group(streams, 5, epoch=2)
                offer_group(streams, 6, epoch=2)
                await run.take_step()
                run.consumer.commit(run.consumer.position())
    for life in range(2):
        async with trainer(streams, path, saved, incarnation=f"after {life}") as run:
            await run.rest()
            assert run.intake.counts().dropped == {**expected, "lost with a trainer": 4}


async def test_a_group_half_of_which_was_lost_with_its_stream_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Seats 0 and 1 were received by a trainer that died, then the producer's disk was lost; it plays seats 2 and 3 on."""
    streams, path = FakeStreams(), tmp_path / "log"
    async with trainer(streams, path) as run:
        offer_group(streams, 0, seats=(0, 1), size=4)
        await run.rest()
    streams.lose()
    async with trainer(streams, path, incarnation="second") as run:
        offer_group(streams, 0, seats=(2, 3), size=4, epoch=2)
        await run.rest()
        counts = run.intake.counts()
        assert (counts.received, counts.dropped, counts.queued, counts.refunded) == (4, {"producer lost": 4}, 0, 2)


@pytest.mark.parametrize("seed", range(12))
async def test_kills_at_random_moments_change_no_batch(tmp_path: Path, seed: int) -> None:
    """B38: against a run that nobody killed: the same batches in the same order, each sample once in effect."""
    rng = random.Random(seed)
    orders = _random_order(rng, num_groups=24)
    straight = FakeStreams()
    async with trainer(straight, tmp_path / "straight") as run:
        for number, seat in orders:
            offer_group(straight, number, seats=(seat,))
        expected = [_ids(await run.take_step()) for _ in range(12)]
    streams, path, saved, fed = FakeStreams(), tmp_path / "log", SavedRun(), 0
    effect: dict[int, list[int]] = {}
    kills = 0
    while len(effect) < 12 or saved.step < 12:
        async with trainer(streams, path, saved, incarnation=f"process {kills}") as run:
            lives = rng.randrange(1, 6)
            while run.step < 12:
                while fed < len(orders) and fed < (run.step + 2) * 6:
                    offer_group(streams, orders[fed][0], seats=(orders[fed][1],))
                    fed += 1
                batch = await run.begin_step()
                if lives == 0:
                    break
                run.finish_step(batch)
                effect[run.step] = _ids(batch)
                if rng.random() < 0.4 or run.step == 12:
                    saved = run.save()
                    if rng.random() < 0.7:
                        run.consumer.commit(saved.position)
                lives -= 1
            counts = run.intake.counts()
        kills += 1
    assert [effect[step] for step in sorted(effect)] == expected
    assert (counts.trained, counts.dropped) == (48, {})
    assert kills > 1


def _random_order(rng: random.Random, *, num_groups: int) -> list[tuple[int, int]]:
    """(group, seat) of every sample, siblings up to three groups apart."""
    seats = [(number, seat) for number in range(num_groups) for seat in range(2)]
    return sorted(seats, key=lambda place: place[0] + rng.random() * 3)
