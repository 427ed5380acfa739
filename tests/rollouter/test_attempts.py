"""An attempt ends at its deadline or when it is given up, whatever its agent loop does; late results are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.session import Session
from agent_loop.task import Task
from rollouter.attempts import Attempts
from rollouter.errors import GivenUp, LateResult
from rollouter.rollouts import Plan
from tests.rollouter.playing import engine_at, make_plan, make_runner


class _Stubborn:
    """An agent loop whose first attempt goes on after its cancellation until it is let go."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.cancelled = asyncio.Event()
        self.let_go = asyncio.Event()
        self.done = asyncio.Event()

    async def run(self, task: Task, session: Session) -> None:
        self.num_begun += 1
        session.append(task.prompt_ids)
        await session.generate()
        while self.num_begun == 1 and not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
        self.done.set()


class _Waiting:
    """An agent loop that waits for ever and can be cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def run(self, task: Task, session: Session) -> None:
        self.begun.set()
        await asyncio.Event().wait()


class _Late:
    """Hears of late results."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.came = asyncio.Event()

    def __call__(self, plan: Plan, number: int) -> None:
        self.told.append((plan.rollout_id, number))
        self.came.set()


async def _attempts(loop: Any, late: _Late, *, timeout_s: float = 30.0, grace_s: float = 0.05) -> Attempts:
    runner = make_runner(await engine_at(), loop=loop, timeout_s=timeout_s)
    return Attempts(runner, timeout_s=lambda: timeout_s, on_late=late, grace_s=grace_s)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_attempt_that_is_given_up_ends_at_once() -> None:
    loop, late = _Waiting(), _Late()
    attempts, stop = await _attempts(loop, late), _future()
    playing = asyncio.create_task(attempts.play(make_plan(), 0, stop))
    await loop.begun.wait()
    stop.set_result(None)
    with pytest.raises(GivenUp):
        await playing
    assert (attempts.num_left, late.told) == (0, [])


async def test_attempt_given_up_before_it_began_asks_no_engine() -> None:
    engine = await engine_at()
    attempts, stop = Attempts(make_runner(engine), timeout_s=lambda: 30.0, on_late=lambda plan, number: None), _future()
    stop.set_result(None)
    with pytest.raises(GivenUp):
        await attempts.play(make_plan(), 0, stop)
    assert engine.calls == []


async def test_loop_that_swallows_its_cancellation_holds_nobody_up_and_its_result_is_refused() -> None:
    """B40, B12: attempt 0 times out, attempt 1 brings the sample, attempt 0 arrives late and is counted."""
    stubborn, late = _Stubborn(), _Late()
    attempts = await _attempts(stubborn, late, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"gave up after 0\.1 s; its agent loop does not end when it is cancelled"):
        await attempts.play(make_plan(), 0, _future())
    assert stubborn.cancelled.is_set()
    assert attempts.num_left == 1
    episode = await attempts.play(make_plan(), 1, _future())
    assert episode.trajectory.num_turns == 1
    stubborn.let_go.set()
    async with asyncio.timeout(10):
        await late.came.wait()
    assert attempts.num_left == 0
    assert late.told == [("g/0", 0)]


async def test_result_that_a_loop_brings_right_after_its_deadline_is_refused() -> None:
    """B40"""
    stubborn, late = _Stubborn(), _Late()
    attempts = await _attempts(stubborn, late, timeout_s=0.1, grace_s=20.0)
    playing = asyncio.create_task(attempts.play(make_plan(), 2, _future()))
    await stubborn.cancelled.wait()
    stubborn.let_go.set()
    with pytest.raises(LateResult, match=r"attempt 2 brought a result after its deadline of 0\.1 s"):
        await playing
    assert late.told == [("g/0", 2)]


async def test_what_was_left_to_itself_is_ended_at_the_close() -> None:
    stubborn, late = _Stubborn(), _Late()
    attempts = await _attempts(stubborn, late, timeout_s=0.1)
    with pytest.raises(TimeoutError):
        await attempts.play(make_plan(), 0, _future())
    stubborn.let_go.set()
    await attempts.close()
    assert stubborn.done.is_set()
    assert attempts.num_left == 0
