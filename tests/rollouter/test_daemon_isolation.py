"""Five hundred rollouts in flight, of which one meets with a misfortune behind its turn: 499 others never hear of it."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent_loop.errors import RequestRefused
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.tool_formats import Call
from agent_loop.toolbox import Outcome, ToolBox
from agent_loop.tools import FunctionTool
from configs.schema import ToolSettings
from sample_bus.journal import AttemptFailed, SampleOffered, SeatClosed, read_journal
from tests.rollouter.stand_in import engine_of, make_settings, running_rollouter, stand_in_trainer

NUM_ROLLOUTS = 500
UNLUCKY = 350
"""In the order in which turns ended."""


class Misfortunes:
    """An agent loop that takes a turn; what befalls the unlucky one behind it is set from outside. It uses a real tool box."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.released = threading.Event()
        self.tools = ToolBox(ToolSettings(timeout_s=0.5, max_concurrent=NUM_ROLLOUTS), [FunctionTool(self.hang)])
        self.num_turns = 0
        self.unlucky = ""
        self.said = ""
        self.is_held = asyncio.Event()
        """Set once all have taken their turn: 500 are in flight when it happens."""

    def hang(self) -> str:
        """Blocks for ever."""
        self.released.wait()
        return "too late"

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()
        number, self.num_turns = self.num_turns, self.num_turns + 1
        if self.num_turns == NUM_ROLLOUTS:
            self.is_held.set()
        await self.is_held.wait()
        if number == UNLUCKY:
            self.unlucky = session.rollout_id
            await self.befall(session)

    async def befall(self, session: Session) -> None:
        match self._kind:
            case "raises":
                raise KeyError("broken behind its turn")
            case "is refused":
                raise RequestRefused("engine-0 answered 400: the test said no")
            case "hangs":
                call = Call(name="hang", arguments={})
                (result,) = await self.tools.make(
                    [call], calls_left=1, rollout_id=session.rollout_id, tools_kwargs={}, codec=session.codec
                )
                session.count(result.outcome.value)
                self.said = result.text


@pytest.fixture
def released() -> Iterator[list[Misfortunes]]:
    """Loops whose hanging threads end with the test."""
    made: list[Misfortunes] = []
    yield made
    for loop in made:
        loop.released.set()


@pytest.mark.parametrize(
    ("kind", "max_attempts", "reason"),
    [("raises", 1, "agent loop failed"), ("is refused", 3, "request refused"), ("hangs", 1, "")],
)
async def test_one_misfortune_is_one_record(
    tmp_path: Path, released: list[Misfortunes], kind: str, max_attempts: int, reason: str
) -> None:
    """B160, B161: number 350 raises, is refused for good, or calls a blocking tool that never returns."""
    settings = make_settings(
        tmp_path,
        samples_per_step=NUM_ROLLOUTS,
        rollouter__max_concurrent_rollouts=NUM_ROLLOUTS,
        rollouter__max_attempts=max_attempts,
        bus__max_queued_samples=2 * NUM_ROLLOUTS,
    )
    loop = Misfortunes(kind)
    released.append(loop)
    num_lost = int(bool(reason))
    before = asyncio.all_tasks()
    with capture_logs() as logs:
        async with stand_in_trainer(settings) as trainer, running_rollouter(settings, engine_of(trainer), loop=loop):
            await trainer.begin()
            await trainer.publish(0)
            samples = await trainer.train(NUM_ROLLOUTS - num_lost)
            closed = await trainer.lease_closures(num_lost)
            status = await trainer.wait_status(lambda status: status.counts.offered + num_lost == NUM_ROLLOUTS)
        await loop.tools.close()
    unlucky = loop.unlucky.rpartition(".")[0]
    assert [(one.reason, one.rollout_id) for one in closed] == [(reason, unlucky)] * num_lost
    assert {sample.attempt for sample in samples} == {0}
    assert len({sample.rollout_id for sample in samples} | {unlucky}) == NUM_ROLLOUTS
    assert status.counts.failed == ({reason: 1} if reason else {})
    records: list[Any] = list(read_journal(tmp_path / "journal" / "run-1" / "rollouter.log"))
    failed = [record for record in records if isinstance(record, AttemptFailed)]
    assert [(f"{record.group_id}/{record.seat}", record.reason) for record in failed] == [(unlucky, reason)] * num_lost
    assert sum(isinstance(record, SeatClosed) for record in records) == num_lost
    assert sum(isinstance(record, SampleOffered) for record in records) == NUM_ROLLOUTS - num_lost
    raised = [entry["exc_info"] for entry in logs if entry["event"] == "agent loop failed"]
    assert len(raised) == (kind == "raises")
    for error in raised:
        cause = error.__cause__ or error
        assert isinstance(cause, KeyError)
        assert traceback.extract_tb(cause.__traceback__)[-1].name == "befall"
    if kind == "hangs":
        (counted,) = [sample for sample in samples if sample.counts]
        assert (counted.rollout_id, dict(counted.counts)) == (unlucky, {Outcome.TIMED_OUT.value: 1})
        assert loop.said == "Error: hang gave no result within 0.5 s."
    assert asyncio.all_tasks() == before
