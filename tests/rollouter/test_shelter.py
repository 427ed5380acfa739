"""Whatever a user's code raises, in whichever task, is an error of its rollout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.errors import AgentLoopError
from agent_loop.session import Session
from agent_loop.task import Task
from rollouter.shelter import sheltered_task
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer


class Overdue(BaseException):
    """No Exception, as the deadlines of gevent and func_timeout are."""


async def exits() -> None:
    sys.exit(3)


async def beside() -> None:
    await asyncio.gather(exits(), asyncio.sleep(0))


async def grouped() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(exits())


async def overdue() -> None:
    raise Overdue("x")


async def ends_generators() -> None:
    raise GeneratorExit


async def breaks_off() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("work", [exits, beside, grouped, overdue, ends_generators, breaks_off])
async def test_what_is_no_exception_is_raised_as_one(work: Callable[[], Any]) -> None:
    with pytest.raises((AgentLoopError, ExceptionGroup)) as raised:
        await sheltered_task(work(), name="r.0")
    if isinstance(raised.value, AgentLoopError):
        assert "raised" in str(raised.value)
    assert await asyncio.create_task(asyncio.sleep(0, "on")) == "on"


async def test_exceptions_results_and_cancellations_go_through() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await sheltered_task(fail(), name="r.0")
    assert await sheltered_task(asyncio.sleep(0.01, "fine"), name="r.1") == "fine"
    waiting = sheltered_task(asyncio.sleep(60), name="r.2")
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert waiting.get_name() == "r.2"


async def test_tasks_that_were_not_started_from_one_are_left_as_they_are() -> None:
    await sheltered_task(asyncio.sleep(0), name="r.0")
    plain = asyncio.create_task(overdue())
    with pytest.raises(Overdue):
        await plain


class Once:
    """An agent loop whose first rollout meets with something."""

    def __init__(self, meets: Callable[[], Awaitable[None]]) -> None:
        self._meets = meets
        self._num = 0

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()
        self._num += 1
        if self._num == 1:
            await self._meets()


@pytest.mark.parametrize("meets", [beside, overdue, ends_generators])
async def test_a_loop_that_raises_what_is_no_exception_fails_one_attempt(
    tmp_path: Path, meets: Callable[[], Awaitable[None]]
) -> None:
    settings = make_settings(tmp_path)
    async with (
        stand_in_trainer(settings) as trainer,
        running_rollouter(settings, engine_of(trainer), loop=Once(meets)) as running,
    ):
        await trainer.begin()
        await trainer.publish(0)
        training = asyncio.create_task(trainer.train(8))
        async with asyncio.timeout(60):
            await asyncio.wait((training, running.task), return_when=asyncio.FIRST_COMPLETED)
        assert training.done()
        assert not running.task.done()
        assert len(training.result()) == 8
