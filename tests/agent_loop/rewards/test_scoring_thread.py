"""A scoring that other event loops ask: what it opens ends with it, and what keeps it from opening is told to everybody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_loop.errors import RewardError
from agent_loop.rewards import Score, Scoring
from agent_loop.rewards.scoring_thread import ScoringThread


class Counting:
    """Implements Scoring; says in which thread it was asked, or waits for ever."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.num_cancelled = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.told.append("open")
        try:
            yield
        finally:
            self.told.append("closed")

    async def score(self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Score:
        if solution_str == "wait":
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        if solution_str == "raise":
            raise RewardError("no number")
        return Score(value=float(threading.get_ident()))


async def ask(scorers: ScoringThread, solution_str: str = "") -> float:
    async with asyncio.timeout(30):
        return (await scorers.score(data_source="d", solution_str=solution_str, ground_truth="", extra_info={})).value


async def test_any_loop_may_ask_and_is_answered_from_one_thread() -> None:
    counting = Counting()
    scorers = ScoringThread(lambda: counting, name="scorers")
    here = await ask(scorers)
    elsewhere = await asyncio.to_thread(lambda: asyncio.run(ask(scorers)))
    assert here == elsewhere != float(threading.get_ident())
    with pytest.raises(RewardError, match="no number"):
        await ask(scorers, "raise")
    assert counting.told == ["open"]
    await asyncio.to_thread(scorers.close)
    assert counting.told == ["open", "closed"]
    assert "scorers" not in {thread.name for thread in threading.enumerate()}
    await asyncio.to_thread(scorers.close)


async def test_a_caller_that_goes_away_ends_its_call_alone() -> None:
    counting = Counting()
    may_open = threading.Event()

    def open_scoring() -> Scoring:
        may_open.wait()
        return counting

    scorers = ScoringThread(open_scoring, name="scorers")
    early = asyncio.create_task(ask(scorers))
    staying = asyncio.create_task(ask(scorers))
    await asyncio.sleep(0)
    early.cancel()  # while it is not open yet
    await asyncio.wait((early,))
    may_open.set()
    assert await staying > 0
    waiting = asyncio.create_task(ask(scorers, "wait"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert await ask(scorers) > 0
    await asyncio.to_thread(scorers.close)
    assert counting.num_cancelled <= 1


async def test_what_does_not_open_fails_every_score() -> None:
    def refuse() -> Scoring:
        raise RewardError("the function does not import")

    scorers = ScoringThread(refuse, name="scorers")
    for _ in range(2):
        with pytest.raises(RewardError, match="does not import"):
            await ask(scorers)
    await asyncio.to_thread(scorers.close)
