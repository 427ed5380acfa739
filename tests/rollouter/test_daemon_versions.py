"""The engines follow the trainer's versions; a failed round leaves the older one in force."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from sample_bus.messages import (
    EvaluationResult,
    Failed,
    RollouterState,
    RoundResult,
)
from tests.fakes.fake_engine import Call, FakeEngine
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer


async def test_evaluation_goes_before_the_rollouts_of_its_version(tmp_path: Path) -> None:
    """B173"""
    settings = make_settings(tmp_path, evaluation={"at_start": True, "samples_per_task": 2, "max_tasks": 5, "temperature": 0.5})
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.evaluate(1, 0)
            await trainer.publish(0)
            (result,) = await trainer.wait_report(EvaluationResult)
            assert (result.request_id, result.policy_version, result.num_samples) == (1, 0, 10)
            assert result.generating_versions == (0,)
            assert 0.0 <= result.accuracy <= 1.0
            samples = await trainer.train(8)
            assert [call.sampling.temperature for call in engine.calls[:10]] == [0.5] * 10
            held_out = {call.prompt_ids.tobytes() for call in engine.calls[:10]}
            assert held_out.isdisjoint(call.prompt_ids.tobytes() for call in engine.calls[10:])
            assert len(samples) == 8


async def test_evaluation_is_not_repeated_for_a_rollouter_that_comes_later(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, evaluation={"at_start": True, "max_tasks": 2, "samples_per_task": 1})
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.evaluate(1, 0)
        await trainer.publish(0)
        for life in range(2):
            async with running_rollouter(settings, engine_of(trainer)):
                await trainer.wait_report(EvaluationResult)
                await trainer.wait_status(lambda status: status.state is RollouterState.AT_LIMIT)
            assert len(await trainer.wait_report(EvaluationResult)) == 1, f"life {life}"


async def test_failed_round_leaves_the_old_version_until_the_engine_has_caught_up(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(8)
            engine.fails_syncs = 2
            await trainer.publish(1)
            samples = await trainer.train(8)
            assert {sample.oldest_version for sample in samples} == {1}
            results = await trainer.wait_report(RoundResult, 4)
            assert [result.committed for result in results] == [True, False, False, True]


async def test_round_that_no_engine_takes_stops_the_run(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, engine__start_timeout_s=0.2, weight_sync={"round_timeout_s": 0.2})
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer, fails_syncs=10**6)):
        await trainer.begin()
        await trainer.publish(0)
        (failure,) = await trainer.wait_report(Failed)
        assert "no engine took version 0 within 0.4 s" in failure.message
        assert "the engine was told to fail" in failure.message


async def test_newer_version_ends_the_wait_for_one_that_no_engine_takes(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, fails_syncs=10**6)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.wait_report(RoundResult, 2)
            engine.fails_syncs = 0
            await trainer.publish(1)
            samples = await trainer.train(16)
            assert {sample.oldest_version for sample in samples} <= {0, 1}
            await trainer.wait_status(lambda status: status.policy_version == 1)


async def test_versions_between_are_skipped_while_a_round_is_under_way(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    held = asyncio.Event()
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(8)
            engine.before_sync = lambda announced: held.wait()
            await trainer.publish(1)
            await trainer.wait_status(lambda status: status.state is RollouterState.SYNCING)
            await trainer.publish(2)
            await trainer.publish(3)
            revision = await trainer.change(trainer__learning_rate=2e-5)
            await trainer.wait_status(lambda status: status.settings_revision == revision)  # so 2 and 3 have arrived too
            held.set()
            samples = await trainer.train(24)
            assert {sample.oldest_version for sample in samples} == {3}
            assert engine.synced == [("first", 0), ("first", 3)]


async def test_rollouts_that_cannot_arrive_in_time_are_cancelled_at_once(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, staleness_threshold=1.0, max_staleness=0)
    gate = asyncio.Event()
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            engine.before_reply = lambda call: gate.wait() if len(engine.calls) > 8 else None
            await trainer.publish(0)
            await trainer.train(8)
            await trainer.wait_status(lambda status: status.counts.in_flight == 8)
            await trainer.publish(1)
            lost = await trainer.lease_closures(8)
            assert {closed.reason for closed in lost} <= {"stale", "siblings failed"}
            assert {closed.group_id for closed in lost if closed.reason == "stale"} == {closed.group_id for closed in lost}
            await trainer.drop_these(trainer.closures)
            gate.set()
            samples = await trainer.train(16)
            assert {sample.oldest_version for sample in samples} == {1}


async def test_another_trainer_is_counted_from_its_origin(tmp_path: Path) -> None:
    """B17, B29: the engines return to its version before they serve, what the one before had not settled comes again, and
    groups of which some seats are still in flight are played to their end."""
    settings = make_settings(tmp_path, bus__on_lost="wait", staleness_threshold=1.0)
    gate = asyncio.Event()
    engine = FakeEngine()

    def hold_seat_three(call: Call) -> Any:
        return gate.wait() if "/3." in call.request_id and call.version == 7 else None

    async with running_rollouter(settings, engine):
        async with stand_in_trainer(settings, incarnation="first", origin_version=7) as trainer:
            engine.on_stage, engine.before_reply = trainer.staged, hold_seat_three
            await trainer.begin()
            await trainer.publish(7)
            before = {item.id for item in await trainer.lease(12)}
            await trainer.wait_status(lambda status: status.counts.in_flight == 4)
        async with stand_in_trainer(settings, incarnation="second", origin_version=5) as trainer:
            engine.on_stage = trainer.staged
            await trainer.begin()
            again = await trainer.lease(12)
            assert {item.id for item in again} == before
            await trainer.publish(5)
            await trainer.wait_status(lambda status: status.policy_version == 5)
            gate.set()
            last = await trainer.lease(4)
            groups = Counter(item.sample.group_id for item in (*again, *last))
            assert sorted(groups.values()) == [4, 4, 4, 4]
            trainer.settle([item.id for item in (*again, *last)])
            await trainer.publish(6)
            samples = await trainer.train(8)
            assert {(sample.incarnation, sample.oldest_version) for sample in samples} == {("second", 6)}
            status = await trainer.wait_status(lambda status: status.state is RollouterState.AT_LIMIT)
            assert (status.counts.admitted, status.counts.offered, status.counts.failed) == (24, 24, {})
            assert engine.synced == [("first", 7), ("second", 5), ("second", 6)]
