"""One attempt: a complete trajectory with a real reward, or a failure of its own kind; siblings never notice."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from agent_loop.errors import AgentLoopError, LoopError, RewardError
from agent_loop.session import Session
from agent_loop.task import Task
from rollouter.rollouts import request_seed, sample_of
from sample_bus.errors import WireError
from tests.fakes.fake_clock import FakeClock
from tests.rollouter.playing import CODEC, engine_at, make_plan, make_runner


async def test_episode_becomes_a_sample_with_all_that_training_needs() -> None:
    episode = await make_runner(await engine_at()).attempt(make_plan(), 2)
    clock = FakeClock(50.0)
    sample = sample_of(make_plan(), 2, episode, now=clock)
    sample.validate()
    reply = CODEC.encode("7\n") if episode.reward == 1.0 else CODEC.encode("8\n")
    assert sample.tokens.tolist() == CODEC.encode("3+4=") + reply
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert sample.behavior_logprobs.tolist() == [0.0] * 4 + [-0.5] * 2
    assert (sample.version_starts.tolist(), sample.versions.tolist()) == ([0, 4], [-1, 3])
    assert (sample.temperature, sample.attempt, sample.settings_revision, sample.produced_at) == (0.6, 2, 9, 50.0)


async def test_seed_belongs_to_run_rollout_and_attempt() -> None:
    engine = await engine_at()
    runner = make_runner(engine)
    for seat, attempt in ((0, 0), (0, 0), (0, 1), (1, 0)):
        await runner.attempt(make_plan(seat, 2), attempt)
    first, again, retry, sibling = (call.sampling.seed for call in engine.calls)
    assert first == again == request_seed(1, "g/0", 0)
    assert len({first, retry, sibling, request_seed(2, "g/0", 0)}) == 4


class NoTurn:
    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)


class Raises:
    async def run(self, task: Task, session: Session) -> None:
        raise ZeroDivisionError("in user code")


class Leaves:
    async def run(self, task: Task, session: Session) -> None:
        sys.exit(3)


class Cancels:
    async def run(self, task: Task, session: Session) -> None:
        raise asyncio.CancelledError


async def test_loop_without_a_turn_fails() -> None:
    with pytest.raises(LoopError):
        await make_runner(await engine_at(), loop=NoTurn()).attempt(make_plan(), 0)


async def test_errors_of_user_code_come_out_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError, match="in user code"):
        await make_runner(await engine_at(), loop=Raises()).attempt(make_plan(), 0)


async def test_loop_that_would_end_the_process_fails_its_rollout() -> None:
    """B160"""
    with pytest.raises(AgentLoopError, match="SystemExit: 3"):
        await make_runner(await engine_at(), loop=Leaves()).attempt(make_plan(), 0)


async def test_inner_cancellation_is_a_failure_and_an_outer_one_is_not_swallowed() -> None:
    """B09"""
    engine = await engine_at()
    with pytest.raises(AgentLoopError, match="cancelled"):
        await make_runner(engine, loop=Cancels()).attempt(make_plan(), 0)
    engine.before_reply = lambda call: asyncio.Event().wait()
    outer = asyncio.create_task(make_runner(engine).attempt(make_plan(), 0))
    await asyncio.sleep(0)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer


@pytest.mark.parametrize("value", [None, "1.0", float("nan"), {"acc": 1}], ids=str)
async def test_reward_that_is_no_number_fails_the_attempt(value: Any) -> None:
    """B102"""
    RETURNED["value"] = value
    with pytest.raises(RewardError):
        await make_runner(await engine_at(), reward=f"{__name__}:returns_it").attempt(make_plan(), 0)


RETURNED: dict[str, Any] = {}


def returns_it(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    return RETURNED["value"]


def hangs(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    import threading

    threading.Event().wait(60)
    return 1.0


async def test_reward_that_never_returns_ends_at_the_deadline_and_others_go_on() -> None:
    """B99"""
    engine = await engine_at()
    slow = [
        asyncio.create_task(make_runner(engine, reward=f"{__name__}:hangs", timeout_s=0.3).attempt(make_plan(), 0))
        for _ in range(6)
    ]
    quick = await asyncio.gather(*(make_runner(engine).attempt(make_plan(seat, 100), 0) for seat in range(100)))
    assert len(quick) == 100
    for task in slow:
        with pytest.raises(TimeoutError, match="while its reward was computed"):
            await task


async def test_one_of_many_rollouts_fails_alone() -> None:
    """B160"""

    def break_one(call: Any) -> None:
        if call.request_id.startswith("g/350."):
            raise ConnectionResetError("number 350")

    engine = await engine_at(before_reply=break_one)
    runner = make_runner(engine)
    results = await asyncio.gather(*(runner.attempt(make_plan(seat, 500), 0) for seat in range(500)), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    assert len(failures) == 1
    assert isinstance(failures[0], ConnectionResetError)
    assert engine.num_running == 0


async def test_sample_of_a_greedy_rollout_is_refused() -> None:
    episode = await make_runner(await engine_at()).attempt(make_plan(temperature=0.0), 0)
    with pytest.raises(WireError, match="temperature"):
        sample_of(make_plan(temperature=0.0), 0, episode, now=FakeClock()).validate()
