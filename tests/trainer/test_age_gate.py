"""Aged groups at the intake: dropped, asked for again, weighted down, or waited for; the same after a restart."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_bus.journal import RecordsDropped, RetriesTaken, RetryAsked, StepBegan
from sample_bus.messages import RollouterState, RollouterStatus
from sample_bus.spread import mean
from tests.fakes.fake_clock import FakeClock
from tests.fakes.fake_consumer import FakeStreams
from tests.fakes.samples import make_closed, make_sample
from tests.trainer.runs import GROUP_SIZE, names, offer_group, records, trainer
from trainer.advantages import group_advantages
from trainer.age_gate import AgeGate
from trainer.aged import AgeRule, Awaited, Lineage, OnStale
from trainer.groups import Group
from trainer.plan import Batch


def rule(on_stale: OnStale, max_staleness: int | None = 1, **changes: Any) -> Callable[[], AgeRule]:
    return lambda: AgeRule(on_stale=on_stale, max_staleness=max_staleness, **changes)


def offer(streams: FakeStreams, group_id: str, *versions: int, **changes: Any) -> None:
    """A whole group, one seat for each version."""
    for seat, version in enumerate(versions):
        streams.offer(
            make_sample(
                group_id=group_id,
                seat=seat,
                group_size=len(versions),
                policy_version=version,
                task_id=group_id.partition("#")[0],
                **changes,
            )
        )


def status(oldest: int | None, incarnation: str = "first") -> RollouterStatus:
    return RollouterStatus(state=RollouterState.GENERATING, incarnation=incarnation, oldest_in_flight_version=oldest)


# ── drop and retry ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_age_is_judged_at_consumption_though_the_sample_was_fresh_when_it_came(tmp_path: Path) -> None:
    """B48: versions moved on while its reward was computed and while it lay here."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.DROP, 2), groups_per_step=1) as run:
        run.version = 4
        offer(streams, "a#0@p", 2, 4)
        await run.rest()
        assert run.intake.counts().dropped == {}
        run.version = 5
        offer(streams, "b#1@p", 3, 5)
        assert names(await run.take_step()) == ["b#1@p"]
        assert run.intake.counts().dropped == {"stale": 2}


