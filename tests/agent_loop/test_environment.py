"""Environments: their rewards are the rollout's, and their failures stay in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import SamplingParams
from agent_loop.environment import Environment, EnvironmentLoop, Step
from agent_loop.errors import LoopError, ToolUnavailable
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


async def run(make: Callable[[], Environment], settings: ToolSettings, session: Session) -> None:
    """One episode of an agent loop of its own."""
    loop = EnvironmentLoop(make, settings)
    try:
        await loop.run(TASK, session)
    finally:
        await loop.close()


async def test_an_episode_ends_with_the_sum_of_its_rewards() -> None:
    session = session_of("3", "9", "7")
    loop = load_agent_loop(
        "environment", LoopSetup(tools=ToolSettings(), environment="tests.agent_loop.test_environment:Guess")
    )
    assert isinstance(loop, EnvironmentLoop)
    await loop.run(TASK, session)
    await loop.close()
    got = session.trajectory()
    assert (got.reward, got.reward_parts, got.num_turns) == (0.5, {"found": 1.0}, 3)
    assert got.token_rewards[got.token_rewards != 0].tolist() == [-0.25, -0.25, 1.0]
    text = CODEC.decode_whole(got.tokens.tolist())
    assert "It is below 10." in text
    assert text.index("Higher.") < text.index("Lower.")


async def test_an_episode_has_a_last_turn() -> None:
    session = session_of("3", "3")
    await run(Guess, ToolSettings(max_turns=2), session)
    assert (session.trajectory().reward, session.num_turns) == (-0.5, 2)


async def test_an_environment_that_raises_or_hangs_fails_its_own_rollout() -> None:
    """B161, B162"""
    with pytest.raises(ValueError, match="invalid literal"):
        await run(Guess, ToolSettings(), session_of("x"))
    with pytest.raises(TimeoutError, match=r"an environment.s step gave no result within 0\.2 s"):
        await run(Stuck, ToolSettings(timeout_s=0.2), session_of("3"))


@pytest.mark.parametrize("path", [None, "no.module:X", "tests.agent_loop.scripted:Letters"])
def test_an_environment_that_is_not_there_is_an_error_at_load(path: str | None) -> None:
    with pytest.raises(LoopError, match=r"rollouter\.environment: got"):
        load_agent_loop("environment", LoopSetup(tools=ToolSettings(), environment=path))


async def play(*steps: Any, **settings: Any) -> Session:
    class Scripted:
        def __init__(self) -> None:
            self._left = list(steps)

        def reset(self, task: Task) -> None:
            return None

        def step(self, action: str) -> Any:
            return self._left.pop(0)

    session = session_of(*["x"] * len(steps))
    await run(Scripted, ToolSettings(**settings), session)
    return session


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (("obs", 1.0, True), "got a tuple from the environment, expected a Step"),
        (Step(observation="", reward="1", done=True), "got '1' as a step's reward, expected a number"),  # type: ignore[arg-type]
        (Step(observation="", reward=None, done=True), "got None as a step's reward"),  # type: ignore[arg-type]
        (Step(observation="", reward=10**400, done=True), "as a step's reward, expected a number: OverflowError"),
        (Step(observation="", reward=float("nan"), done=True), "got nan as a step's reward"),
        (Step(observation="", reward=1e39, done=True), "got 1e\\+39 as a step's reward, expected a number of at most"),
        (Step(observation=None), "got None as an observation, expected text"),  # type: ignore[arg-type]
        (Step(observation=5), "got a int as an observation"),  # type: ignore[arg-type]
        (Step(observation="", parts={"a": "x"}), "got 'x' as the part 'a' of a reward"),  # type: ignore[dict-item]
        (Step(observation="", parts=None), "got None as the parts of a step's reward"),  # type: ignore[arg-type]
    ],
)
async def test_a_step_that_is_none_fails_its_rollout_with_what_was_got(step: Any, words: str) -> None:
    with pytest.raises(LoopError, match=rf"rollout r\.0: .*{words}"):
        await play(step)


async def test_what_counts_as_a_number_or_as_text_is_taken() -> None:
    session = await play(
        Step(observation="half \ud800", reward=np.float32(0.5), parts={"a": np.int64(2)}),  # type: ignore[arg-type, dict-item]
        Step(observation=None, reward=True, done=True),  # type: ignore[arg-type]
    )
    got = session.trajectory()
    assert (got.reward, got.reward_parts) == (1.5, {"a": 2.0})
    assert "half \\ud800" in CODEC.decode_whole(got.tokens.tolist())


@pytest.mark.parametrize("how", ["ends", "raises", "hangs", "cannot be closed"])
async def test_an_environment_is_closed_however_its_episode_ends(how: str) -> None:
    closed = []
    release = threading.Event()

    class Held(Guess):
        async def step(self, action: str) -> Step:
            if how == "raises":
                raise KeyError(how)
            if how == "hangs":
                release.wait(20)
            return Step(observation="", done=True)

        def close(self) -> None:
            closed.append(how)
            if how == "cannot be closed":
                raise SystemExit(how)

    loop = EnvironmentLoop(Held, ToolSettings(timeout_s=0.3))
    try:
        await loop.run(TASK, session_of("3"))
    except (KeyError, TimeoutError):
        assert how in ("raises", "hangs")
    await loop.close()
    release.set()
    assert closed == [how]


async def test_steps_that_hang_are_bounded_in_number() -> None:
    """B161: their threads cannot be ended."""
    release = threading.Event()

    class Hangs(Guess):
        def step(self, action: str) -> Step:  # type: ignore[override]
            release.wait(60)
            return Step(observation="", done=True)

    loop = EnvironmentLoop(Hangs, ToolSettings(timeout_s=0.05, max_concurrent=2))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await loop.run(TASK, session_of("3"))
    with pytest.raises(ToolUnavailable, match="an environment's step: 2 calls of it were given up and do not end"):
        await loop.run(TASK, session_of("3"))
    release.set()
    await loop.close()
