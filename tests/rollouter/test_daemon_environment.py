"""The shipped pair of generator and environment in a running rollouter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent_loop.engine import SamplingParams
from agent_loop.environment import EnvironmentLoop
from agent_loop.loop import load_agent_loop
from rollouter.loops import setup_of
from rollouter.tasks import load_rows
from tests.fakes.fake_engine import FakeTokenizer
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer


def _right_at_the_second_attempt(prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, version: int) -> Sequence[int]:
    text = FakeTokenizer().decode(prompt_ids.tolist(), skip_special_tokens=True)
    left, operator, right = text.partition("problem: ")[2].partition(" =")[0].split()
    answer = int(left) + int(right) if operator == "+" else int(left) - int(right)
    wrong = 0 if "Try again" in text else 1
    return FakeTokenizer().encode(f"{answer + wrong}\n", add_special_tokens=False)


async def test_tasks_of_reasoning_gym_are_played_over_several_attempts(tmp_path: Path) -> None:
    source = "reasoning_gym:chain_sum?size=8&min_terms=2&max_terms=2&episode.attempts=2"
    settings = make_settings(
        tmp_path,
        data={"source": source, "held_out_fraction": 0.0},
        rollouter={"agent_loop": "environment", "environment": "agent_loop.gym_environment:ReasoningGym"},
        engine={"max_model_len": 512},
    )
    loop = load_agent_loop(settings.rollouter.agent_loop, setup_of(settings))
    assert isinstance(loop, EnvironmentLoop)
    async with stand_in_trainer(settings) as trainer:
        engine = engine_of(trainer, reply=_right_at_the_second_attempt)
        async with running_rollouter(settings, engine, loop=loop, rows=load_rows(source)):
            await trainer.begin()
            await trainer.publish(0)
            samples = await trainer.train(8)
    assert {(sample.reward, sample.num_turns) for sample in samples} == {(0.5, 2)}
    assert all(sample.reward_parts["solved"] == 1.0 and sample.reward_parts["attempts"] == 2.0 for sample in samples)
    assert all(sample.token_rewards[sample.token_rewards != 0].tolist() == [0.5] for sample in samples)