async def test_a_stale_groups_task_is_asked_for_once_and_a_bounded_number_of_times(tmp_path: Path) -> None:
    """B34: a task that always takes too long is dropped for good in the end, and the others are trained."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.RETRY, max_requeues=2), groups_per_step=1) as run:
        run.version = 9
        for again, name in enumerate(("slow#0@p", "slow#0@p+1", "slow#0@p+2")):
            offer(streams, name, 0, 9)
            offer(streams, f"quick#{again + 1}@p", 9, 9)
            assert names(await run.take_step()) == [f"quick#{again + 1}@p"]
        assert run.intake.counts().dropped == {"stale, retried": 4, "stale, no retry left": 2}
        assert [task.group_id for task in run.retries.topic().tasks] == ["slow#0@p", "slow#0@p+1"]
        assert run.intake.counts().refunded == 6
    assert [(record.group_id, record.task_id) for record in records(tmp_path / "log", RetryAsked)] == [
        ("slow#0@p", "slow"),
        ("slow#0@p+1", "slow"),
    ]


async def test_a_group_given_up_in_flight_for_its_age_is_asked_for_again_once(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.RETRY)) as run:
        streams.offer(make_closed(group_id="t#0@p", seat=0, group_size=3, reason="stale", task_id="t"))
        streams.offer(make_sample(group_id="t#0@p", seat=1, group_size=3, task_id="t"))
        streams.offer(make_closed(group_id="t#0@p", seat=2, group_size=3, reason="siblings failed", task_id="t"))
        await run.rest()
        assert run.retries.num_pending == 1
        assert run.intake.counts().dropped == {"stale, retried": 1}
        assert run.intake.bias().dropped.closed_seats == 2
    assert len(records(tmp_path / "log", RetryAsked)) == 1


async def test_a_retry_is_asked_for_once_though_its_drop_is_taken_again_after_a_restart(tmp_path: Path) -> None:
    """The journal knows it, whether the rollouter had taken it before the restart or not."""
    streams = FakeStreams()
    for life, incarnation in enumerate(("first", "second", "third")):
        async with trainer(
            streams, tmp_path / "log", rule=rule(OnStale.RETRY), groups_per_step=1, incarnation=incarnation
        ) as run:
            run.version = 9
            if not life:
                offer(streams, "t#0@p", 0, 0)
                offer(streams, "u#1@p", 9, 9)
            batch = await run.take_step()
            assert (names(batch), batch.replayed) == (["u#1@p"], life > 0)
            assert run.intake.counts().dropped == {"stale, retried": 2}
            assert [task.group_id for task in run.retries.topic().tasks] == (["t#0@p"] if life < 2 else [])
            if life == 1:
                run.retries.take(["t#0@p"])
    assert len(records(tmp_path / "log", RetryAsked)) == 1
    assert [record.group_ids for record in records(tmp_path / "log", RetriesTaken)] == [["t#0@p"]]


@pytest.mark.parametrize("on_stale", list(OnStale))
async def test_a_stale_members_siblings_go_with_it_or_keep_it_in_their_baseline(tmp_path: Path, on_stale: OnStale) -> None:
    """B33: rewards 0, 1, 1, 0, and the first is too old. Dropped with its siblings, its reward shapes nothing; weighted down,
    it stays one of the four that the advantages are relative to."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(on_stale), groups_per_step=1) as run:
        run.version = 4
        for seat, reward in enumerate((0.0, 1.0, 1.0, 0.0)):
            version = 4 if seat else 1
            place: dict[str, Any] = {"group_id": "t#0@p", "seat": seat, "group_size": 4}
            streams.offer(make_sample(reward=reward, policy_version=version, **place))
        offer(streams, "u#1@p", 4, 4)
        batch = await run.take_step()
        if on_stale is not OnStale.DOWNWEIGHT:
            assert names(batch) == ["u#1@p"]
            assert sum(run.intake.counts().dropped.values()) == 4
            return
        samples = [one.sample for group in batch.groups for one in group.members]
        advantages = group_advantages(
            np.array([sample.reward for sample in samples], np.float32),
            [sample.group_id for sample in samples],
            normalize_by_std=False,
        )
        assert advantages.tolist() == [-0.5, 0.5, 0.5, -0.5]


# ── downweight ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_with_downweight_nothing_is_dropped_and_the_journal_says_how_it_was_weighted(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.DOWNWEIGHT, weight_base=0.25)) as run:
        run.version = 5
        offer(streams, "a#0@p", 3, 5, reply=[1] * 7)
        offer(streams, "b#1@p", 4, 5)
        batch = await run.take_step()
        assert batch.weighting is not None
        weights = [batch.weighting.weights(one.sample)[-1] for group in batch.groups for one in group.members]
        assert weights == [0.25, 1, 1, 1]
        report = run.intake.bias()
        assert (report.trained.length.count, report.downweighted.length.count, report.dropped.length.count) == (3, 1, 0)
        assert mean(report.downweighted.length) == 7
    (began,) = records(tmp_path / "log", StepBegan)
    assert began.weighting == batch.weighting.as_plain()


async def test_a_step_is_taken_again_with_the_weights_that_it_had(tmp_path: Path) -> None:
    """Although the rule and the incarnation are others now, and a version that sampled of it was lost meanwhile."""
    streams = FakeStreams()

    def weights(batch: Batch) -> list[list[float]]:
        assert batch.weighting is not None
        return [batch.weighting.weights(one.sample).tolist() for group in batch.groups for one in group.members]

    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.DOWNWEIGHT)) as run:
        run.version = 5
        offer(streams, "a#0@p", 1, 2)
        offer(streams, "b#1@p", 3, 5)
        first = weights(await run.begin_step())
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.DROP, 0), incarnation="second") as run:
        batch = await run.begin_step()
        assert batch.replayed
        assert weights(batch) == first


