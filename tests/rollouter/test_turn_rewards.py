"""Rewards of turns from a reward function: they land at the ends of the turns, through processes and sums, or are an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import SamplingParams
from agent_loop.errors import RewardError, Unscored
from agent_loop.rewards import Score, score_of
from agent_loop.session import Session, Trajectory
from agent_loop.task import Task
from configs.schema import Settings
from rollouter import reward_facts
from rollouter.reward_facts import RewardFacts
from rollouter.rollouts import Episode, sample_of
from rollouter.scoring import Scorer, reward_of
from tests.agent_loop.scripted import Letters, ScriptedEngine, generation
from tests.fakes.fake_clock import FakeClock
from tests.rollouter.playing import engine_at, make_plan, make_runner

HERE = "tests.rollouter.dense_rewards"
TASK = Task(
    task_id="t", prompt_ids=np.array([1], np.int32), prompt_text="p", ground_truth="g", data_source="d", extra_info={"row": 1}
)


class Says:
    """A reward that says what it is told to of `extra_info`."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], Score]) -> None:
        self._answer = answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        return self._answer(extra_info)


async def played(*turns: str, forked: str = "") -> Trajectory:
    """Turns with an observation between them; `forked`: one more, in a branch that begins behind the first turn."""
    engine = ScriptedEngine(
        *(generation(Letters().encode(turn)) for turn in (*turns[:1], *([forked] * bool(forked)), *turns[1:]))
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=100, seed=7)
    session = Session(engine, sampling, rollout_id="r.0", max_model_len=512, codec=Letters())
    session.append(Letters().encode("prompt:"))
    for number, _ in enumerate(turns):
        await session.generate()
        if forked and number == 0:
            branch = session.fork()
            branch.append(Letters().encode("|branch:"))
            await branch.generate()
        if number < len(turns) - 1:
            session.append(Letters().encode("|next:"))
    return session.trajectory()


def told(trajectory: Trajectory) -> dict[str, Any]:
    return dict(RewardFacts(TASK, trajectory, Letters(), solution_str=Letters().decode(trajectory.response_ids.tolist())))


async def test_rewards_of_turns_land_at_the_ends_of_the_turns_and_in_the_sample() -> None:
    trajectory = await played("ab", "c", "def")
    scored = await Scorer(Says(lambda _: Score(value=1.0, turn_rewards=(0.25, 0.0, -1.0))), Letters()).score(TASK, trajectory)
    dense = scored.trajectory.token_rewards
    assert {int(at): float(dense[at]) for at in np.flatnonzero(dense)} == {8: 0.25, 24: -1.0}
    episode = Episode(trajectory=scored.trajectory, reward=scored.reward, unshaped_reward=scored.unshaped)
    sample = sample_of(make_plan(), 0, episode, now=FakeClock())
    sample.validate()
    assert (sample.reward, sample.token_rewards.tolist()) == (1.0, dense.tolist())


async def test_a_rollout_brings_the_rewards_that_its_function_gave_its_turns() -> None:
    episode = await make_runner(await engine_at(), reward=f"{HERE}:by_turn").attempt(make_plan(), 0)
    sample = sample_of(make_plan(), 0, episode, now=FakeClock())
    sample.validate()
    assert sample.token_rewards[-1] > 0
    assert np.flatnonzero(sample.token_rewards).tolist() == [sample.num_tokens - 1]
    assert sample.reward_parts == {"acc": 0.5}


async def test_rewards_of_a_function_are_added_to_those_that_the_loop_gave() -> None:
    trajectory = await played("ab", "c")
    dense = np.where(np.arange(trajectory.tokens.size) == 8, 0.5, 0.0).astype(np.float32)
    trajectory = replace(trajectory, token_rewards=dense)
    scored = await Scorer(Says(lambda _: Score(value=1.0, turn_rewards=(1.0, 2.0))), Letters()).score(TASK, trajectory)
    assert scored.trajectory.token_rewards[[8, 15]].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("rewards", [(), (1.0,), (1.0, 2.0, 3.0)])
async def test_another_number_of_rewards_than_of_turns_is_an_error_that_names_both(rewards: tuple[float, ...]) -> None:
    scorer = Scorer(Says(lambda _: Score(value=1.0, turn_rewards=rewards)), Letters())
    with pytest.raises(RewardError, match=rf"task t .*: got {len(rewards)} turn_rewards, expected 2, one for each turn"):
        await scorer.score(TASK, await played("ab", "c"))


