"""Tasks whose groups were too old are issued again, once each, before any other task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.task import Task
from rollouter.prompts import PromptSource
from rollouter.retries import Retries
from sample_bus.group_id import num_requeues, parse
from sample_bus.messages import RetryTask, TaskRetries
from sample_bus.sample import Sample
from tests.fakes.fake_producer import FakeProducer, Stream
from tests.rollouter.desk import DEADLINE_S, Desk, desk_settings, open_desk
from tests.rollouter.playing import engine_at


def source(count: int = 3) -> PromptSource:
    tasks = [
        Task(
            task_id=f"t{number}",
            prompt_ids=np.array([1], np.int32),
            prompt_text=f"prompt {number}",
            ground_truth="x",
            data_source="test",
            extra_info={},
        )
        for number in range(count)
    ]
    return PromptSource(tasks, seed=0, shuffle=False, num_epochs=None)


def topic(*group_ids: str, run_id: str = "run-1") -> TaskRetries:
    names = [(group_id, parse(group_id)) for group_id in group_ids]
    return TaskRetries(
        run_id=run_id, tasks=tuple(RetryTask(group_id=one, task_id=name.task_id if name else "t0") for one, name in names)
    )


# ── which one is next ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_that_was_not_taken_comes_next_with_its_issue_and_its_count() -> None:
    taken: set[str] = set()
    retries = Retries(source(), run_id="run-1", taken=taken)
    retries.take(topic("t1#4@p", "t2#5@p+2"))
    issue = retries.next()
    assert issue is not None
    assert (issue.number, issue.epoch, issue.task.task_id, issue.requeue, issue.replaces) == (4, 1, "t1", 1, "t1#4@p")
    taken.add("t1#4@p")
    issue = retries.next()
    assert issue is not None
    assert (issue.requeue, issue.replaces) == (3, "t2#5@p+2")
    taken.add("t2#5@p+2")
    assert retries.next() is None
    assert retries.taken() == ("t1#4@p", "t2#5@p+2")


def test_what_the_trainer_tells_of_no_more_is_not_said_again() -> None:
    retries = Retries(source(), run_id="run-1", taken={"t1#4@p"})
    retries.take(topic("t1#4@p"))
    retries.take(topic())
    assert retries.taken() == ()


def test_another_runs_list_says_nothing() -> None:
    retries = Retries(source(), run_id="run-1", taken=set())
    retries.take(topic("t1#4@p", run_id="another"))
    assert retries.next() is None


def test_tasks_that_may_not_be_issued_wait_and_foreign_groups_are_left_alone() -> None:
    retries = Retries(source(), run_id="run-1", taken=set(), holds=lambda task_id: task_id == "t1")
    retries.take(topic("t1#4@p", "foreign", "unknown task#1@p", "t0#0@p"))
    issue = retries.next()
    assert issue is not None
    assert issue.task.task_id == "t0"


@given(st.lists(st.integers(0, 9), unique=True), st.sets(st.integers(0, 9)))
def test_next_and_taken_divide_what_is_told(told: list[int], taken_before: set[int]) -> None:
    taken = {f"t0#{number}@p" for number in taken_before}
    retries = Retries(source(), run_id="run-1", taken=taken)
    retries.take(topic(*(f"t0#{number}@p" for number in told)))
    assert set(retries.taken()) == {f"t0#{number}@p" for number in told} & taken
    seen = []
    while (issue := retries.next()) is not None:
        seen.append(issue.number)
        taken.add(issue.replaces)
    assert seen == [number for number in told if number not in taken_before]


# ── at work ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def until(desk: Desk, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            assert desk.task is not None
            if desk.task.done():
                desk.task.result()
            await asyncio.sleep(0)


def settings(run_dir: Path, **changes: Any) -> Any:
    """The budget holds one group, and one more for each that was given back."""
    return desk_settings(run_dir, samples_per_step=4, staleness_threshold=0.0, **changes)


def offered(stream: Stream, group_id: str) -> list[Sample]:
    return [record for record in stream.records if isinstance(record, Sample) and record.group_id == group_id]


async def test_a_group_that_was_too_old_is_replaced_by_one_of_the_same_task_with_other_draws(tmp_path: Path) -> None:
    stream, engine = Stream(), await engine_at(0)
    async with open_desk(settings(tmp_path), FakeProducer(stream), engine) as desk:
        desk.start()
        await until(desk, lambda: len(stream.records) == 4)
        first = stream.records[0].group_id
        desk.run.retries.take(topic(first))
        assert desk.run.retries.taken() == ()
        desk.refund(4)
        await until(desk, lambda: len(stream.records) == 8)
        again = stream.records[4].group_id
        assert again == f"{first}+1"
        assert num_requeues(again) == 1
        assert desk.run.retries.taken() == (first,)
        seeds = [{call.sampling.seed for call in engine.calls[start : start + 4]} for start in (0, 4)]
        assert seeds[0].isdisjoint(seeds[1])
        assert [call.prompt_ids.tolist() for call in engine.calls[:4]] == [
            call.prompt_ids.tolist() for call in engine.calls[4:]
        ]
        desk.refund(8)
        await until(desk, lambda: len(stream.records) == 12)
        assert desk.run.keeper.books.next_issue == 2
        assert num_requeues(stream.records[8].group_id) == 0


async def test_a_rollouter_that_is_killed_takes_no_retry_twice(tmp_path: Path) -> None:
    """The trainer still tells of it: it did not hear that it was taken."""
    stream = Stream()
    for life in range(3):
        engine = await engine_at(0)
        async with open_desk(settings(tmp_path), FakeProducer(stream), engine, process=f"p{life}") as desk:
            desk.start()
            if life == 0:
                await until(desk, lambda: len(stream.records) == 4)
            first = stream.records[0].group_id
            desk.run.retries.take(topic(first))
            desk.refund(4 * (life + 1))
            await until(desk, lambda wanted=8 + 4 * life: len(stream.records) == wanted)  # type: ignore[misc]
            assert desk.run.retries.taken() == (first,)
    replaced = [record.group_id for record in stream.records[::4] if num_requeues(record.group_id)]
    assert replaced == [f"{first.rpartition('@')[0]}@p0+1"]


@pytest.mark.parametrize(("on_stale", "cancelled"), [("drop", 4), ("retry", 4), ("wait", 4), ("downweight", 0)])
async def test_rollouts_in_flight_are_given_up_only_where_their_samples_could_not_be_trained(
    tmp_path: Path, on_stale: str, cancelled: int
) -> None:
    stream, engine, go = Stream(), await engine_at(0), asyncio.Event()
    engine.before_reply = lambda call: go.wait()
    async with open_desk(settings(tmp_path, max_staleness=1, on_stale=on_stale), FakeProducer(stream), engine) as desk:
        desk.start()
        await until(desk, lambda: len(engine.calls) == 4)
        assert desk.run.dispatcher.oldest_in_flight() == 0
        assert desk.run.dispatcher.cancel_hopeless(1, "first") == 0
        assert desk.run.dispatcher.cancel_hopeless(2, "first") == cancelled
        go.set()
        await until(desk, lambda: len(stream.records) == 4 and not desk.books.open_groups)
        assert desk.books.counts().failed == ({"stale": 4} if cancelled else {})
        await until(desk, lambda: desk.run.dispatcher.oldest_in_flight() is None)
