"""Tasks in quarantine are passed over, and come back when their file is gone; the cursor is the journal's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agent_loop.task import Task
from rollouter.admission import Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.books import TaskFailures
from rollouter.issues import Issues
from rollouter.prompts import Issue, PromptSource
from rollouter.task_quarantine import TaskQuarantine
from sample_bus.journal import GroupAdmitted, IssueSkipped, TaskQuarantined, TaskReleased, read_journal


def _task(number: int) -> Task:
    return Task(
        task_id=f"t{number}",
        prompt_ids=np.array([number + 1], np.int32),
        prompt_text=f"prompt {number}",
        ground_truth="x",
        data_source="test",
        extra_info={},
    )


def make_source(count: int = 3, num_epochs: int | None = None) -> PromptSource:
    return PromptSource([_task(number) for number in range(count)], seed=0, shuffle=False, num_epochs=num_epochs)


def _failures(count: int = 3) -> TaskFailures:
    failures = TaskFailures()
    for number in range(count):
        failures.add("timeout", f"attempt {number}")
    return failures


class _Desk:
    """A source, its quarantine and its journal."""

    def __init__(self, run_dir: Path, **source: int | None) -> None:
        self.run_dir = run_dir
        self.keeper = Bookkeeper(run_dir, "run-1", now=lambda: 1.0)
        self.quarantine = TaskQuarantine(run_dir / "quarantine" / "tasks")
        self.issues = Issues(make_source(**source), self.quarantine, self.keeper)  # type: ignore[arg-type]

    def hold(self, number: int) -> None:
        self.quarantine.put(_task(number), _failures(), 1.0)
        self.keeper.write(TaskQuarantined(at=1.0, task_id=f"t{number}", num_failures=3))

    def next(self) -> tuple[int, str] | Hold:
        issue = self.issues.next()
        if not isinstance(issue, Issue):
            return issue
        self.keeper.write(
            GroupAdmitted(
                at=1.0,
                group_id=f"g{issue.number}",
                task_id=issue.task.task_id,
                issue=issue.number,
                group_size=2,
                policy_version=0,
                incarnation="first",
                settings_revision=0,
                temperature=1.0,
                max_tokens=4,
            )
        )
        return issue.number, issue.task.task_id

    def journal(self) -> list[object]:
        return list(read_journal(self.run_dir / "journal" / "run-1" / "rollouter.log"))


def test_quarantined_task_is_passed_over_and_comes_back_when_its_file_is_gone(tmp_path: Path) -> None:
    """B13: on a live run; both are in the journal."""
    desk = _Desk(tmp_path)
    desk.hold(1)
    assert [desk.next() for _ in range(3)] == [(0, "t0"), (2, "t2"), (3, "t0")]
    assert desk.keeper.books.counts().quarantined_tasks == 1
    desk.quarantine.path_of("t1").unlink()
    assert [desk.next() for _ in range(2)] == [(4, "t1"), (5, "t2")]
    assert desk.keeper.books.counts().quarantined_tasks == 0
    told = [record for record in desk.journal() if isinstance(record, (IssueSkipped, TaskReleased))]
    assert told == [IssueSkipped(at=1.0, task_id="t1", issue=1), TaskReleased(at=1.0, task_id="t1")]


def test_file_says_why_the_task_is_held(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    desk.hold(2)
    assert json.loads(desk.quarantine.path_of("t2").read_text()) == {
        "task_id": "t2",
        "failures": 3,
        "reasons": ["timeout"] * 3,
        "messages": ["attempt 0", "attempt 1", "attempt 2"],
        "prompt_text": "prompt 2",
        "at": 1.0,
    }


def test_when_every_task_is_held_nothing_is_issued_and_no_issue_is_used_up(tmp_path: Path) -> None:
    desk = _Desk(tmp_path)
    for number in range(3):
        desk.hold(number)
    assert desk.next() is Hold.QUARANTINED
    assert desk.next() is Hold.QUARANTINED
    desk.quarantine.path_of("t2").unlink()
    assert desk.next() == (2, "t2")


def test_issues_of_held_tasks_count_as_passes_over_the_data(tmp_path: Path) -> None:
    """B49"""
    desk = _Desk(tmp_path, num_epochs=2)
    desk.hold(2)
    assert [desk.next() for _ in range(5)] == [(0, "t0"), (1, "t1"), (3, "t0"), (4, "t1"), Hold.NO_DATA]
    assert desk.issues.num_issued == 6


def test_another_process_goes_on_behind_the_last_issue(tmp_path: Path) -> None:
    """B37, B38"""
    desk = _Desk(tmp_path)
    desk.hold(0)
    assert desk.next() == (1, "t1")
    desk.keeper.release()
    again = _Desk(tmp_path)
    assert [again.next() for _ in range(3)] == [(2, "t2"), (4, "t1"), (5, "t2")]


def test_task_is_held_although_its_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "quarantine").write_text("in the way")
    desk = _Desk(tmp_path)
    desk.hold(0)
    assert desk.next() == (1, "t1")
    (tmp_path / "quarantine").unlink()
    assert [desk.next() for _ in range(2)] == [(2, "t2"), (4, "t1")]
    assert desk.quarantine.path_of("t0").exists()


@pytest.mark.parametrize("ahead", range(7))
def test_looking_ahead_uses_nothing_up(ahead: int) -> None:
    source = make_source(num_epochs=2)
    seen = source.peek(ahead)
    assert (None if seen is None else seen.number) == (ahead if ahead < 6 else None)
    assert source.cursor.issued == 0
