"""Staleness 0 is on-policy: both daemons, at `staleness_threshold=0` and `trigger_parameter_sync_step=1`, take the steps of a
plain synchronous loop, bit for bit; at a threshold above 0 they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.engine import SamplingParams
from configs.loader import load
from configs.schema import Settings
from rollouter.codec import load_codec
from rollouter.daemon import RollouterDaemon, UserCode
from rollouter.prompts import prepare
from rollouter.rollouts import request_seed
from rollouter.tasks import load_rows
from sample_bus.journal import TRAINER_FILE, journal_dir, read_journal
from sample_bus.sample import Sample
from tests.fakes.samples import make_sample
from tests.fakes.sampling_engine import Sampler, SamplingEngine
from trainer import daemon as trainer_daemon
from trainer.advantages import group_advantages
from trainer.fsdp import FsdpPolicy
from trainer.models import prepare_model
from trainer.optimizer import warm_up
from trainer.policy import LossOptions
from trainer.recording import recording_of
from trainer.retained import Kept, retained_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HANG_S = 120.0
NUM_STEPS = 6


async def share_in_place(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Share of the answer's digits that stand in their place: spread even for a model that is never right."""
    return sum(a == b for a, b in zip(solution_str, str(ground_truth), strict=False)) / len(str(ground_truth))


