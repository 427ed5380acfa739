"""Samples flow from a real rollouter daemon over a real bus as far as the budget allows, and no further."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from structlog.testing import capture_logs

from sample_bus.ledger import Ledger
from sample_bus.messages import (
    Counts,
    RollouterState,
)
from sample_bus.sample import NO_VERSION
from tests.fakes.fake_engine import Call
from tests.rollouter.stand_in import at_limit, engine_of, make_settings, running_rollouter, stand_in_trainer


async def test_every_sample_is_trained_at_the_version_that_sampled_it_at_threshold_zero(tmp_path: Path) -> None:
    """B41, B18"""
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.wait_status(lambda status: status.state is RollouterState.WAITING_FOR_WEIGHTS)
            assert engine.calls == []
            for version in range(20):
                await trainer.publish(version)
                samples = await trainer.train(settings.samples_per_step)
                assert {sample.oldest_version for sample in samples} == {version}
                assert {int(v) for sample in samples for v in sample.versions} == {version, NO_VERSION}
            await at_limit(trainer, 160)
            assert len(engine.calls) == 160
            assert engine.synced == [("first", version) for version in range(20)]
    assert engine.closed


async def test_samples_are_whole_groups_with_rewards_and_logprobs(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, staleness_threshold=1.0)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        samples = await trainer.train(16)
        groups = {sample.group_id: sorted(s.seat for s in samples if s.group_id == sample.group_id) for sample in samples}
        assert list(groups.values()) == [[0, 1, 2, 3]] * 4
        assert len({sample.task_id for sample in samples}) == 4
        assert {sample.reward for sample in samples} <= {0.0, 1.0}
        for sample in samples:
            trained = sample.loss_mask != 0
            assert np.all(sample.behavior_logprobs[trained] == -0.5)
            assert sample.incarnation == "first"
            assert sample.stop_reason == "stop"
        await at_limit(trainer, 16)


async def test_seeds_differ_by_seat_and_repeat_with_the_run(tmp_path: Path) -> None:
    seeds = []
    for run in ("a", "b"):
        settings = make_settings(tmp_path / run)
        async with stand_in_trainer(settings) as trainer:
            engine = engine_of(trainer)
            async with running_rollouter(settings, engine):
                await trainer.begin()
                await trainer.publish(0)
                await trainer.train(8)
                seeds.append([call.sampling.seed for call in engine.calls])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 8


async def test_live_threshold_holds_from_the_next_admission_and_is_logged(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        await at_limit(trainer, 8)
        with capture_logs() as logs:
            await trainer.change(staleness_threshold=1.0)
            await at_limit(trainer, 16)
        changed = [entry for entry in logs if entry["event"] == "setting changed"]
        assert [(entry["key"], entry["old"], entry["new"], entry["author"]) for entry in changed] == [
            ("staleness_threshold", 0.0, 1.0, "the test")
        ]
        samples = await trainer.train(16)
        assert sorted(sample.settings_revision for sample in samples) == [0] * 8 + [1] * 8
        await trainer.change(staleness_threshold=0.0)
        await trainer.publish(1)  # 16 were started, and 2 periods allow 16
        await trainer.wait_status(lambda status: status.policy_version == 1 and status.settings_revision == 2)
        await at_limit(trainer, 16)
        await trainer.publish(2)
        await at_limit(trainer, 24)


async def test_no_more_rollouts_are_in_flight_than_allowed_even_when_the_limit_is_lowered_live(tmp_path: Path) -> None:
    """B28"""
    settings = make_settings(tmp_path, staleness_threshold=10.0, rollouter__max_concurrent_rollouts=16)
    gate = asyncio.Event()
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, before_reply=lambda call: gate.wait())
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.wait_status(lambda status: status.counts.in_flight == 16)
            await trainer.change(rollouter__max_concurrent_rollouts=4)
            await trainer.wait_status(lambda status: status.settings_revision == 1)
            most = 0

            def watch(call: Call) -> None:
                nonlocal most
                most = max(most, engine.num_running)

            engine.before_reply = watch
            gate.set()
            await at_limit(trainer, 88)
            assert most <= 4


async def test_what_the_trainer_drops_is_replaced(tmp_path: Path) -> None:
    """B45"""
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        await trainer.drop(4)
        await trainer.train(8)
        await at_limit(trainer, 12)


async def test_no_more_is_generated_than_the_run_needs(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, num_steps=3, staleness_threshold=100.0)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(24)
            status = await trainer.wait_status(lambda status: status.state is RollouterState.AT_LIMIT)
            assert status.detail == "every sample that the run still needs is under way"
            assert len(engine.calls) == 24


async def test_ledger_closes_while_samples_flow(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, staleness_threshold=0.5)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        for version in range(4):
            await trainer.publish(version)
            await trainer.train(8)
        status = await trainer.wait_status(
            lambda status: status.counts.offered == 36 and status.state is RollouterState.AT_LIMIT
        )
        await trainer.lease(4)
        ledger = Ledger(rollouts=status.counts, samples=Counts(received=36, trained=32, queued=4))
        assert ledger.closes, ledger.line()


async def test_backpressure_of_the_bus_stops_admission_and_loses_nothing(tmp_path: Path) -> None:
    """B24, B129"""
    settings = make_settings(tmp_path, staleness_threshold=20.0, bus__max_queued_samples=16)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            status = await trainer.wait_status(lambda status: status.counts.offered == 16 and bool(status.counts.in_flight))
            assert status.counts.in_flight <= 12
            samples = [sample for _ in range(21) for sample in await trainer.train(8)]
            assert len({sample.rollout_id for sample in samples}) == 168
            await at_limit(trainer, 168)
