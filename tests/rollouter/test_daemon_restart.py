"""A rollouter that comes again goes on where the one before it stood: nothing is lost, nothing is played twice."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Settings
from rollouter.codec import Codec
from rollouter.daemon import run
from rollouter.errors import RunDirInUse
from sample_bus.issued import Issued
from sample_bus.journal import AttemptFailed, GroupAdmitted, RollouterEnded, read_journal
from sample_bus.messages import EndReason, RollouterState
from tests.fakes.fake_engine import Call, FakeEngine, FakeTokenizer
from tests.rollouter.stand_in import DEADLINE_S, at_limit, engine_of, make_settings, running_rollouter, stand_in_trainer


def _journal(run_dir: Path, run_id: str = "run-1") -> list[Any]:
    return list(read_journal(run_dir / "journal" / run_id / "rollouter.log"))


def _ends(run_dir: Path) -> list[RollouterEnded]:
    return [record for record in _journal(run_dir) if isinstance(record, RollouterEnded)]


async def test_groups_in_flight_are_played_on_by_the_next_process(tmp_path: Path) -> None:
    """B38, B40: the same groups and seats, the next attempt numbers; counts go on; nothing of it is admitted again."""
    settings = make_settings(tmp_path)
    gate = asyncio.Event()

    def hold_two_seats(call: Call) -> Any:
        seat = call.request_id.rpartition("/")[2]
        return gate.wait() if seat.startswith(("1.0", "2.0")) else None

    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0)
        async with running_rollouter(settings, engine_of(trainer, before_reply=hold_two_seats)) as rollouter:
            first = [item.sample for item in await trainer.lease(4)]
            await trainer.wait_status(lambda status: (status.counts.offered, status.counts.in_flight) == (4, 4))
            await rollouter.cut_off()
        async with running_rollouter(settings, engine_of(trainer)):
            last = [item.sample for item in await trainer.lease(4)]
            await at_limit(trainer, 8)
            status = await trainer.wait_status(lambda status: status.counts.offered == 8)
            assert (status.counts.admitted, status.counts.retried) == (8, 4)
        assert Counter((s.group_id, s.seat) for s in (*first, *last)) == Counter(
            {(group, seat): 1 for group in {s.group_id for s in first} for seat in range(4)}
        )
        assert {sample.attempt for sample in last} == {1}
    assert {record.reason for record in _journal(tmp_path) if isinstance(record, AttemptFailed)} == {"interrupted"}


async def test_process_that_stopped_in_order_costs_no_attempt(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0)
        engine = engine_of(trainer, before_reply=lambda call: asyncio.Event().wait())
        async with running_rollouter(settings, engine):
            await trainer.wait_status(lambda status: status.counts.in_flight == 8)
        async with running_rollouter(settings, engine_of(trainer)):
            assert {sample.attempt for sample in await trainer.train(8)} == {0}
    first, second = _ends(tmp_path)
    assert (first.reason, first.counts["in_flight"]) == ("stopped", 8)
    assert second.counts["in_flight"] == 0


async def _life(settings: Settings) -> Process:
    overrides = (
        f"run_dir={settings.run_dir}",
        f"bus.address={settings.bus.address}",
        "group_size=4",
        "samples_per_step=8",
        "staleness_threshold=9",
        "sampling.max_tokens=8",
        "engine.max_model_len=128",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "rollouter.max_concurrent_rollouts=16",
        "rollouter.max_attempts=2",
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.rollouter.fake_daemon", *overrides),
        stderr=DEVNULL,
        env={**os.environ, "FAKE_ENGINE_DELAY_S": "0.05"},
    )


@pytest.mark.parametrize("seed", [11, 12])
async def test_rollouter_killed_at_random_moments_loses_nothing_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    """B38, B40, B13: kill -9 of the whole process, five times a seed; every seat of every group comes exactly once."""
    chance = random.Random(seed)
    settings = make_settings(tmp_path, staleness_threshold=9.0)
    seen: Counter[tuple[str, int]] = Counter()
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0, staged={"engine-0": "engine-0-1"})
        for life in range(6):
            process = await _life(settings)
            try:
                wanted = 80 - sum(seen.values()) if life == 5 else chance.randrange(5, 14)
                samples = await trainer.train(min(wanted, 80 - sum(seen.values())))
                seen.update((sample.group_id, sample.seat) for sample in samples)
                if life == 5:
                    await at_limit(trainer, 80)
                else:
                    await asyncio.sleep(chance.random() * 0.05)
            finally:
                process.kill()
                await process.wait()
        assert trainer.closures == []
    groups = [record for record in _journal(tmp_path) if isinstance(record, GroupAdmitted)]
    assert [group.issue for group in groups] == list(range(20)), f"seed {seed}"
    assert seen == Counter({(group.group_id, seat): 1 for group in groups for seat in range(4)}), f"seed {seed}"
    issued = Issued.of(_journal(tmp_path))
    assert issued.problems.texts == [], f"seed {seed}"
    assert issued.counts().offered == 80


async def test_another_run_begins_afresh_and_leaves_the_one_before_alone(tmp_path: Path) -> None:
    """Another run id: rollouts of the old run are cancelled, the data is issued from its beginning, counts begin at 0."""
    settings = make_settings(tmp_path, bus__on_lost="wait")
    engine = FakeEngine()
    never = asyncio.Event()
    async with running_rollouter(settings, engine):
        async with stand_in_trainer(settings, run_id="run-1") as trainer:
            engine.on_stage = trainer.staged
            engine.before_reply = lambda call: never.wait() if "/3." in call.request_id else None
            await trainer.begin()
            await trainer.publish(0)
            old = await trainer.train(6)
            await trainer.wait_status(lambda status: (status.counts.offered, status.counts.in_flight) == (6, 2))
            engine.before_reply = None
        async with stand_in_trainer(settings, run_id="run-2", incarnation="second") as trainer:
            engine.on_stage = trainer.staged
            await trainer.begin()
            await trainer.publish(0)
            new = await trainer.train(8)
            await at_limit(trainer, 8)
            status = await trainer.wait_status(lambda status: status.counts.offered == 8)
            assert (status.counts.admitted, status.counts.in_flight, status.counts.retried) == (8, 0, 0)
            assert {sample.incarnation for sample in new} == {"second"}
            assert {sample.task_id for sample in new} == {sample.task_id for sample in old}
    assert Counter(sample.group_id for sample in new).most_common()[-1][1] == 4
    assert _ends(tmp_path)[0].reason == "another run began"
    assert Issued.of(_journal(tmp_path)).counts().in_flight == 2
    assert Issued.of(_journal(tmp_path, "run-2")).problems.texts == []


async def test_end_of_each_process_is_noted_with_its_reason(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0)
        async with running_rollouter(settings, engine_of(trainer)) as rollouter:
            await trainer.train(8)
            await at_limit(trainer, 8)
            rollouter.drain.set()
            await rollouter.ended()
        async with running_rollouter(settings, engine_of(trainer)) as rollouter:
            await at_limit(trainer, 8)
            await trainer.end(EndReason.FINISHED)
            await rollouter.ended()
    assert [end.reason for end in _ends(tmp_path)] == ["drained", "finished"]
    assert all(end.counts["offered"] == 8 for end in _ends(tmp_path))


async def test_failing_seats_reach_the_trainer_and_the_counts(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, rollouter={"max_attempts": 1, "max_task_failures": 1})

    def fail_seat_two(call: Call) -> None:
        if "/2." in call.request_id:
            raise ValueError("the test broke it")

    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer, before_reply=fail_seat_two)),
    ):
        await trainer.begin()
        await trainer.publish(0)
        await trainer.train(6)
        closures = await trainer.lease_closures(2)
        assert {(closed.seat, closed.reason, closed.group_size) for closed in closures} == {(2, "agent loop failed", 4)}
        assert all(closed.message == "ValueError: the test broke it" for closed in closures)
        status = await trainer.wait_status(lambda status: status.state is RollouterState.AT_LIMIT)
        assert (status.counts.failed, status.counts.quarantined_tasks) == ({"agent loop failed": 2}, 2)
        assert len(list((tmp_path / "quarantine" / "tasks").glob("*.json"))) == 2


async def test_group_deadline_changed_live_holds_for_groups_admitted_from_then_on(tmp_path: Path) -> None:
    """B13"""
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, before_reply=lambda call: asyncio.Event().wait() if "/1." in call.request_id else None)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(6)
            revision = await trainer.change(rollouter__group_timeout_s=0.2)
            await trainer.wait_status(lambda status: status.settings_revision == revision)
            await trainer.publish(1)
            await trainer.train(6)
            closures = await trainer.lease_closures(2)
            assert {(closed.seat, closed.reason) for closed in closures} == {(1, "group deadline")}
            assert {closed.settings_revision for closed in closures} == {revision}
            status = await trainer.wait_status(lambda status: sum(status.counts.failed.values()) == 2)
            assert status.counts.in_flight == 2  # those admitted before have none


async def test_full_disk_is_named_in_the_state_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    write, is_full = os.pwritev, False

    def pwritev(descriptor: int, parts: Any, at: int) -> int:
        if is_full and Path(f"/proc/self/fd/{descriptor}").readlink().name == "rollouter.log":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        await trainer.train(8)
        await at_limit(trainer, 8)
        is_full = True
        await trainer.publish(1)
        await trainer.wait_status(lambda status: "the journal cannot be written: No space left on device" in status.detail)
        is_full = False
        assert len(await trainer.train(8)) == 8
        await at_limit(trainer, 16)


async def test_two_rollouters_in_one_run_directory_are_refused(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)

    def open_fake(settings: Settings, *, live: Any, on_change: Any, on_round_result: Any) -> FakeEngine:
        return FakeEngine()

    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(stand_in_trainer(settings))
        await trainer.begin()
        first = asyncio.create_task(run(settings, open_fleet=open_fake, codec_of=lambda model_dir: Codec(FakeTokenizer())))
        await trainer.wait_status(lambda status: status.state is RollouterState.WAITING_FOR_WEIGHTS)
        with pytest.raises(RunDirInUse, match="another rollouter is at work here"):
            await run(settings, open_fleet=open_fake, codec_of=lambda model_dir: Codec(FakeTokenizer()))
        first.cancel()
        await asyncio.wait((first,), timeout=DEADLINE_S)
