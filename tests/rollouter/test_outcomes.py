"""Pass rates follow from the journal: too easy and too hard tasks are passed over for a while, medium ones may come again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import FilterSettings
from rollouter.admission import Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.issues import Issues
from rollouter.outcomes import Outcomes, replay_number, replay_process
from rollouter.prompts import Issue
from rollouter.retries import Retries
from rollouter.task_quarantine import TaskQuarantine
from sample_bus.group_id import GroupName, parse
from sample_bus.journal import GroupAdmitted, IssueSkipped, SampleOffered, read_journal
from sample_bus.messages import RetryTask, TaskRetries
from tests.rollouter.test_issues import make_source


def _admitted(group_id: str, task_id: str, issue: int, replaces: str = "") -> GroupAdmitted:
    return GroupAdmitted(
        at=1.0,
        group_id=group_id,
        task_id=task_id,
        issue=issue,
        group_size=2,
        policy_version=0,
        incarnation="first",
        settings_revision=0,
        temperature=1.0,
        max_tokens=4,
        replaces=replaces,
    )


class _Desk:
    """Issues over a journal; each group is played at once, with rewards by its task."""

    def __init__(self, run_dir: Path, filters: FilterSettings, *, count: int, rewards: Mapping[str, tuple[float, ...]]) -> None:
        self.path = run_dir / "journal" / "run-1" / "rollouter.log"
        self.keeper = Bookkeeper(run_dir, "run-1", now=lambda: 1.0)
        self.filters = filters
        source = make_source(count)
        quarantine = TaskQuarantine(run_dir / "quarantine")
        self.retries = Retries(source, run_id="run-1", taken=self.keeper.books.replaced)
        self.issues = Issues(source, quarantine, self.keeper, self.retries, filters=lambda: self.filters)
        self.rewards = rewards
        self.seq = self.keeper.books.first_unknown

    def play(self, process: str = "p") -> str:
        """The group that came next."""
        for _ in range(100):
            issue = self.issues.next()
            if issue is not Hold.LOOKING:
                break
        assert isinstance(issue, Issue), issue
        task_id = issue.task.task_id
        group_id = str(GroupName(task_id, issue.number, replay_process(process, issue.replay), issue.requeue))
        self.keeper.write(_admitted(group_id, task_id, issue.number, issue.replaces))
        for seat, reward in enumerate(self.rewards.get(task_id, (0.0, 1.0))):
            self.keeper.write(
                SampleOffered(
                    at=1.0,
                    group_id=group_id,
                    seat=seat,
                    attempt=0,
                    id=["rollouter", 0, self.seq],
                    num_tokens=3,
                    reward=reward,
                    oldest_version=0,
                )
            )
            self.seq += 1
        return group_id


def _tasks(groups: list[str]) -> list[str]:
    return [name.task_id for group in groups if (name := parse(group)) is not None]


def test_too_easy_and_too_hard_tasks_are_passed_over_and_come_again_after_a_while(tmp_path: Path) -> None:
    rewards = {"t0": (1.0, 1.0), "t1": (0.0, 0.0), "t2": (1.0, 0.0)}
    filters = FilterSettings(min_pass_rate=0.1, max_pass_rate=0.9, revisit_epochs=3)
    desk = _Desk(tmp_path, filters, count=3, rewards=rewards)
    groups = [desk.play() for _ in range(8)]
    assert _tasks(groups) == ["t0", "t1", "t2", "t2", "t2", "t0", "t1", "t2"]
    assert [name.issue for group in groups if (name := parse(group))] == [0, 1, 2, 5, 8, 9, 10, 11]
    skipped = [record.issue for record in read_journal(desk.path) if isinstance(record, IssueSkipped)]
    assert skipped == [3, 4, 6, 7]


def test_a_process_that_comes_again_passes_over_what_the_one_before_would_have(tmp_path: Path) -> None:
    rewards = {"t0": (1.0, 1.0), "t1": (0.0, 0.0)}
    filters = FilterSettings(min_pass_rate=0.1, max_pass_rate=0.9, replay_share=0.3)
    straight = _Desk(tmp_path / "a", filters, count=4, rewards=rewards)
    expected = [straight.play() for _ in range(20)]
    groups: list[str] = []
    for _ in range(20):
        desk = _Desk(tmp_path / "b", filters, count=4, rewards=rewards)
        groups.append(desk.play())
        desk.keeper.release()
    assert groups == expected


def test_when_every_task_would_be_left_out_one_is_taken_all_the_same(tmp_path: Path) -> None:
    """B78: the run goes on, whatever the rewards are."""
    desk = _Desk(tmp_path, FilterSettings(max_pass_rate=0.5), count=3, rewards={f"t{n}": (1.0, 1.0) for n in range(3)})
    assert len([desk.play() for _ in range(12)]) == 12
    desk.filters = FilterSettings()  # live
    assert _tasks([desk.play() for _ in range(3)]) in (["t0", "t1", "t2"], ["t1", "t2", "t0"], ["t2", "t0", "t1"])


def test_replays_are_a_share_of_the_groups_those_of_medium_tasks_and_none_by_default(tmp_path: Path) -> None:
    rewards = {f"t{n}": (0.0, 1.0) if n < 2 else (1.0, 1.0) for n in range(10)}
    desk = _Desk(tmp_path / "on", FilterSettings(replay_share=0.25), count=10, rewards=rewards)
    groups = [desk.play() for _ in range(40)]
    again = [group for group in groups if replay_number(group)]
    assert len(again) == 10
    assert set(_tasks(again)) == {"t0", "t1"}
    assert len(set(groups)) == 40
    in_turn = [group for group in groups if not replay_number(group)]
    assert _tasks(in_turn) == [f"t{n % 10}" for n in range(30)]
    off = _Desk(tmp_path / "off", FilterSettings(), count=10, rewards=rewards)
    assert not any(replay_number(off.play()) for _ in range(20))


def test_replay_that_was_too_old_is_issued_again_under_a_name_of_its_own(tmp_path: Path) -> None:
    desk = _Desk(tmp_path, FilterSettings(replay_share=0.5), count=4, rewards={})
    groups = [desk.play() for _ in range(4)]
    replay = next(group for group in groups if replay_number(group))
    original = next(group for group in groups if _tasks([group]) == _tasks([replay]) and not replay_number(group))
    told = tuple(RetryTask(group_id=group, task_id=_tasks([group])[0]) for group in (original, replay))
    desk.retries.take(TaskRetries(run_id="run-1", tasks=told))
    again = [desk.play() for _ in range(2)]
    assert len({*groups, *again}) == 6
    assert [replay_number(group) for group in again] == [0, replay_number(replay)]


@given(st.lists(st.sampled_from([0.0, 0.4, 1.0, 2.0]), min_size=1, max_size=8), st.sampled_from([0.0, 0.5, 1.0]))
def test_pass_rate_is_the_share_with_at_least_the_reward_of_a_pass(rewards: list[float], bound: float) -> None:
    outcomes = Outcomes()
    for seat, reward in enumerate(rewards):
        outcomes.offer(_offered("t#3@p", seat, reward))
    outcome = outcomes.of("t")
    assert outcome is not None
    assert outcome.pass_rate(bound) == pytest.approx(sum(reward >= bound for reward in rewards) / len(rewards))
    outcomes.offer(_offered("t#1@p", 0, -5.0))  # of an older group
    assert outcomes.of("t") is outcome
    assert len(outcome.rewards) == len(rewards)
    outcomes.offer(_offered("t#3@p+1", 0, 7.0))
    newest = outcomes.of("t")
    assert newest is not None
    assert newest.rewards == [7.0]


def _offered(group_id: str, seat: int, reward: float) -> SampleOffered:
    return SampleOffered(
        at=1.0, group_id=group_id, seat=seat, attempt=0, id=["r", 1, seat], num_tokens=1, reward=reward, oldest_version=0
    )
