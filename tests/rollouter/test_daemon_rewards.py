"""Rewards in a running rollouter: what goes wrong in one stays in its rollout, under its own reason, and never becomes a 0."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

from agent_loop.rewards import Scoring
from configs.schema import Settings
from rollouter.scoring import reward_of
from rollouter.tasks import Row
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

HERE = "tests.agent_loop.rewards.misbehaving"


async def opened(settings: Settings) -> Scoring:
    return await asyncio.to_thread(reward_of, settings)


def rewarded(tmp_path: Path, function: str, **changes: Any) -> Settings:
    reward = {"num_processes": 2, "timeout_s": 1.0, "max_attempts": 2, "retry_delay_s": 0.01}
    return make_settings(tmp_path, data={"reward": f"{HERE}:{function}", "held_out_fraction": 0.0}, reward=reward, **changes)


async def test_only_a_wrong_answer_is_a_zero_and_each_failure_has_its_own_reason(tmp_path: Path) -> None:
    """B105, B106: a judge that is down, a reward that hangs, one that raises, one that says None, and a wrong answer."""
    settings = rewarded(tmp_path, "by_truth", samples_per_step=20, rollouter__max_attempts=1, rollouter__max_task_failures=100)
    words = {"down": "reward unavailable", "sleep": "reward timeout", "raise": "reward failed", "none": "unscored", "wrong": ""}
    rows = [Row(task_id=word, prompt="1+1=", ground_truth=word, data_source="test") for word in words]
    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), reward=await opened(settings), rows=rows),
    ):
        await trainer.begin()
        await trainer.publish(0)
        leased = await trainer.lease(4)
        await trainer.lease_closures(16)
        assert {item.sample.task_id for item in leased} == {"wrong"}
        assert [item.sample.reward for item in leased] == [0.0] * 4
        reasons: dict[str, set[str]] = defaultdict(set)
        for item in trainer.closures:
            reasons[item.closed.task_id].add(item.closed.reason)
        for word, reason in words.items():
            assert reasons[word] - {"siblings failed"} == ({reason} if reason else set())


async def test_steps_fill_while_one_reward_in_a_hundred_fails(tmp_path: Path) -> None:
    """B160, B168: five hundred rollouts in flight."""
    settings = rewarded(
        tmp_path,
        "one_in_a_hundred",
        samples_per_step=500,
        rollouter__max_concurrent_rollouts=500,
        rollouter__max_attempts=10,
        bus__max_queued_samples=1000,
    )
    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), reward=await opened(settings)),
    ):
        await trainer.begin()
        await trainer.publish(0)
        for step in range(1, 3):
            samples = await trainer.train(500)
            assert {sample.reward for sample in samples} == {1.0}
            if step < 2:
                await trainer.publish(step)
        status = await trainer.wait_status(lambda status: status.counts.offered == 1000)
        assert status.counts.retried > 0
        assert status.counts.failed == {}
