"""A real rollouter daemon follows what the trainer's steps take, also when their size and the sync interval change live."""

from __future__ import annotations

from pathlib import Path

from tests.rollouter.stand_in import at_limit, engine_of, make_settings, running_rollouter, stand_in_trainer
from trainer.demand import StepAccount


async def test_smaller_steps_set_live_start_what_they_need_and_the_run_gets_all_of_its_steps(tmp_path: Path) -> None:
    """Three steps: one of 16 samples, then two of 4. Counted in versions, 2 * 4 would be fewer than were trained already and
    nothing would ever start again; counted at the first size the run would need 48."""
    settings = make_settings(tmp_path, num_steps=3, samples_per_step=16)
    async with stand_in_trainer(settings) as trainer:
        account = trainer.account = StepAccount(begun_step=0, sync_step=1)
        engine = engine_of(trainer)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await at_limit(trainer, 16)
            await trainer.train(16)
            account.begin(1, 16)
            await trainer.change(samples_per_step=4)
            for step, total in ((2, 20), (3, 24)):
                account.publish(next_sync_step=step)
                await trainer.publish(step - 1)
                await at_limit(trainer, total)
                samples = await trainer.train(4)
                assert {sample.oldest_version for sample in samples} == {step - 1}
                account.begin(step, 4)
            account.publish(next_sync_step=3)
            await trainer.publish(3)
            await at_limit(trainer, 24)
            assert len(engine.calls) == 24


async def test_longer_interval_set_live_starts_the_whole_period_once_it_has_begun(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        account = trainer.account = StepAccount(begun_step=0, sync_step=1)
        async with running_rollouter(settings, engine_of(trainer)):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.change(trigger_parameter_sync_step=3)
            await at_limit(trainer, 8)  # the period that goes on ends as it was begun
            await trainer.train(8)
            account.begin(1, 8)
            account.publish(next_sync_step=3)
            await trainer.publish(1)
            await at_limit(trainer, 8 + 2 * 8)