def settings_for(run_dir: Path, **changes: object) -> Settings:
    values = {
        "run_dir": run_dir,
        "model.source": "tiny-sort",
        "model.dtype": "float32",
        "model.warm_start_steps": 40,
        "model.cache_dir": run_dir.parent / "cache",
        "data.source": "sort",
        "data.reward": f"{__name__}:share_in_place",
        "data.held_out_fraction": 0,
        "num_steps": NUM_STEPS,
        "group_size": 4,
        "samples_per_step": 8,
        "staleness_threshold": 0,
        "trigger_parameter_sync_step": 1,
        "sampling.max_tokens": 6,
        "sampling.temperature": 0.8,
        "sampling.stop": '["7"]',  # replies of different lengths
        "trainer.learning_rate": 1e-3,
        "trainer.warmup_steps": 2,
        "trainer.num_threads": 1,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpoint.at_end": True,
        "bus.retain": True,
        "bus.connect_timeout_s": HANG_S,
        "tracking.backends": "[jsonl]",
        **changes,
    }
    return load(None, [f"{key}={value}" for key, value in values.items()], environment={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    batch: tuple[tuple[object, ...], ...]
    """Of each sample: tokens, their logprobs as bits, their versions, the reward."""
    loss: float
    grad_norm: float


def seen(sample: Sample) -> tuple[object, ...]:
    versions = (sample.version_starts.tolist(), sample.versions.tolist())
    return sample.tokens.tolist(), sample.behavior_logprobs.tobytes(), versions, sample.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    steps: list[Step]
    state: dict[str, bytes]
    """Weights, moments and step count: the policy's files, by name."""


def synchronous(settings: Settings, directory: Path) -> Outcome:
    """Sample a batch with the current weights, train on it, and again: nothing is ahead of anything.

    Data order, seeds, rewards and arithmetic are those that the settings name; there is no bus, no daemon and no version to
    follow.
    """
    trainer, prepared = settings.trainer, prepare_model(settings)
    policy = FsdpPolicy(prepared.model_dir, trainer, dtype=prepared.dtype)
    engine = Sampler(prepared.model_dir)
    codec = load_codec(str(prepared.model_dir), trust_remote_code=False)
    rows = load_rows(settings.data.source)
    tasks = prepare(rows, settings.data, codec, seed=settings.seed, max_prompt_tokens=settings.data.max_prompt_tokens).source
    loss_options = LossOptions(
        clip_low=trainer.clip_low, clip_high=trainer.clip_high, max_importance_weight=trainer.max_importance_weight
    )
    steps: list[Step] = []
    for version in range(settings.num_steps):
        engine.load(policy.export_weights(), policy_version=version)
        samples: list[Sample] = []
        for _ in range(settings.samples_per_step // settings.group_size):
            issue = tasks.next()
            assert issue is not None, "the data ended"
            task = issue.task
            for seat in range(settings.group_size):
                sampling = SamplingParams(
                    temperature=settings.sampling.temperature,
                    max_tokens=settings.sampling.max_tokens,
                    stop_token_ids=codec.stop_token_ids(settings.sampling.stop),
                    seed=request_seed(settings.seed, f"{task.task_id}#{issue.number}/{seat}", 0),
                )
                reply, logprobs = engine.sample(task.prompt_ids, sampling)
                reward = asyncio.run(share_in_place("", codec.decode(reply), task.ground_truth))
                place: dict[str, Any] = {"group_id": task.task_id, "seat": seat, "group_size": settings.group_size}
                samples.append(
                    make_sample(
                        prompt=task.prompt_ids.tolist(),
                        reply=reply,
                        logprobs=logprobs,
                        policy_version=version,
                        reward=reward,
                        temperature=sampling.temperature,
                        **place,
                    )
                )
        rewards = np.array([sample.reward for sample in samples], np.float32)
        advantages = group_advantages(
            rewards, [sample.group_id for sample in samples], normalize_by_std=trainer.normalize_by_std
        )
        num_tokens = sum(sample.num_trained_tokens for sample in samples)
        sums = policy.accumulate(samples, advantages, denominator=num_tokens, options=loss_options)
        rate = trainer.learning_rate * warm_up(policy.optimizer_steps, trainer.warmup_steps)
        grad_norm = policy.step(learning_rate=rate) if advantages.any() else 0.0
        steps.append(Step(batch=tuple(map(seen, samples)), loss=sums.loss / num_tokens, grad_norm=grad_norm))
    directory.mkdir()
    policy.save(directory)
    return Outcome(steps=steps, state={path.name: path.read_bytes() for path in directory.iterdir()})


async def asynchronous(settings: Settings) -> Outcome:
    """The same run by trainer and rollouter over their bus; weights travel by weight sync. What is compared is what the trainer
    wrote: its journal, the samples that it kept, its checkpoint."""
    rollouter = RollouterDaemon(
        settings,
        UserCode.load(settings),
        open_fleet=lambda settings, *, live, on_change, on_round_result: SamplingEngine(),
        codec_of=lambda model_dir: load_codec(model_dir, trust_remote_code=False),
        drain=asyncio.Event(),
    )
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as daemons:
        daemons.create_task(trainer_daemon.run(settings))
        daemons.create_task(rollouter.run())
    run_id = (settings.run_dir / "run_id").read_text().strip()
    recording = recording_of(read_journal(journal_dir(settings.run_dir, run_id) / TRAINER_FILE))
    kept = Kept(retained_dir(settings.run_dir, run_id))
    steps = [
        Step(batch=tuple(seen(kept.sample(one)) for one in step.samples), loss=step.loss, grad_norm=step.grad_norm)
        for step in recording.steps
    ]
    policy = settings.run_dir / "checkpoints" / f"step_{settings.num_steps}" / "policy"
    return Outcome(steps=steps, state={path.name: path.read_bytes() for path in policy.iterdir()})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("plain")
    torch.set_num_threads(1)
    return synchronous(settings_for(root / "run"), root / "policy")


async def test_staleness_zero_is_a_synchronous_loop_bit_for_bit(plain: Outcome, tmp_path: Path) -> None:
    """B41: same batches, same losses and gradient norms, same weights and moments at the end."""
    both = await asynchronous(settings_for(tmp_path / "run"))
    assert len(both.steps) == NUM_STEPS
    for number, (step, expected) in enumerate(zip(both.steps, plain.steps, strict=True), 1):
        assert step.batch == expected.batch, f"step {number}"
        assert (step.loss, step.grad_norm) == (expected.loss, expected.grad_norm), f"step {number}"
    assert both.state == plain.state
    assert all(step.grad_norm > 0 for step in both.steps), "a step that changes nothing shows nothing"


async def test_half_a_period_ahead_is_not(plain: Outcome, tmp_path: Path) -> None:
    """The comparison can fail: half of the second batch is sampled before the first step, by other weights."""
    ahead = await asynchronous(settings_for(tmp_path / "run", staleness_threshold=0.5))
    assert ahead.steps[0] == plain.steps[0]
    assert ahead.steps[1].batch[:4] != plain.steps[1].batch[:4]
    assert all(step.loss != expected.loss for step, expected in zip(ahead.steps[1:], plain.steps[1:], strict=True))
    assert ahead.state != plain.state
