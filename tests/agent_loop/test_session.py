"""Sessions: what is trained is what was sampled, budgets add up, trajectories make valid samples."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import NO_VERSION, Generation, SamplingParams
from agent_loop.errors import BadGeneration, EngineUnavailable, LoopError, NoRoom
from agent_loop.session import Session, Trajectory
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from sample_bus.sample import Sample, StopReason
from tests.agent_loop.scripted import Letters, ScriptedEngine, generation


def session_of(engine: ScriptedEngine, *, max_tokens: int = 100, max_model_len: int = 512, seed: int | None = 7) -> Session:
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
    return Session(engine, sampling, rollout_id="r-0", max_model_len=max_model_len, codec=Letters())


async def test_a_single_turn_records_prompt_and_reply() -> None:
    engine = ScriptedEngine(generation([7, 8, 9], runs=((0, 3), (2, 4))))
    session = session_of(engine)
    task = Task(task_id="t", prompt_ids=np.array([1, 2], np.int32), prompt_text="", ground_truth="", data_source="test")
    await SingleTurn().run(task, session)
    got = session.trajectory()
    assert engine.prompts == [[1, 2]]
    assert got.tokens.tolist() == [1, 2, 7, 8, 9]
    assert got.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert got.behavior_logprobs.tolist() == pytest.approx([0, 0, -0.01, -0.02, -0.03])
    assert (got.version_starts.tolist(), got.versions.tolist()) == ([0, 2, 4], [NO_VERSION, 3, 4])
    assert got.kept_cache.tolist() == [0, 0, 1]
    assert (got.num_turns, got.num_prompt_tokens, got.stop_reason) == (1, 2, "stop")
    assert got.response_ids.tolist() == [7, 8, 9]


async def test_an_aborted_turn_goes_on_with_the_budget_that_remains() -> None:
    """B68: 100 in all, aborted at 60, then at 30: the third request asks for 10."""
    engine = ScriptedEngine(
        generation([5] * 60, end="abort"), generation([], end="abort"), generation([6] * 30, end="abort"),
        generation([7] * 10, end="length"),
    )  # fmt: skip
    session = session_of(engine)
    session.append([1, 2])
    turn = await session.generate()
    assert [sampling.max_tokens for sampling in engine.samplings] == [100, 40, 40, 10]
    assert [len(prompt) for prompt in engine.prompts] == [2, 62, 62, 92]
    assert turn.token_ids.size == 100
    assert turn.stop_reason == "length"
    assert session.num_turns == 1


async def test_a_turn_that_goes_on_with_a_fresh_cache_begins_a_run_of_its_own() -> None:
    """Version 4 went on with the cache of version 3, was aborted, and was asked again: nothing old stands before that."""
    first = generation([5, 6], end="abort", runs=((0, 3), (1, 4)))
    session = session_of(ScriptedEngine(first, generation([7, 8], runs=((0, 4),))))
    session.append([1])
    await session.generate()
    got = session.trajectory()
    assert got.version_starts.tolist() == [0, 1, 2, 3]
    assert got.versions.tolist() == [NO_VERSION, 3, 4, 4]
    assert got.kept_cache.tolist() == [0, 0, 1, 0]
    sample_of(got).validate()


async def test_a_turn_aborted_at_its_last_token_asks_for_nothing_more() -> None:
    """B68: aborted at 100 of 100."""
    engine = ScriptedEngine(generation([5] * 100, end="abort"))
    session = session_of(engine)
    session.append([1])
    assert (await session.generate()).stop_reason == "length"
    assert len(engine.prompts) == 1


async def test_a_turn_that_is_aborted_again_and_again_without_a_token_is_given_up() -> None:
    session = session_of(ScriptedEngine(*[generation([], end="abort")] * 20))
    session.append([1])
    with pytest.raises(EngineUnavailable, match="8 times"):
        await session.generate()


async def test_each_request_of_a_rollout_has_its_own_id_and_seed() -> None:
    engine = ScriptedEngine(generation([5], end="abort"), generation([6]), generation([7]))
    session = session_of(engine)
    session.append([1])
    await session.generate()
    await session.generate()
    assert engine.request_ids == ["r-0-0", "r-0-1", "r-0-2"]
    seeds = [sampling.seed for sampling in engine.samplings]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("context", "expected"), [(200, 312), (511, 1)])
async def test_a_turn_asks_for_no_more_than_fits(context: int, expected: int) -> None:
    """B164: model length 512, max_tokens 400."""
    engine = ScriptedEngine(generation([5]))
    session = session_of(engine, max_tokens=400)
    session.append([1] * context)
    await session.generate()
    assert engine.samplings[0].max_tokens == expected


@pytest.mark.parametrize("context", [512, 600])
async def test_a_full_context_is_no_request(context: int) -> None:
    """B164"""
    engine = ScriptedEngine()
    session = session_of(engine, max_tokens=400)
    session.append([1] * context)
    with pytest.raises(NoRoom, match=f"{context} tokens"):
        await session.generate()
    assert engine.prompts == []


async def test_a_context_that_a_turn_filled_keeps_what_it_had() -> None:
    """B66: a finished answer that fills the context exactly is kept."""
    session = session_of(ScriptedEngine(generation([5] * 10)), max_model_len=12)
    session.append([1, 2])
    await session.generate()
    assert session.room == 0
    assert session.trajectory().stop_reason == "stop"


async def test_a_failing_engine_fails_the_turn_and_leaves_the_record_as_it_was() -> None:
    session = session_of(ScriptedEngine(EngineUnavailable("down"), generation([5])))
    session.append([1])
    with pytest.raises(EngineUnavailable):
        await session.generate()
    assert session.tokens.tolist() == [1]
    await session.generate()
    assert session.tokens.tolist() == [1, 5]


@pytest.mark.parametrize("change", [np.array([-0.1, -0.2], np.float32), np.array([-0.1, np.nan, -0.2], np.float32)])
async def test_an_inconsistent_generation_is_never_recorded(change: np.ndarray) -> None:
    """B54, B55"""
    good = generation([5, 6, 7])
    bad = Generation(
        token_ids=good.token_ids,
        logprobs=change,
        version_starts=good.version_starts,
        versions=good.versions,
        kept_cache=good.kept_cache,
        stop_reason="stop",
    )
    session = session_of(ScriptedEngine(bad))
    session.append([1])
    with pytest.raises(BadGeneration):
        await session.generate()
    assert session.tokens.tolist() == [1]


async def test_a_loop_that_generates_nothing_leaves_no_trajectory() -> None:
    session = session_of(ScriptedEngine())
    with pytest.raises(LoopError, match="before any prompt"):
        await session.generate()
    session.append([1])
    with pytest.raises(LoopError, match="without a generated token"):
        session.trajectory()


token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)
turns = st.lists(st.tuples(token_lists, token_lists, st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=6)


@given(turns)
def test_what_is_trained_is_token_for_token_what_was_sampled(plan: list[tuple[list[int], list[int], int, int]]) -> None:
    """B57: random ids over several turns; nothing is decoded and encoded again."""
    replies = []
    for _, reply, version, step in plan:
        middle = len(reply) // 2
        runs = ((0, version), (middle, version + step)) if middle and step else ((0, version),)
        replies.append(generation(reply, runs=runs))
    engine = ScriptedEngine(*replies)

    async def play() -> Trajectory:
        session = session_of(engine, max_model_len=1 << 20)
        for observation, _, _, _ in plan:
            session.append(observation)
            await session.generate()
        return session.trajectory()

    got = asyncio.run(play())
    expected = [token for observation, reply, _, _ in plan for token in (*observation, *reply)]
    mask = [bit for observation, reply, _, _ in plan for bit in (*[0] * len(observation), *[1] * len(reply))]
    assert got.tokens.tolist() == expected
    assert got.loss_mask.tolist() == mask
    assert got.num_turns == len(plan)
    at = 0
    for (observation, reply, _, _), given_back, prompt in zip(plan, replies, engine.prompts, strict=True):
        at += len(observation)
        assert prompt == expected[:at]
        assert got.behavior_logprobs[at : at + len(reply)].tolist() == given_back.logprobs.tolist()
        at += len(reply)
    sample_of(got).validate()


def sample_of(trajectory: Trajectory) -> Sample:
    return Sample(
        task_id="t", group_id="t/0", rollout_id="t/0/0", attempt=0, seat=0, group_size=1, data_source="test", reward=0.0,
        temperature=1.0, stop_reason=StopReason(trajectory.stop_reason), num_turns=trajectory.num_turns, settings_revision=0,
        incarnation="a", produced_at=0.0, tokens=trajectory.tokens, loss_mask=trajectory.loss_mask,
        behavior_logprobs=trajectory.behavior_logprobs, version_starts=trajectory.version_starts, versions=trajectory.versions,
        kept_cache=trajectory.kept_cache,
    )  # fmt: skip