async def test_rewards_that_no_sample_can_carry_are_the_rewards_fault() -> None:
    scorer = Scorer(Says(lambda _: Score(value=1.0, turn_rewards=(1e39, 0.0))), Letters())
    with pytest.raises(RewardError, match=r"got turn_rewards up to 1e\+39, expected numbers that fit into float32"):
        await scorer.score(TASK, await played("ab", "c"))


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ("ab", "of type str"),
        (3.0, "of type float"),
        ([1.0, float("nan")], r"turn_rewards\[1\]: .*got nan"),
        ([None], r"turn_rewards\[0\]: .*got None"),
        ([[1.0, 2.0]], r"turn_rewards\[0\]: .*got list"),
        (np.zeros((2, 2)), r"turn_rewards\[0\]"),
        (range(3), "of type range"),
    ],
)
def test_turn_rewards_that_are_no_numbers_are_an_error(rewards: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        score_of({"score": 1.0, "turn_rewards": rewards}, path="p")
    assert not isinstance(caught.value, Unscored)


def test_turn_rewards_are_no_part() -> None:
    got = score_of({"score": 1.0, "turn_rewards": np.array([0.5]), "acc": 1}, path="p")
    assert got == Score(value=1.0, parts={"acc": 1.0}, turn_rewards=(0.5,))
    assert score_of({"score": 1.0, "turn_rewards": None}, path="p") == Score(value=1.0)


def settings_of(tmp_path: Path, **sections: Any) -> Settings:
    return Settings.model_validate({"run_dir": tmp_path, **sections})


async def test_rewards_of_turns_come_from_processes_and_are_weighed_part_by_part(tmp_path: Path) -> None:
    parts = {
        "length": {"function": f"{HERE}:by_turn", "weight": 0.5},
        "place": {"function": f"{HERE}:by_place", "weight": 2.0},
        "exact": {"function": "agent_loop.rewards:exact_match", "weight": 1.0},
    }
    settings = settings_of(tmp_path, reward={"parts": parts, "num_processes": 1, "num_async_processes": 1})
    reward = await asyncio.to_thread(reward_of, settings)
    trajectory = await played("ab", "c", "def")
    async with asyncio.timeout(60), reward.running():
        scored = await Scorer(reward, Letters()).score(TASK, trajectory)
    assert scored.reward == 0.5 * 1.0 + 2.0 * 2.0
    assert scored.trajectory.token_rewards[[8, 15, 24]].tolist() == [1.0, 0.5 + 2.0, 1.5 + 4.0]
    assert scored.parts == {"length": 1.0, "length/acc": 0.5, "place": 2.0, "exact": 0.0}


async def test_parts_that_see_another_number_of_turns_are_named(tmp_path: Path) -> None:
    parts = {"few": {"function": f"{HERE}:by_turn"}, "many": {"function": f"{HERE}:one_too_many"}}
    settings = settings_of(tmp_path, reward={"parts": parts, "num_processes": 1})
    reward = await asyncio.to_thread(reward_of, settings)
    async with asyncio.timeout(60), reward.running():
        with pytest.raises(RewardError, match="turn_rewards: got 2 from few and 3 from many"):
            await Scorer(reward, Letters()).score(TASK, await played("ab", "c"))


async def test_a_reward_sees_every_branch() -> None:
    """The reply is the session's own; turns and segments are all there, in the order in which their rewards are given back."""
    trajectory = await played("ab", "c", forked="xyz")
    facts = told(trajectory)
    assert facts["turns"] == ["ab", "c", "xyz"]
    assert facts["turn_segments"] == [0, 0, 1]
    assert facts["segments"] == ["ab|next:c", "xyz"]
    assert (facts["num_turns"], facts["row"]) == (3, 1)
    scored = await Scorer(Says(lambda _: Score(value=0.0, turn_rewards=(1.0, 2.0, 3.0))), Letters()).score(TASK, trajectory)
    dense = scored.trajectory.token_rewards
    ends = [int(at) for at in np.flatnonzero(dense)]
    assert [chr(trajectory.tokens[at]) for at in ends] == ["b", "c", "z"]
    assert dense[ends].tolist() == [1.0, 2.0, 3.0]


async def test_texts_are_bounded_and_decoded_only_for_those_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_facts, "MAX_TEXT_TOKENS", 3)
    trajectory = await played("ab", "cd", "ef")
    assert told(trajectory)["turns"] == ["ab", "c", ""]

    class Unasked(Letters):
        def decode(self, token_ids: Any) -> str:
            raise AssertionError("decoded")

    facts = RewardFacts(TASK, trajectory, Unasked(), solution_str="ab")
    assert (facts["num_turns"], facts["segments"], "turns" in list(facts), len(facts)) == (3, ["ab"], True, 7)
    with pytest.raises(AssertionError, match="decoded"):
        facts["turns"]


async def test_what_a_row_says_wins() -> None:
    trajectory = await played("ab", "c")
    task = replace(TASK, extra_info={"turns": "the row's", "num_turns": 9})
    facts = RewardFacts(task, trajectory, Letters(), solution_str="")
    assert (facts["turns"], facts["num_turns"]) == ("the row's", 9)
    assert sorted(facts) == sorted(dict(facts)) == sorted(set(facts))


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6), st.booleans())
def test_every_turns_reward_is_found_again_at_its_turn(rewards: list[float], forks: bool) -> None:
    turns = ["abcdef"[: k % 3 + 1] for k in range(len(rewards) - (forks and len(rewards) > 1))]
    trajectory = asyncio.run(played(*turns, forked="z" if forks and len(rewards) > 1 else ""))
    dense = trajectory.with_turn_rewards(rewards).token_rewards
    got = [float(dense[start:end].sum()) for start, end in trajectory.turn_spans.tolist()]
    assert got == pytest.approx(rewards)
    assert not dense[trajectory.loss_mask == 0].any()
