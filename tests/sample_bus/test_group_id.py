"""A group's name says which task it is of, and how often that was issued again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.group_id import GroupName, num_requeues, parse

tasks = st.text(min_size=1, max_size=20)


@given(tasks, st.integers(0, 10**9), st.from_regex(r"[0-9a-f]{6}", fullmatch=True), st.integers(0, 1000))
def test_a_name_says_what_it_was_made_of(task: str, issue: int, process: str, again: int) -> None:
    name = GroupName(task, issue, process, again)
    assert parse(str(name)) == name
    assert num_requeues(str(name)) == again


@given(st.lists(st.tuples(tasks, st.integers(0, 99), st.sampled_from(["a0", "b1"]), st.integers(0, 9)), max_size=20))
def test_no_two_groups_have_one_name(parts: list[tuple[str, int, str, int]]) -> None:
    names = {GroupName(*part) for part in parts}
    assert len({str(name) for name in names}) == len(names)


@pytest.mark.parametrize("foreign", ["g1", "task-0/0", "task#1", "task#x@a", "task#1@a+0", "task#1@a+", "#1@a", ""])
def test_a_foreign_name_says_nothing(foreign: str) -> None:
    assert parse(foreign) is None
    assert num_requeues(foreign) == 0