# ── wait ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_last_step_of_a_version_is_held_for_what_the_next_one_would_make_too_old(tmp_path: Path) -> None:
    """B30: and the aged group goes before those that came earlier, so that it is trained in time."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.WAIT), groups_per_step=2) as run:
        run.version, run.ends_version = 3, True
        run.intake.take_status(status(2))
        for number in range(3):
            offer(streams, f"young#{number}@p", 3, 3)
        step = asyncio.ensure_future(run.take_step())
        await run.rest()
        assert not step.done()
        waits = run.intake.waiting_for()
        assert waits.startswith("version 4 is held (on_stale=wait) for rollouts in flight since version 2, at most 120 s")
        offer(streams, "old#9@p", 3, 2)
        await run.rest()
        assert not step.done()
        run.intake.take_status(status(3))
        assert names(await step) == ["old#9@p", "young#0@p"]
        run.version = 4
        assert names(await run.take_step()) == ["young#1@p", "young#2@p"]
        assert run.intake.counts().dropped == {}


async def test_steps_before_the_last_of_a_version_are_not_held(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.WAIT), groups_per_step=1) as run:
        run.version = 3
        run.intake.take_status(status(2))
        offer(streams, "young#0@p", 3, 3)
        assert names(await run.take_step()) == ["young#0@p"]


async def test_a_step_is_held_for_the_missing_seats_of_an_aged_group(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.WAIT), groups_per_step=1) as run:
        run.version, run.ends_version = 3, True
        offer_group(streams, 7, seats=(0,), version=2)
        offer(streams, "young#0@p", 3, 3)
        step = asyncio.ensure_future(run.take_step())
        await run.rest()
        assert "for the missing seats of 1 groups" in run.intake.waiting_for()
        offer_group(streams, 7, seats=(1,), version=3)
        assert names(await step) == ["g7"]


async def test_what_another_trainers_rollouts_are_is_not_waited_for(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.WAIT), groups_per_step=1) as run:
        run.version, run.ends_version = 3, True
        run.intake.take_status(status(2, incarnation="another"))
        offer(streams, "young#0@p", 3, 3)
        assert names(await run.take_step()) == ["young#0@p"]


async def test_a_held_step_is_taken_at_the_deadline_and_what_comes_later_is_dropped(tmp_path: Path) -> None:
    """Nothing can hold the trainer for ever."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.WAIT, wait_s=0.05), groups_per_step=1) as run:
        run.version, run.ends_version = 3, True
        run.intake.take_status(status(2))
        offer(streams, "young#0@p", 3, 3)
        assert names(await run.take_step()) == ["young#0@p"]
        run.version = 4
        offer(streams, "old#1@p", 2, 3)
        offer(streams, "young#2@p", 4, 4)
        assert names(await run.take_step()) == ["young#2@p"]
        assert run.intake.counts().dropped == {"stale": 2}


async def test_a_held_step_goes_on_when_the_setting_changes(tmp_path: Path) -> None:
    streams, now = FakeStreams(), [OnStale.WAIT]
    async with trainer(
        streams, tmp_path / "log", rule=lambda: AgeRule(max_staleness=1, on_stale=now[0]), groups_per_step=1
    ) as run:
        run.version, run.ends_version = 3, True
        run.intake.take_status(status(2))
        offer(streams, "young#0@p", 3, 3)
        step = asyncio.ensure_future(run.take_step())
        await run.rest()
        assert not step.done()
        now[0] = OnStale.DROP
        run.intake.take_change()
        assert names(await step) == ["young#0@p"]


