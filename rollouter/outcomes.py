"""How often tasks are passed, by the rewards of their newest groups; which are passed over for it, which come again. Pure.

Invariant: everything here is a fold of the rollouter's journal, so a process that comes again decides as the one before it
would have. What counts as passed, and within which bounds a task stays, is asked at each decision.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

from configs.schema import FilterSettings
from sample_bus.group_id import GroupName, parse
from sample_bus.journal import GroupAdmitted, SampleOffered

MAX_TASKS = 100_000
"""Tasks whose newest group is remembered."""
MAX_CANDIDATES = 1024
"""Newest ones among which a task to come again is chosen."""
_REPLAY = re.compile(r"(?P<process>.*)\.r(?P<number>[1-9][0-9]*)", re.ASCII | re.DOTALL)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The newest group of a task of which some sample came."""

    name: GroupName
    rewards: list[float] = field(default_factory=list)
    num_replays: int = 0
    """Times that the task came again out of turn."""

    def pass_rate(self, pass_reward: float) -> float:
        """Share of its samples with at least that reward."""
        return sum(reward >= pass_reward for reward in self.rewards) / len(self.rewards)


@dataclass(slots=True)
class Outcomes:
    """Of the tasks of one run."""

    num_groups: int = 0
    """Admitted, those not counted that took the place of one that was too old."""
    num_replays: int = 0
    """Those of them that came out of turn."""
    _newest: OrderedDict[str, Outcome] = field(default_factory=OrderedDict)

    def admit(self, record: GroupAdmitted) -> None:
        if record.replaces:
            return
        self.num_groups += 1
        if replay_number(record.group_id):
            self.num_replays += 1
            if record.task_id in self._newest:
                self._newest[record.task_id].num_replays += 1

    def offer(self, record: SampleOffered) -> None:
        name = parse(record.group_id)
        if name is None:
            return
        known = self._newest.get(name.task_id)
        if known is None or (known.name != name and _rank(known.name) < _rank(name)):
            replays = 0 if known is None else known.num_replays
            known = self._newest[name.task_id] = Outcome(name=name, num_replays=replays)
            self._newest.move_to_end(name.task_id)
            while len(self._newest) > MAX_TASKS:
                self._newest.popitem(last=False)
        if known.name == name:
            known.rewards.append(record.reward)

    def of(self, task_id: str) -> Outcome | None:
        """What its newest group brought."""
        return self._newest.get(task_id)

    def is_passed_over(self, task_id: str, *, epoch: int, epoch_size: int, filters: FilterSettings) -> bool:
        """Whether the task is left out in this epoch since it was too hard or too easy."""
        outcome = self._newest.get(task_id)
        if outcome is None or epoch >= outcome.name.issue // epoch_size + filters.revisit_epochs:
            return False
        return not filters.min_pass_rate <= outcome.pass_rate(filters.pass_reward) <= filters.max_pass_rate

    def is_replay_due(self, filters: FilterSettings) -> bool:
        """Whether the next group may be made of a task seen before."""
        return self.num_replays + 1 <= filters.replay_share * (self.num_groups + 1)

    def to_replay(self, filters: FilterSettings) -> list[Outcome]:
        """Candidates, best first: some samples passed and some did not, the nearer to half the better, each time that a task
        came again halving its worth; of equals the one seen longest ago."""
        recent = list(self._newest.values())[-MAX_CANDIDATES:]
        worth = [
            (rate * (1 - rate) / 2**outcome.num_replays, -outcome.name.issue, outcome)
            for outcome in recent
            if 0 < (rate := outcome.pass_rate(filters.pass_reward)) < 1
        ]
        return [outcome for _, _, outcome in sorted(worth, key=lambda one: one[:2], reverse=True)]


def replay_process(process: str, number: int) -> str:
    """The process part of the name of the run's replay `number`, from 1: it tells the group from its issue's others."""
    return f"{process}.r{number}" if number else process


def replay_number(group_id: str) -> int:
    """The number of the replay that the group is; 0: it came in the data's order."""
    name = parse(group_id)
    found = None if name is None else _REPLAY.fullmatch(name.process)
    return 0 if found is None else int(found["number"])


def _rank(name: GroupName) -> tuple[int, int, int]:
    """Newer groups of one task have higher ones."""
    return name.issue, replay_number(str(name)), name.num_requeues
