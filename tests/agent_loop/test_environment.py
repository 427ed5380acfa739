"""Environments: their rewards are the rollout's, and their failures stay in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from agent_loop.engine import SamplingParams
from agent_loop.environment import EnvironmentLoop, Step
from agent_loop.errors import LoopError
from agent_loop.loop import LoopSetup, load_agent_loop
from agent_loop.session import Session
from agent_loop.task import Task
from configs.schema import ToolSettings
from tests.agent_loop.chat_models import FAMILIES, make_codec
from tests.agent_loop.scripted import ScriptedEngine, generation

CODEC = make_codec(FAMILIES["smollm2"])
TASK = Task(
    task_id="t",
    prompt_ids=np.array([1], np.int32),
    prompt_text="guess",
    ground_truth=7,
    data_source="guess",
    messages=({"role": "user", "content": "Guess a number."},),
)


class Guess:
    """Blocking `reset`, asynchronous `step`."""

    def reset(self, task: Task) -> str:
        self._number = int(task.ground_truth)
        return "It is below 10."

    async def step(self, action: str) -> Step:
        if action == str(self._number):
            return Step(observation="", reward=1.0, done=True, parts={"found": 1.0})
        return Step(observation="Higher." if int(action) < self._number else "Lower.", reward=-0.25)


class Stuck(Guess):
    async def step(self, action: str) -> Step:
        threading.Event().wait(3)
        return Step(observation="")


def session_of(*texts: str) -> Session:
    engine = ScriptedEngine(*(generation(CODEC.encode(text + "<|im_end|>")) for text in texts))
    sampling = SamplingParams(temperature=1.0, max_tokens=50)
    return Session(engine, sampling, rollout_id="r.0", max_model_len=999, codec=CODEC)


async def test_an_episode_ends_with_the_sum_of_its_rewards() -> None:
    session = session_of("3", "9", "7")
    loop = load_agent_loop(
        "environment", LoopSetup(tools=ToolSettings(), environment="tests.agent_loop.test_environment:Guess")
    )
    await loop.run(TASK, session)
    got = session.trajectory()
    assert (got.reward, got.reward_parts, got.num_turns) == (0.5, {"found": 1.0}, 3)
    assert got.token_rewards[got.token_rewards != 0].tolist() == [-0.25, -0.25, 1.0]
    text = CODEC.decode_whole(got.tokens.tolist())
    assert "It is below 10." in text
    assert text.index("Higher.") < text.index("Lower.")


async def test_an_episode_has_a_last_turn() -> None:
    session = session_of("3", "3")
    await EnvironmentLoop(Guess, ToolSettings(max_turns=2)).run(TASK, session)
    assert (session.trajectory().reward, session.num_turns) == (-0.5, 2)


async def test_an_environment_that_raises_or_hangs_fails_its_own_rollout() -> None:
    """B161, B162"""
    with pytest.raises(ValueError, match="invalid literal"):
        await EnvironmentLoop(Guess, ToolSettings()).run(TASK, session_of("x"))
    with pytest.raises(TimeoutError, match=r"an environment.s step gave no result within 0\.2 s"):
        await EnvironmentLoop(Stuck, ToolSettings(timeout_s=0.2)).run(TASK, session_of("3"))


@pytest.mark.parametrize("path", [None, "no.module:X", "tests.agent_loop.scripted:Letters"])
def test_an_environment_that_is_not_there_is_an_error_at_load(path: str | None) -> None:
    with pytest.raises(LoopError, match=r"rollouter\.environment: got"):
        load_agent_loop("environment", LoopSetup(tools=ToolSettings(), environment=path))
