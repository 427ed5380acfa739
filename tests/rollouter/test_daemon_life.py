"""How the rollouter daemon begins and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from configs.errors import ConfigError
from rollouter.errors import TrainerFailed
from sample_bus.errors import PeerLost
from sample_bus.messages import (
    EndReason,
    Failed,
    RollouterState,
)
from tests.fakes.fake_engine import FakeEngine
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer


async def test_drain_finishes_what_is_in_flight_and_starts_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, staleness_threshold=10.0, rollouter__max_concurrent_rollouts=8)
    gate = asyncio.Event()
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, before_reply=lambda call: gate.wait())
        async with running_rollouter(settings, engine) as rollouter:
            await trainer.begin()
            await trainer.publish(0)
            await trainer.wait_status(lambda status: status.counts.in_flight == 8)
            rollouter.drain.set()
            await trainer.wait_status(lambda status: status.state is RollouterState.DRAINING)
            gate.set()
            assert len(await trainer.train(8)) == 8
            await rollouter.ended()
            assert len(engine.calls) == 8
            assert engine.closed


async def test_drain_before_anything_runs_ends_at_once(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    engine = FakeEngine()
    async with running_rollouter(settings, engine) as rollouter:
        rollouter.drain.set()
        await rollouter.ended()
    assert engine.closed


@pytest.mark.parametrize("reason", [EndReason.FINISHED, EndReason.STOPPED])
async def test_end_of_the_run_ends_the_rollouter_with_work_in_flight(tmp_path: Path, reason: EndReason) -> None:
    """B16"""
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, before_reply=lambda call: asyncio.Event().wait())
        async with running_rollouter(settings, engine) as rollouter:
            await trainer.begin()
            await trainer.publish(0)
            await trainer.wait_status(lambda status: status.counts.in_flight == 8)
            await trainer.end(reason)
            await rollouter.ended()
            await trainer.wait_status(lambda status: status.state is RollouterState.ENDED)
    assert engine.closed


async def test_failure_of_the_trainer_is_a_failure_here(tmp_path: Path) -> None:
    """B15"""
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)) as rollouter:
        await trainer.begin()
        await trainer.publish(0)
        await trainer.train(8)
        await trainer.end(EndReason.FAILED, "OutOfMemory: 3 GiB")
        with pytest.raises(TrainerFailed, match="OutOfMemory: 3 GiB"):
            await rollouter.ended()


async def test_trainer_that_prepares_no_model_is_not_waited_for_without_end(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, bus__connect_timeout_s=0.5)
    async with stand_in_trainer(settings), running_rollouter(settings, FakeEngine()) as rollouter:
        with pytest.raises(PeerLost, match=r"no model within 0\.5 s"):
            await rollouter.ended()


async def test_trainer_that_never_comes_is_an_error_naming_its_address(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, bus__connect_timeout_s=0.3)
    async with running_rollouter(settings, FakeEngine()) as rollouter:
        with pytest.raises(PeerLost, match=settings.bus.address):
            await rollouter.ended()


async def test_tasks_go_on_where_an_earlier_process_stopped(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0)
        async with running_rollouter(settings, engine_of(trainer)):
            first = await trainer.train(8)
        async with running_rollouter(settings, engine_of(trainer)):
            await trainer.publish(1)
            second = await trainer.train(8)
            assert {sample.task_id for sample in first}.isdisjoint(sample.task_id for sample in second)
            assert {sample.group_id for sample in first}.isdisjoint(sample.group_id for sample in second)


async def test_settings_that_contradict_the_data_are_refused_and_told(tmp_path: Path) -> None:
    """B44, B46, B49"""
    settings = make_settings(tmp_path, num_steps=100, data__num_epochs=1)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, FakeEngine()) as rollouter:
        await trainer.begin()
        with pytest.raises(
            ConfigError, match=r"65 tasks give 65 groups, num_steps=100 need 200: .*num_epochs>=4 or num_steps<=32"
        ):
            await rollouter.ended()
        (failure,) = await trainer.wait_report(Failed)
        assert "num_epochs" in failure.message


async def test_nothing_to_evaluate_is_refused(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, data__held_out_fraction=0.0, evaluation={"at_end": True, "at_start": False})
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, FakeEngine()) as rollouter:
        await trainer.begin()
        with pytest.raises(ConfigError, match=r"data\.held_out_fraction=0\.0 leaves no task to evaluate"):
            await rollouter.ended()
