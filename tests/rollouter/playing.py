"""Single attempts against a fake engine: what the tests of the parts below the daemon share."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_loop.engine import SamplingParams
from agent_loop.rewards import load_reward
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from rollouter.codec import Codec
from rollouter.rollouts import Plan, Runner
from rollouter.scoring import Scorer
from sample_bus.messages import WeightRound
from tests.fakes.fake_engine import FakeEngine, FakeTokenizer

CODEC = Codec(FakeTokenizer())


async def _staged(announced: WeightRound, engine: str, nonce: str) -> None:
    return


async def engine_at(version: int = 3, **changes: Any) -> FakeEngine:
    engine = FakeEngine(**changes)
    announced = WeightRound(
        policy_version=version,
        incarnation="i",
        address="",
        manifest_digest="d",
        num_tensors=1,
        total_bytes=1,
        announced_at=0.0,
    )
    await engine.sync(announced, _staged)
    return engine


def make_plan(seat: int = 0, group_size: int = 1, temperature: float = 0.6) -> Plan:
    text = "3+4="
    task = Task(
        task_id="t",
        prompt_ids=np.array(CODEC.encode(text), np.int32),
        prompt_text=text,
        ground_truth="7",
        data_source="test",
        extra_info={"n": 1},
    )
    return Plan(
        task=task,
        group_id="g",
        seat=seat,
        group_size=group_size,
        rollout_id=f"g/{seat}",
        seed_key=f"g/{seat}",
        sampling=SamplingParams(temperature=temperature, max_tokens=8, stop_token_ids=CODEC.stop_token_ids(["\n"])),
        settings_revision=9,
        incarnation="i",
    )


def make_runner(
    engine: FakeEngine,
    *,
    loop: Any = None,
    reward: str = "agent_loop.rewards:exact_match",
    timeout_s: float = 30.0,
    max_model_len: int = 64,
    progress_interval_s: float = 0.0,
) -> Runner:
    return Runner(
        loop=loop or SingleTurn(),
        engine=engine,
        codec=CODEC,
        scorer=Scorer(load_reward(reward), CODEC),
        max_model_len=max_model_len,
        timeout_s=lambda: timeout_s,
        seed=1,
        progress_interval_s=lambda: progress_interval_s,
    )
