"""Scoring: what the reward gave, what the length cost, and which of the two is evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import RewardError
from agent_loop.rewards import Score, reasoning_gym
from configs.errors import ConfigError
from configs.schema import Settings
from rollouter.data.generated import open_reasoning_gym
from rollouter.rollouts import sample_of
from rollouter.scoring import Scorer, Shaping, reward_of
from tests.fakes.fake_clock import FakeClock
from tests.rollouter.playing import CODEC, engine_at, make_plan, make_runner


class Seeing:
    """A reward that keeps what it was given."""

    def __init__(self, score: Score) -> None:
        self.score_given = score
        self.seen: list[dict[str, Any]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        self.seen.append({"solution_str": solution_str, "ground_truth": ground_truth, "extra_info": extra_info})
        return self.score_given


def settings_of(tmp_path: Path, **sections: Any) -> Settings:
    return Settings.model_validate({"run_dir": tmp_path, **sections})


async def test_a_rollout_is_scored_by_its_reply_and_told_what_was_asked() -> None:
    runner = make_runner(await engine_at())
    reward = Seeing(Score(value=0.5, parts={"acc": 1.0}))
    runner._scorer = Scorer(reward, CODEC)
    episode = await runner.attempt(make_plan(), 0)
    ((seen),) = reward.seen
    assert seen["ground_truth"] == "7"
    assert seen["extra_info"] == {
        "n": 1,
        "prompt_text": "3+4=",
        "num_turns": 1,
        "stop_reason": episode.trajectory.stop_reason,
        "turns": [seen["solution_str"]],
        "segments": [seen["solution_str"]],
        "turn_segments": [0],
    }
    assert (episode.reward, episode.unshaped_reward) == (0.5, 0.5)
    assert sample_of(make_plan(), 0, episode, now=FakeClock()).reward_parts == {"acc": 1.0}


async def test_what_the_length_costs_is_trained_on_and_not_evaluated() -> None:
    runner = make_runner(await engine_at())
    shaping = Shaping(max_tokens=2, buffer_tokens=2, overlong_factor=0.5, length_coefficient=0.25)
    runner._scorer = Scorer(Seeing(Score(value=1.0)), CODEC, lambda: shaping)
    episode = await runner.attempt(make_plan(), 0)
    sampled = int(episode.trajectory.loss_mask.sum())
    overlong, length = -0.5 * min(1.0, sampled / 2), -0.25 * min(1.0, sampled / 2)
    assert episode.reward == pytest.approx(1.0 + overlong + length)
    assert episode.unshaped_reward == 1.0
    assert episode.reward_parts == pytest.approx({"overlong_penalty": overlong, "length_penalty": length})


async def test_an_agent_loop_that_knows_its_reward_is_believed_and_nobody_else_is_asked() -> None:
    runner = make_runner(await engine_at())
    episode = await runner.attempt(make_plan(), 0)
    reward = Seeing(Score(value=0.5))
    own = dataclasses.replace(episode.trajectory, reward=2.0, reward_parts={"steps": 3.0})
    scored = await Scorer(reward, CODEC).score(make_plan().task, own)
    assert (scored.reward, scored.parts, reward.seen) == (2.0, {"steps": 3.0}, [])
    with pytest.raises(RewardError, match="of the agent loop: got nan"):
        await Scorer(reward, CODEC).score(make_plan().task, dataclasses.replace(own, reward=float("nan")))


def test_shaping_follows_the_settings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, sampling={"max_tokens": 64})
    assert Shaping.of(settings).parts(64) == {}
    settings = settings_of(tmp_path, sampling={"max_tokens": 64}, reward={"overlong_buffer_tokens": 32, "length_penalty": 0.5})
    assert Shaping.of(settings).parts(48) == {"overlong_penalty": -0.5, "length_penalty": -0.375}
    settings = settings_of(tmp_path, reward={"overlong_buffer_tokens": 10, "overlong_max_tokens": 20, "overlong_penalty": 2.0})
    assert Shaping.of(settings).parts(20) == {"overlong_penalty": -2.0}


async def test_the_reward_of_a_run_is_a_function_or_a_sum(tmp_path: Path) -> None:
    single = reward_of(settings_of(tmp_path))
    async with single.running():
        got = await single.score(data_source="d", solution_str="7", ground_truth="7", extra_info={})
    assert got == Score(value=1.0)
    parts = {
        "right": {"function": "agent_loop.rewards:exact_match"},
        "number": {"function": "agent_loop.rewards:numeric_match", "weight": 0.5},
    }
    weighed = reward_of(settings_of(tmp_path, reward={"parts": parts}))
    async with weighed.running():
        got = await weighed.score(data_source="d", solution_str="7.0", ground_truth="7", extra_info={})
    assert got == Score(value=0.5, parts={"right": 0.0, "number": 1.0})


def test_a_reward_that_does_not_load_is_an_error_of_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no function nothing"):
        reward_of(settings_of(tmp_path, data={"reward": "agent_loop.rewards:nothing"}))


@pytest.mark.parametrize("source", ["countdown?size=4&min_numbers=3", "basic_arithmetic?size=4", "leg_counting?size=4&seed=5"])
def test_rows_of_reasoning_gym_are_scored_by_their_family(source: str) -> None:
    table = open_reasoning_gym(f"reasoning_gym:{source}")
    for row in (table.raw(0), table.raw(3)):
        truth, info = row["ground_truth"], row["extra_info"]
        assert reasoning_gym(row["data_source"], f"so <answer>{truth}</answer>", truth, info) == 1.0
        assert reasoning_gym(row["data_source"], "<answer>no idea</answer>", truth, info) < 1.0
