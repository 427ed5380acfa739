"""Names of groups: `TASK#ISSUE@PROCESS`, and `TASK#ISSUE@PROCESS+N` when the task is issued for the Nth time again. Pure.

Invariant: a rollouter never gives one name to two groups, and a name alone says which task it is of and how often that was
issued again; so both daemons count alike, whatever of their memory they lost.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"(?P<task>.+)#(?P<issue>[0-9]+)@(?P<process>[^@#+]+)(?:\+(?P<again>[1-9][0-9]*))?", re.ASCII | re.DOTALL)


class GroupName(NamedTuple):
    task_id: str
    issue: int
    """Number of the issue over all epochs of the data."""
    process: str
    """Of the rollouter's process that admitted it."""
    num_requeues: int = 0
    """Times that this issue was issued again before, this time included."""

    def __str__(self) -> str:
        again = f"+{self.num_requeues}" if self.num_requeues else ""
        return f"{self.task_id}#{self.issue}@{self.process}{again}"


def parse(group_id: str) -> GroupName | None:
    """What a name says; None for one that no rollouter of ours gave."""
    found = _NAME.fullmatch(group_id)
    if found is None:
        return None
    return GroupName(found["task"], int(found["issue"]), found["process"], int(found["again"] or 0))


def num_requeues(group_id: str) -> int:
    """How often the group's issue was issued again; 0 for a foreign name."""
    name = parse(group_id)
    return 0 if name is None else name.num_requeues
