"""A task is issued again exactly once for each group that was too old, whoever dies meanwhile."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from sample_bus.journal import Record
from sample_bus.messages import RetryTask, TaskRetries
from tests.fakes.fake_control import FakeControl
from trainer.retries import MAX_TOLD, Retries, RetriesFold, RetriesHistory


def history_of(journal: list[Record]) -> RetriesHistory:
    fold = RetriesFold()
    for record in journal:
        fold.take(record)
    return fold.result()


def retries(journal: list[Record]) -> Retries:
    return Retries(run_id="run", write=journal.append, history=history_of(journal), now=lambda: 0.0)


def told(desk: Retries) -> list[str]:
    return [task.group_id for task in desk.topic().tasks]


def test_what_is_asked_for_is_told_until_it_is_taken() -> None:
    desk = retries([])
    desk.ask("g1", "task-1")
    desk.ask("g2", "task-2")
    assert told(desk) == ["g1", "g2"]
    desk.take(["g1", "unknown"])
    assert told(desk) == ["g2"]
    assert desk.topic().tasks[0].task_id == "task-2"


@given(st.lists(st.tuples(st.sampled_from(["ask", "take", "die"]), st.integers(0, 5))))
def test_a_group_is_asked_for_once_over_restarts(events: list[tuple[str, int]]) -> None:
    journal: list[Record] = []
    desk = retries(journal)
    asked: list[str] = []
    taken: set[str] = set()
    for event, number in events:
        group = f"g{number}"
        if event == "ask":
            desk.ask(group, "task")
            asked += [group] if group not in asked else []
        elif event == "take":
            desk.take([group])
            taken |= {group} & set(asked)
        else:
            desk = retries(journal)
        assert told(desk) == [one for one in asked if one not in taken]
    assert len(journal) <= len(asked) + len(taken)


def test_the_topic_is_bounded_and_the_rest_follows() -> None:
    desk = retries([])
    for number in range(MAX_TOLD + 1):
        desk.ask(f"g{number}", "task")
    assert len(told(desk)) == MAX_TOLD
    desk.take(["g0"])
    assert told(desk)[-1] == f"g{MAX_TOLD}"


async def test_each_change_is_published() -> None:
    control, desk = FakeControl(), retries([])
    running = asyncio.create_task(desk.run(control))
    async with asyncio.timeout(30):
        await control.changed.wait()
        control.changed.clear()
        desk.ask("g1", "task")
        await control.changed.wait()
    running.cancel()
    assert [value for _, value in control.published] == [
        TaskRetries(run_id="run"),
        TaskRetries(run_id="run", tasks=(RetryTask(group_id="g1", task_id="task"),)),
    ]
