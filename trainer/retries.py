"""Tasks that the rollouter is asked to issue again since their groups were too old: topic `retries`.

Invariant: each group is asked for once, over restarts of the trainer too, and stands in the topic until the rollouter says that
it has noted another group in its place. So a task is issued again exactly once for it, whichever of the two dies when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from sample_bus.journal import Record, RetriesTaken, RetryAsked
from sample_bus.messages import RetryTask, TaskRetries
from sample_bus.protocols import Control

log = structlog.get_logger()

MAX_TOLD = 1000
"""Entries of the topic; those beyond follow as the first are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriesHistory:
    """What the journal says of retries."""

    pending: Mapping[str, str] = field(default_factory=dict)
    """Group to task, oldest first: asked for and not known to be taken."""
    taken: frozenset[str] = frozenset()


class RetriesFold:
    """Of a trainer's journal, oldest record first. A rollback takes nothing back: what was asked for may have been taken."""

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}
        self._taken: set[str] = set()

    def take(self, record: Record) -> None:
        match record:
            case RetryAsked(group_id=group_id, task_id=task_id):
                self._pending.setdefault(group_id, task_id)
            case RetriesTaken(group_ids=group_ids):
                for group_id in group_ids:
                    self._pending.pop(group_id, None)
                    self._taken.add(group_id)
            case _:
                pass

    def result(self) -> RetriesHistory:
        return RetriesHistory(pending=dict(self._pending), taken=frozenset(self._taken))


class Retries:
    """Asks for retries and follows what was taken."""

    def __init__(
        self,
        *,
        run_id: str,
        write: Callable[[Record], None],
        history: RetriesHistory | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`write` puts a record into the trainer's journal."""
        history = history or RetriesHistory()
        self._run_id = run_id
        self._write = write
        self._now = now
        self._pending = dict(history.pending)
        self._taken = set(history.taken)
        self._changed = asyncio.Event()
        self._changed.set()

    @property
    def num_pending(self) -> int:
        """Asked for and not known to be taken."""
        return len(self._pending)

    def ask(self, group_id: str, task_id: str) -> None:
        """Have the task of a group that is about to be dropped issued again. Does nothing the second time."""
        if group_id in self._pending or group_id in self._taken:
            return
        self._write(RetryAsked(at=self._now(), group_id=group_id, task_id=task_id))
        self._pending[group_id] = task_id
        self._changed.set()
        log.info("task is to be issued again", group_id=group_id, task_id=task_id)

    def take(self, group_ids: Iterable[str]) -> None:
        """The rollouter says that it has noted other groups in the place of these."""
        taken = [group_id for group_id in group_ids if group_id in self._pending]
        if not taken:
            return
        self._write(RetriesTaken(at=self._now(), group_ids=list(taken)))
        for group_id in taken:
            del self._pending[group_id]
            self._taken.add(group_id)
        self._changed.set()

    def topic(self) -> TaskRetries:
        """What is told now."""
        tasks = [RetryTask(group_id=group_id, task_id=task_id) for group_id, task_id in self._pending.items()]
        return TaskRetries(run_id=self._run_id, tasks=tuple(tasks[:MAX_TOLD]))

    async def run(self, control: Control) -> None:
        """Publish each change until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await control.publish("retries", self.topic())
