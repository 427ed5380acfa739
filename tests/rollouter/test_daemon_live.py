"""Live settings in the rollouter: whatever it was started with, the trainer's hold, from the moment that was promised."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import structlog

from agent_loop.errors import EngineUnavailable
from sample_bus.messages import RollouterStatus
from tests.fakes.fake_engine import Call
from tests.rollouter.stand_in import at_limit, engine_of, make_settings, running_rollouter, stand_in_trainer


async def test_what_the_trainer_says_holds_before_anything_is_admitted(tmp_path: Path) -> None:
    """B156: started with another size of a step and another interval, the rollouter counts as the trainer does."""
    settings = make_settings(tmp_path)
    other = make_settings(
        tmp_path, samples_per_step=64, trigger_parameter_sync_step=4, staleness_threshold=3.0, min_survivors=4
    )
    async with stand_in_trainer(settings) as trainer, running_rollouter(other, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        await at_limit(trainer, 8)


async def test_a_larger_step_and_a_longer_interval_widen_the_budget_and_smaller_ones_narrow_it(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
        await trainer.begin()
        await trainer.publish(0)
        await at_limit(trainer, 8)
        await trainer.change(samples_per_step=12)
        await at_limit(trainer, 12)
        await trainer.change(trigger_parameter_sync_step=2)
        await at_limit(trainer, 24)
        await trainer.change(samples_per_step=4, trigger_parameter_sync_step=1)
        await trainer.wait_status(lambda status: status.settings_revision == 3)
        await at_limit(trainer, 24)


async def test_new_rollouts_are_sampled_as_was_set_and_those_in_flight_as_they_were_admitted(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, staleness_threshold=1.0, rollouter__max_concurrent_rollouts=8)
    gate = asyncio.Event()
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, before_reply=lambda call: gate.wait())
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.wait_status(lambda status: status.counts.in_flight == 8)
            await trainer.change(sampling__temperature=0.25, sampling__max_tokens=5)
            await trainer.wait_status(lambda status: status.settings_revision == 1)
            gate.set()
            await at_limit(trainer, 16)
            samples = await trainer.train(16)
    assert sorted({(sample.settings_revision, sample.temperature) for sample in samples}) == [(0, 1.0), (1, 0.25)]
    assert {(call.sampling.temperature, call.sampling.max_tokens) for call in engine.calls} == {(1.0, 8), (0.25, 5)}


async def test_attempts_and_what_follows_a_failed_seat_change_under_a_failing_rollout(tmp_path: Path) -> None:
    """Seat 0 of each group fails for ever: many attempts are allowed, then one; then its siblings are given up with it."""
    settings = make_settings(
        tmp_path, rollouter__max_attempts=1000, rollouter__max_consecutive_failures=1000, rollouter__max_task_failures=1000
    )
    tried = asyncio.Event()

    async def fail_one(call: Call) -> None:
        seat_and_attempt = call.request_id.split("/")[-1]
        if seat_and_attempt.startswith("0."):
            if seat_and_attempt.startswith("0.3"):
                tried.set()
            await asyncio.sleep(0.001)
            raise EngineUnavailable("not here")

    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer, before_reply=fail_one)):
        await trainer.begin()
        await trainer.publish(0)
        async with asyncio.timeout(60):
            await tried.wait()
        await trainer.train(6)
        await trainer.change(rollouter__max_attempts=1)
        closed = await trainer.lease_closures(2)
        assert [seat.seat for seat in closed] == [0, 0]
        assert max(seat.attempt for seat in closed) >= 3, "many attempts were allowed before"
        await trainer.change(on_failed_seat="drop")
        await trainer.publish(1)
        reasons: set[str] = set()

        def gives_up_siblings(status: RollouterStatus) -> bool:
            reasons.update(status.counts.failed)
            return status.counts.admitted == 16 and status.counts.in_flight == 0

        await trainer.wait_status(gives_up_siblings)
        assert "engine unavailable" in reasons


async def test_a_rollout_that_hangs_is_given_up_by_the_deadline_that_its_next_attempt_was_given(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, rollouter__max_attempts=2, rollouter__rollout_timeout_s=0.3)
    attempts: list[str] = []

    def hang(call: Call) -> Any:
        attempts.append(call.request_id)
        return asyncio.Event().wait()

    async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer, before_reply=hang)):
        await trainer.begin()
        await trainer.change(rollouter__rollout_timeout_s=0.05)
        await trainer.wait_status(lambda status: status.settings_revision == 1)
        await trainer.publish(0)
        closed = await trainer.lease_closures(8)
    late = [seat for seat in closed if seat.reason == "timeout"]
    assert {seat.group_id for seat in late} == {seat.group_id for seat in closed}
    assert all("after 0.05 s" in seat.message for seat in late), [seat.message for seat in late]
    assert {request.rsplit(".", 1)[1][0] for request in attempts} == {"0", "1"}


async def test_the_level_of_the_log_follows_at_once(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    before: Any = structlog.get_config()["wrapper_class"]
    try:
        async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer)):
            await trainer.begin()
            await trainer.publish(0)
            await at_limit(trainer, 8)
            await trainer.change(logging__level="error")
            await trainer.wait_status(lambda status: status.settings_revision == 1)
            assert not structlog.get_logger().bind().is_enabled_for(30)
            await trainer.change(logging__level="debug")
            await trainer.wait_status(lambda status: status.settings_revision == 2)
            assert structlog.get_logger().bind().is_enabled_for(10)
    finally:
        structlog.configure(wrapper_class=before)
