"""reasoning-gym's tasks as episodes: attempts, what they are worth, and what a row may ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop import gym_environment
from agent_loop.engine import SamplingParams
from agent_loop.environment import EnvironmentLoop
from agent_loop.errors import BadGroundTruth, LoopError, RewardError
from agent_loop.gym_environment import Episode, ReasoningGym, Standing
from agent_loop.loop import LoopSetup, load_agent_loop
from agent_loop.rewards.gym import import_reasoning_gym
from agent_loop.session import Session, Trajectory
from agent_loop.task import Task
from configs.schema import ToolSettings
from rollouter.data.generated import open_reasoning_gym
from rollouter.errors import DataError
from tests.agent_loop.chat_models import FAMILIES, make_codec
from tests.agent_loop.scripted import ScriptedEngine, generation

CODEC = make_codec(FAMILIES["smollm2"])
SOURCE = "reasoning_gym:chain_sum?size=8&seed=3&min_terms=2&max_terms=2"
ENVIRONMENT = "agent_loop.gym_environment:ReasoningGym"


def task_of(index: int = 0, *, query: str = "", **extra: Any) -> Task:
    row = open_reasoning_gym(SOURCE + query).raw(index)
    return Task(
        task_id=row["task_id"],
        prompt_ids=np.array(CODEC.encode(row["prompt"]), np.int32),
        prompt_text=row["prompt"],
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra_info={**row["extra_info"], **extra},
    )


async def played(task: Task, *replies: str) -> tuple[Trajectory, str]:
    engine = ScriptedEngine(*(generation(CODEC.encode(reply + "<|im_end|>")) for reply in replies))
    sampling = SamplingParams(temperature=1.0, max_tokens=80)
    session = Session(engine, sampling, rollout_id="r.0", max_model_len=4000, codec=CODEC)
    loop = load_agent_loop("environment", LoopSetup(tools=ToolSettings(), environment=ENVIRONMENT))
    assert isinstance(loop, EnvironmentLoop)
    try:
        await loop.run(task, session)
    finally:
        await loop.close()
    trajectory = session.trajectory()
    return trajectory, CODEC.decode_whole(trajectory.tokens.tolist())


async def test_a_second_attempt_is_worth_half_of_a_first_one() -> None:
    task = task_of()
    first, text = await played(task, str(task.ground_truth))
    assert (first.reward, first.num_turns) == (1.0, 1)
    assert "Try again" not in text
    second, text = await played(task, "<answer>7</answer>", f"so <answer>{task.ground_truth}</answer>")
    assert (second.reward, second.num_turns) == (0.5, 2)
    assert "That is not right. Try again, attempts left: 2." in text
    assert second.reward_parts == {"attempts": 2.0, "solved": 1.0, "score": 1.0, "first_score": 0.0}
    assert second.token_rewards[second.token_rewards != 0].tolist() == [0.5]


async def test_an_episode_ends_with_its_last_attempt() -> None:
    got, text = await played(task_of(), "7", "8", "9")
    assert (got.reward, got.num_turns, got.reward_parts["solved"]) == (0.0, 3, 0.0)
    assert text.count("Try again") == 2


async def test_a_row_says_how_its_episode_goes() -> None:
    """Of a generated row by its source, of any other by its extra_info."""
    generated = task_of(query="&episode.attempts=2&episode.discount=0.9")
    assert generated.extra_info["reasoning_gym"]["config"] == {"size": 8, "seed": 3, "min_terms": 2, "max_terms": 2}
    got, _ = await played(generated, "7", str(generated.ground_truth))
    assert got.reward == pytest.approx(0.9)
    told = task_of(1, episode={"attempts": 2, "feedback": "No ({left} of {attempts})."})
    got, text = await played(told, "7", "8")
    assert got.num_turns == 2
    assert "No (1 of 2)." in text


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"tries": 3}, "got tries, expected some of attempts, discount, feedback"),
        ({"attempts": 0}, "attempts: got 0, expected 1 to 1000"),
        ({"attempts": "3"}, "attempts: got '3'"),
        ({"attempts": True}, "attempts: got True"),
        ({"discount": 1.5}, "discount: got 1.5, expected 0 to 1"),
        ({"feedback": " "}, "feedback: got ' ', expected text"),
    ],
)
def test_an_episode_that_cannot_be_is_refused_before_anything_is_generated(told: Mapping[str, Any], says: str) -> None:
    with pytest.raises(LoopError, match=says):
        ReasoningGym().reset(task_of(episode=told))
    query = "".join(f"&episode.{key}={'%22' + value + '%22' if value == '3' else value}" for key, value in told.items())
    if told.get("attempts") is not True:
        with pytest.raises(DataError, match=says):
            open_reasoning_gym(SOURCE + query)


async def test_a_row_of_another_release_is_the_rows_fault() -> None:
    task = task_of(reasoning_gym={"name": "chain_sum", "config": {"seed": 3}, "index": 5})
    with pytest.raises(BadGroundTruth, match="made by another release"):
        await played(task, "7")


async def test_an_answer_that_spins_in_its_scorer_costs_a_process_and_not_the_rollouter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B98: the family evaluates what the model wrote; a huge power would hold this process and its lock for hours."""
    monkeypatch.setattr(gym_environment, "SCORE_TIMEOUT_S", 3.0)
    gym_environment._scorers.cache_clear()
    try:
        source = "reasoning_gym:countdown?size=3&seed=3&min_numbers=3&max_numbers=3"
        row = open_reasoning_gym(source).raw(0)
        task = replace(task_of(), ground_truth=row["ground_truth"], extra_info=row["extra_info"])
        with pytest.raises(RewardError, match=r"took longer than reward\.timeout_s=3"):
            await played(task, "<answer>9**9**9**9</answer>")
        got, _ = await played(task, f"<answer>{task.ground_truth}</answer>")
        assert got.reward == 1.0
    finally:
        await asyncio.to_thread(gym_environment._scorers().close)
        gym_environment._scorers.cache_clear()


@given(st.lists(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]), min_size=1, max_size=6), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_rewards_of_the_steps_add_up_to_the_best_attempt(scores: list[float], discount: float) -> None:
    standing = Standing(episode=Episode(attempts=len(scores), discount=discount))
    steps = [standing.take(scores[0])]
    while not steps[-1].done:
        steps.append(standing.take(scores[len(steps)]))
    taken = scores[: len(steps)]
    assert sum(step.reward for step in steps) == pytest.approx(max(s * discount**k for k, s in enumerate(taken)))
    assert all(step.reward >= 0 for step in steps)
    assert 1.0 not in taken[:-1]
    assert taken[-1] == 1.0 or len(taken) == len(scores)


def test_feedback_with_braces_of_its_own_is_shown_as_it_is() -> None:
    assert Episode(feedback="{no} {left}").says(1) == "{no} 2"


def test_reasoning_gym_is_imported_in_many_threads_at_once() -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            import_reasoning_gym()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
