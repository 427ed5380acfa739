"""kill -9 of the rollouter in the middle of generation: a short while of it is lost, and no rollout begins anew."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.slices import BLOCK_TOKENS, MIN_TOKENS
from configs.schema import Settings
from sample_bus.issued import Issued
from sample_bus.journal import AttemptFailed, GroupAdmitted, read_journal
from sample_bus.messages import Recovery
from sample_bus.sample import Sample
from tests.fakes.slow_engine import SlowEngine, reply_of
from tests.rollouter.stand_in import StandInTrainer, at_limit, make_settings, stand_in_trainer

SPEED = 150.0
"""Tokens per second of one request."""
INTERVAL_S = 0.25
NUM_SAMPLES = 40
SHORTEST, LONGEST = SlowEngine().shortest, SlowEngine().longest


def _journal(run_dir: Path) -> list[Any]:
    return list(read_journal(run_dir / "journal" / "run-1" / "rollouter.log"))


async def _life(settings: Settings, tally: Path) -> Process:
    overrides = (
        f"run_dir={settings.run_dir}",
        f"bus.address={settings.bus.address}",
        "group_size=4",
        "samples_per_step=8",
        "staleness_threshold=4",
        "sampling.max_tokens=400",
        "sampling.stop=[]",
        "engine.max_model_len=512",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "rollouter.max_concurrent_rollouts=16",
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.rollouter.slow_daemon", *overrides),
        stderr=DEVNULL,
        env={**os.environ, "SLOW_ENGINE_SPEED": str(SPEED), "SLOW_ENGINE_TALLY": str(tally)},
    )


async def _recovery(trainer: StandInTrainer, *, process: int) -> Recovery:
    """What the run's process of that number did with what was in flight."""
    status = await trainer.wait_status(lambda status: status.recovery is not None and status.recovery.process == process)
    assert status.recovery is not None
    return status.recovery


@pytest.mark.parametrize("seed", [21, 22, 23])
async def test_deaths_in_the_middle_of_generation_cost_less_than_two_seconds_of_it(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """B38, B36: killed five times a seed, at random moments; every seat brings its one reply, and no token of it is generated
    twice but those that were not recorded yet."""
    chance = random.Random(seed)
    settings = make_settings(
        tmp_path,
        staleness_threshold=4.0,
        rollouter={"max_concurrent_rollouts": 16, "progress_interval_s": INTERVAL_S},
        sampling={"max_tokens": 400, "stop": ()},
        engine={"max_model_len": 512},
    )
    tally = tmp_path / "tally"
    samples: list[Sample] = []
    recoveries: list[Recovery] = []
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        await trainer.publish(0, staged={"engine-0": "engine-0-1"})
        for life in range(6):
            process = await _life(settings, tally)
            try:
                if life:  # the topic still tells of the process before
                    recoveries.append(await _recovery(trainer, process=life + 1))
                if life == 5:
                    samples += await trainer.train(NUM_SAMPLES - len(samples))
                    await at_limit(trainer, NUM_SAMPLES)
                else:
                    samples += await trainer.train(min(chance.randrange(1, 6), NUM_SAMPLES - len(samples)))
                    await asyncio.sleep(chance.random() * 0.4)
            finally:
                process.kill()
                await process.wait()

    groups = [record for record in _journal(tmp_path) if isinstance(record, GroupAdmitted)]
    seats = Counter((sample.group_id, sample.seat) for sample in samples)
    assert seats == Counter({(group.group_id, seat): 1 for group in groups for seat in range(4)}), f"seed {seed}"
    for sample in samples:
        reply = reply_of(sample.rollout_id, shortest=SHORTEST, longest=LONGEST)
        assert sample.tokens[sample.loss_mask == 1].tolist() == reply, f"seed {seed}: {sample.rollout_id}"

    lost = tally.stat().st_size - sum(sample.num_trained_tokens for sample in samples)
    at_most = sum(recovery.tokens_lost_at_most for recovery in recoveries)
    assert 0 <= lost <= at_most, f"seed {seed}: {recoveries}"
    in_flight = sum(recovery.continued + recovery.restarted for recovery in recoveries)
    assert at_most <= in_flight * (MIN_TOKENS + BLOCK_TOKENS), f"seed {seed}: {recoveries}"
    assert lost < in_flight * 2.0 * SPEED, f"seed {seed}"
    record_property("lost_seconds_a_rollout", lost / in_flight / SPEED)
    record_property("generated_twice_share", lost / tally.stat().st_size)
    interrupted = [record for record in _journal(tmp_path) if isinstance(record, AttemptFailed)]
    assert sum(recovery.continued for recovery in recoveries) == sum(record.then == "continue" for record in interrupted) > 0
    assert sum(recovery.tokens_kept for recovery in recoveries) == sum(record.kept_tokens for record in interrupted)
    assert Issued.of(_journal(tmp_path)).problems.texts == [], f"seed {seed}"