def test_the_deadline_counts_from_when_the_step_could_have_been_taken() -> None:
    clock = FakeClock()
    told: list[Awaited] = []
    gate = AgeGate(rule=rule(OnStale.WAIT, wait_s=10.0), lineage=Lineage(incarnation="first"), clock=clock, on_hold=told.append)
    gate.take_status(status(2))
    assert gate.left_s() is None
    ready: list[Group] = []
    for seconds, left in ((0.0, 10.0), (6.0, 4.0), (3.5, 0.5), (0.5, None)):
        clock.advance(seconds)
        gate.decide()
        assert gate.left_s() is None
        assert gate.holds(ready, [], policy_version=3, groups_per_step=1) is (left is not None)
        assert gate.left_s() == left
    assert told == [Awaited(next_version=4, num_open_groups=0, oldest_in_flight=2)] * 3
    gate.taken()
    assert gate.holds(ready, [], policy_version=3, groups_per_step=1)


# ── rollback ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_samples_of_a_version_that_was_rolled_back_are_trained_and_counted(tmp_path: Path) -> None:
    """B48: their numbers lie ahead of the trainer's; they age from the version rolled back to."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", rule=rule(OnStale.DROP, 1)) as run:
        run.version = 4
        saved = run.save()
    async with trainer(
        streams, tmp_path / "log", saved, rule=rule(OnStale.DROP, 1), groups_per_step=1, incarnation="second"
    ) as run:
        assert run.version == 4
        offer(streams, "lost#0@p", 7, 4, incarnation="first")
        assert names(await run.take_step()) == ["lost#0@p"]
        assert run.intake.counts().rolled_back == 1
        run.version = 6
        offer(streams, "lost#1@p", 7, 7, incarnation="first")
        offer(streams, "own#2@p", 6, 6, incarnation="second")
        assert names(await run.take_step()) == ["own#2@p"]
        assert run.intake.counts().dropped == {"stale": 2}
        assert run.intake.settled_counts().rolled_back == 1


# ── over any schedule ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OnStale),
    st.integers(0, 2),
    st.lists(st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.just("publish")), max_size=24),
)
def test_whatever_comes_no_token_beyond_the_bound_counts_whole_and_all_is_booked(
    on_stale: OnStale, bound: int, events: list[Any]
) -> None:
    """B29 B32: whole groups in or out; with drop, retry and wait nothing older than the bound is trained."""

    async def play(path: Path) -> None:
        streams, offered = FakeStreams(), 0
        async with trainer(streams, path, rule=rule(on_stale, bound, wait_s=0.001), groups_per_step=1) as run:
            for event in events:
                if event == "publish":
                    run.version += 1
                    continue
                ages = [max(0, run.version - age) for age in event]
                offer(streams, f"t#{offered}@p", *ages)
                offered += 1
                run.ends_version = bool(event[0])
                await run.rest()
                step = asyncio.ensure_future(run.take_step())
                await settled()
                if not step.done():
                    step.cancel()
                    await asyncio.wait((step,))
                    continue
                batch = step.result()
                for group in batch.groups:
                    assert len(group.members) == GROUP_SIZE
                    for one in group.members:
                        age = run.version - one.sample.oldest_version
                        weights = batch.weighting.weights(one.sample) if batch.weighting else np.ones(1)
                        assert age <= bound or (on_stale is OnStale.DOWNWEIGHT and weights[-1] == 0.5 ** (age - bound))
            counts = run.intake.counts()
            assert counts.received == GROUP_SIZE * offered == counts.trained + sum(counts.dropped.values()) + counts.queued
            asked = {record.group_id for record in records(path, RetryAsked)}
            retried = sum(len(record.samples) for record in records(path, RecordsDropped) if record.reason == "stale, retried")
            assert retried == GROUP_SIZE * len(asked) == counts.dropped.get("stale, retried", 0)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(play(Path(directory) / "log"))
