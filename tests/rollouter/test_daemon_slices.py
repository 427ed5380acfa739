"""In what pieces the daemon asks its engines for a turn, and when it changes its mind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.slices import BLOCK_TOKENS
from configs.schema import Settings
from tests.fakes.slow_engine import SlowEngine
from tests.rollouter.stand_in import at_limit, make_settings, running_rollouter, stand_in_trainer

LONG = {"shortest": 100, "longest": 120, "tokens_per_s": 2000.0}


def _settings(run_dir: Path, **changes: Any) -> Settings:
    return make_settings(
        run_dir,
        sampling={"max_tokens": 200, "stop": ()},
        engine={"max_model_len": 512},
        rollouter={"progress_interval_s": 0.001},
        **changes,
    )


async def test_turns_are_asked_for_in_slices_that_end_a_token_behind_a_block(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = SlowEngine(on_stage=trainer.staged, **LONG)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            samples = await trainer.train(8)
    assert {sample.num_turns for sample in samples} == {1}
    ends = [call.prompt_ids.size + call.sampling.max_tokens for call in engine.calls if call.sampling.turn_goes_on]
    assert len(ends) >= 8 * 2
    assert {end % BLOCK_TOKENS for end in ends} == {1}


@pytest.mark.parametrize("change", [{"partial_rollout": "finish"}, {"rollouter__progress_interval_s": 0.0}])
async def test_whole_turns_are_asked_for_as_soon_as_the_live_settings_say_so(tmp_path: Path, change: dict[str, Any]) -> None:
    """B36: with `finish`, one turn has one version; a slice's end would be where new weights get in."""
    settings = _settings(tmp_path)
    async with stand_in_trainer(settings) as trainer:
        engine = SlowEngine(on_stage=trainer.staged, **LONG)
        async with running_rollouter(settings, engine):
            await trainer.begin()
            await trainer.publish(0)
            await trainer.train(8)
            await at_limit(trainer, 8)
            in_slices = len(engine.calls)
            revision = await trainer.change(**change)
            await trainer.wait_status(lambda status: status.settings_revision == revision)
            await trainer.publish(1)
            await trainer.train(8)
    assert in_slices > 8
    whole = engine.calls[in_slices:]
    assert [call.sampling.max_tokens for call in whole] == [200] * 8
