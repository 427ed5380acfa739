"""Every task is issued exactly once an epoch, in an order fixed by the seed, and the cursor loses and repeats none."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.task import Task
from configs.schema import DataSettings
from rollouter.codec import Codec
from rollouter.data.order import Order
from rollouter.errors import DataError
from rollouter.prompts import PREPARE_FROM, PromptCursor, PromptSource, encode, prepare, split
from rollouter.tasks import Row, load_rows
from tests.fakes.fake_engine import FakeTokenizer


def _tasks(count: int) -> list[Task]:
    return [
        Task(
            task_id=f"t{n}",
            prompt_ids=np.array([n + 1], np.int32),
            prompt_text=f"p{n}",
            ground_truth=str(n),
            data_source="test",
        )
        for n in range(count)
    ]


def _drain(source: PromptSource, count: int) -> list[str]:
    issues = [source.next() for _ in range(count)]
    return [issue.task.task_id for issue in issues if issue is not None]


def test_each_epoch_issues_every_task_once() -> None:
    source = PromptSource(_tasks(7), seed=3, shuffle=True, num_epochs=None)
    epochs = [_drain(source, 7) for _ in range(4)]
    assert all(sorted(epoch) == [f"t{n}" for n in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_order_depends_on_the_seed_alone() -> None:
    orders = [_drain(PromptSource(_tasks(20), seed=seed, shuffle=True, num_epochs=None), 60) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert _drain(PromptSource(_tasks(5), seed=1, shuffle=False, num_epochs=None), 10) == [f"t{n % 5}" for n in range(10)]


@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 2**31 - 1),
    stops=st.lists(st.integers(0, 9), max_size=6),
    shuffle=st.booleans(),
)
def test_restore_at_any_point_loses_and_repeats_nothing(count: int, seed: int, stops: list[int], shuffle: bool) -> None:
    """B88"""
    total = sum(stops) + 5
    straight = _drain(PromptSource(_tasks(count), seed=seed, shuffle=shuffle, num_epochs=None), total)
    pieces: list[str] = []
    cursor: PromptCursor | None = None
    for stop in [*stops, 5]:
        source = PromptSource(_tasks(count), seed=seed, shuffle=shuffle, num_epochs=None)
        if cursor is not None:
            source.restore(cursor)
        pieces += _drain(source, stop)
        cursor = source.cursor
    assert pieces == straight


@pytest.mark.parametrize("saved_at", [9, 10, 11])
def test_restore_at_the_end_of_an_epoch_goes_on(saved_at: int) -> None:
    """B86"""
    source = PromptSource(_tasks(10), seed=0, shuffle=True, num_epochs=2)
    _drain(source, saved_at)
    resumed = PromptSource(_tasks(10), seed=0, shuffle=True, num_epochs=2)
    resumed.restore(source.cursor)
    assert resumed.remaining == 20 - saved_at
    assert len(_drain(resumed, 99)) == 20 - saved_at


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_passes_end_after_num_epochs(epochs: int) -> None:
    """B49"""
    source = PromptSource(_tasks(10), seed=0, shuffle=True, num_epochs=epochs)
    assert len(_drain(source, 1000)) == 10 * epochs
    assert source.remaining == 0
    assert source.next() is None


def test_cursor_over_changed_data_is_refused() -> None:
    """B93"""
    cursor = PromptSource(_tasks(5), seed=0, shuffle=True, num_epochs=None).cursor
    for changed in (_tasks(6), list(reversed(_tasks(5)))):
        with pytest.raises(DataError, match="data changed"):
            PromptSource(changed, seed=0, shuffle=True, num_epochs=None).restore(cursor)


def test_skipped_tasks_count_as_issued() -> None:
    straight = _drain(PromptSource(_tasks(4), seed=5, shuffle=True, num_epochs=None), 10)
    source = PromptSource(_tasks(4), seed=5, shuffle=True, num_epochs=None)
    source.skip(6)
    assert _drain(source, 4) == straight[6:]


def test_no_task_is_an_error() -> None:
    with pytest.raises(DataError, match="no task"):
        PromptSource([], seed=0, shuffle=True, num_epochs=None)


def test_addition_splits_into_trained_and_held_out() -> None:
    prompts = prepare(load_rows("addition"), DataSettings(), Codec(FakeTokenizer()), seed=1, max_prompt_tokens=100)
    assert len(prompts.held_out) == 16
    issued = set(_drain(prompts.source, 65))
    assert len(issued) == 65
    assert issued.isdisjoint(task.task_id for task in prompts.held_out)


@given(st.permutations(list(range(12))), st.integers(0, 1000))
def test_split_does_not_depend_on_the_order_of_rows(order: list[int], seed: int) -> None:
    tasks = _tasks(12)
    _, held_out = split(tasks, fraction=0.25, seed=seed)
    _, again = split([tasks[n] for n in order], fraction=0.25, seed=seed)
    assert [task.task_id for task in held_out] == [task.task_id for task in again]
    assert len(held_out) == 3


def test_rows_with_one_prompt_stay_on_one_side() -> None:
    rows = [Row(prompt=f"p{n % 5}", ground_truth=str(n), data_source="d") for n in range(20)]
    tasks = encode(rows, Codec(FakeTokenizer()), max_prompt_tokens=10)
    trained, held_out = split(tasks, fraction=0.4, seed=0)
    assert len(held_out) == 8
    assert {task.prompt_text for task in trained}.isdisjoint({task.prompt_text for task in held_out})


def test_split_of_one_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="held_out_fraction"):
        split(_tasks(1), fraction=0.2, seed=0)
    assert split(_tasks(1), fraction=0.0, seed=0)[1] == []


def test_prompts_are_refused_on_their_final_ids() -> None:
    """B112"""
    codec = Codec(FakeTokenizer(adds_bos=True))
    rows = [Row(prompt="a" * n, ground_truth="x", data_source="d") for n in (8, 9, 10, 400)]
    rows.append(Row(prompt=({"role": "user", "content": "a"},), ground_truth="x", data_source="d"))
    tasks = encode(rows, codec, max_prompt_tokens=10)
    assert [task.prompt_ids.size for task in tasks] == [9, 10]


def test_when_no_prompt_is_left_the_message_has_counts_and_limits() -> None:
    """B114"""
    rows = [Row(prompt="a" * 50, ground_truth="x", data_source="d")] * 2
    with pytest.raises(DataError, match=r"2 rows, 0 left .* beyond 10 tokens \(the longest has 50\)"):
        encode(rows, Codec(FakeTokenizer()), max_prompt_tokens=10)


def test_task_ids_are_unique_and_stable() -> None:
    rows = [Row(prompt="same", ground_truth="x", data_source="d")] * 3
    ids = [[task.task_id for task in encode(rows, Codec(FakeTokenizer()), max_prompt_tokens=9)] for _ in range(2)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


def test_the_next_order_of_much_data_is_made_by_a_thread_and_asked_for_once() -> None:
    """A user's curriculum must not hold up the event loop where an epoch begins."""
    made: dict[int, str] = {}
    came = threading.Event()

    def curriculum(epoch: int) -> range:
        assert epoch not in made
        made[epoch] = threading.current_thread().name
        if epoch == 1:
            came.set()
        return range(PREPARE_FROM)

    order = Order((PREPARE_FROM,), seed=0, shuffle=False, curriculum=curriculum)
    source = PromptSource(_tasks(1) * PREPARE_FROM, seed=0, shuffle=False, num_epochs=2, order=order)
    source.skip(PREPARE_FROM // 2 - 1)
    assert source.next() is not None
    assert set(made) == {0}
    assert source.next() is not None
    assert came.wait(30)
    source.skip(source.remaining or 0)
    assert source.next() is None
    assert made == {0: threading.current_thread().name, 1: "order-ahead"}


def test_an_order_that_cannot_be_made_ahead_is_an_error_where_it_is_needed() -> None:
    order = Order((2,), seed=0, shuffle=False, curriculum=lambda epoch: [0, 1][epoch:])
    order.prepare(1)
    assert order.epoch(0).tolist() == [0, 1]
    with pytest.raises(DataError, match="epoch 1: got 1 positions"):
        order.epoch(1)
