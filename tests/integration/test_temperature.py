"""One temperature: what the run samples at is what every path that samples, re-scores or trains goes by."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from agent_loop.engine import Generation
from agent_loop.errors import BadGeneration
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.vllm_client import VllmClient
from configs.schema import TrainerSettings
from rollouter.rollouts import sample_of
from sample_bus.messages import EvaluationResult
from sample_bus.sample import Sample
from tests.fakes.fake_clock import FakeClock
from tests.fakes.fake_engine import Call, FakeEngine, generation_of
from tests.fakes.fake_vllm import FakeVllm
from tests.fakes.sampling_engine import Sampler
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.rollouter.playing import engine_at, make_plan, make_runner
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions
from trainer.probe import Probe
from trainer.update import UpdateOptions, train_step

ROOT = Path(__file__).resolve().parents[2]


class EveryPath:
    """Asks for turns in every way that a session has."""

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()
        session.append([1, 2])
        await session.generate(max_tokens=3)
        branch = session.fork()
        await branch.generate()
        session.rewind(2)
        await session.generate()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", TinyModel.UNTIED, seed=1)


async def sampled(model_dir: Path, temperature: float) -> tuple[Sample, FakeEngine]:
    sampler = Sampler(model_dir)

    def generate(call: Call, tokens: Sequence[int]) -> Generation:
        ids, logprobs = sampler.sample(call.prompt_ids, call.sampling)
        return replace(generation_of(ids, call.version, call.sampling), logprobs=np.array(logprobs, np.float32))

    engine = await engine_at(reply=lambda prompt_ids, sampling, version: [1], make_generation=generate)
    plan = make_plan(temperature=temperature)
    episode = await make_runner(engine, loop=EveryPath()).attempt(plan, 0)
    sample = sample_of(plan, 0, episode, now=FakeClock())
    sample.validate()
    return sample, engine


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_what_is_sampled_and_what_the_trainer_scores_are_at_one_temperature(model_dir: Path, temperature: float) -> None:
    """B52, B50: every request of a rollout, the anchor's scoring and the training step's own; the weights are the same, so each
    ratio is 1, and only at that temperature."""
    import torch

    sample, engine = await sampled(model_dir, temperature)
    assert {call.sampling.temperature for call in engine.calls} == {temperature}
    assert (len(engine.calls), sample.temperature) == (4, temperature)
    policy = FsdpPolicy(model_dir, TrainerSettings(), dtype=torch.float32)
    trained = sample.loss_mask != 0

    def mismatch(scored_at: float) -> float:
        (logprobs,) = policy.logprobs([replace(sample, temperature=scored_at)])
        return float(np.abs(logprobs - sample.behavior_logprobs)[trained].max())

    assert mismatch(temperature) < 1e-4
    assert mismatch(temperature * 1.5) > 1e-3
    report = train_step(
        policy, [sample], np.ones(1, np.float32), UpdateOptions(learning_rate=0.0, warmup_steps=0, loss=LossOptions())
    )
    assert report.mismatch_max_abs < 1e-4
    assert abs(report.importance_mean - 1) < 1e-4


async def test_a_changed_temperature_reaches_every_request_of_the_next_rollouts(tmp_path: Path) -> None:
    """B52: and evaluation keeps to its own setting."""
    settings = make_settings(tmp_path, evaluation={"at_start": True, "max_tasks": 2, "temperature": 0.0})
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, reply=lambda prompt_ids, sampling, version: [3, 1])
        async with running_rollouter(settings, engine, loop=EveryPath()):
            await trainer.begin()
            await trainer.publish(0)
            first = await trainer.train(8)
            await trainer.change(sampling__temperature=0.25)
            await trainer.wait_status(lambda status: status.settings_revision == 1)
            await trainer.evaluate(1, 1)
            await trainer.publish(1)
            await trainer.wait_report(EvaluationResult)
            samples = [*first, *await trainer.train(8)]
    assert {sample.temperature for sample in samples} == {1.0, 0.25}
    of_rollout: dict[str, set[float]] = {}
    for call in engine.calls:
        of_rollout.setdefault(call.request_id.rpartition(".")[0], set()).add(call.sampling.temperature)
    assert {call.sampling.temperature for call in engine.calls} == {0.0, 1.0, 0.25}
    assert all(len(seen) == 1 for seen in of_rollout.values()), of_rollout


class Recording:
    """A policy that scores everything 0 and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sample] = []

    def logprobs(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        self.asked += samples
        return [np.zeros(sample.num_tokens, np.float32) for sample in samples]


async def test_both_sides_of_the_probe_score_at_one_temperature(tmp_path: Path) -> None:
    """B52: the probe compares weights, so both ends leave the run's temperature out."""
    policy: Any = Recording()
    ids = (1, 2, 3)
    Probe(policy, ids).score(0)
    async with FakeVllm(socket=tmp_path / "e") as server:
        async with VllmClient(server.address, request_timeout_s=60, control_timeout_s=60) as client:
            with pytest.raises(BadGeneration, match="prompt_logprobs"):  # what it is asked is looked at, not what it answers
                await client.score(ids, cache_salt="s")
        (body,) = server.bodies
    assert {body["sampling_params"]["temperature"], policy.asked[0].temperature} == {1.0}
    assert "prompt_logprobs" in body["sampling_params"]


OWN_TEMPERATURE = {
    "agent_loop/vllm_client.py": "the probe of weights, at 1 on both sides",
    "trainer/probe.py": "the probe of weights, at 1 on both sides",
}


def test_no_path_has_a_temperature_of_its_own() -> None:
    """B52: a number in the code is where a path leaves the setting."""
    found = set()
    for package in ("agent_loop", "rollouter", "trainer", "weight_sync", "sample_bus"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "temperature" and isinstance(node.value, ast.Constant):
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(OWN_TEMPERATURE)
