"""Which task is issued next: one that the trainer wants again, else the prompt source's order, less what is in quarantine.

Invariant: an issue of that order is handed out once or noted as skipped; the journal's cursor never stands behind the source's.
"""

from __future__ import annotations

import structlog

from rollouter.admission import Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.prompts import Issue, PromptCursor, PromptSource
from rollouter.retries import Retries
from rollouter.task_quarantine import TaskQuarantine
from sample_bus.journal import IssueSkipped, TaskReleased

log = structlog.get_logger()


class Issues:
    def __init__(
        self, source: PromptSource, quarantine: TaskQuarantine, keeper: Bookkeeper, retries: Retries | None = None
    ) -> None:
        """The source goes on behind what the books say was issued. Raises DataError."""
        self._retries = retries
        self._source = source
        self._quarantine = quarantine
        self._keeper = keeper
        source.restore(PromptCursor(issued=keeper.books.next_issue, fingerprint=source.cursor.fingerprint))

    @property
    def num_issued(self) -> int:
        return self._source.cursor.issued

    @property
    def quarantine(self) -> TaskQuarantine:
        return self._quarantine

    def skip(self, count: int) -> None:
        """Leave out what a rollouter with another journal issued."""
        self._source.skip(count)

    def next(self) -> Issue | Hold:
        """The next task that is not held; or why there is none now: the data is exhausted, or all of it is in quarantine."""
        again = None if self._retries is None else self._retries.next()
        if again is not None:
            return again
        for ahead in range(self._source.num_tasks):
            issue = self._source.peek(ahead)
            if issue is None:
                self._pass_over(ahead)
                return Hold.NO_DATA
            if not self._quarantine.holds(issue.task.task_id):
                self._pass_over(ahead)
                self._released(issue.task.task_id)
                self._source.skip(1)
                return issue
        return Hold.QUARANTINED

    def _pass_over(self, count: int) -> None:
        for _ in range(count):
            issue = self._source.next()
            assert issue is not None, "an issue was seen ahead and is not there"
            log.info("quarantined task passed over", task_id=issue.task.task_id, issue=issue.number)
            self._keeper.write(IssueSkipped(at=self._keeper.now(), task_id=issue.task.task_id, issue=issue.number))

    def _released(self, task_id: str) -> None:
        if task_id in self._keeper.books.quarantined:
            log.info("task released", task_id=task_id)
            self._keeper.write(TaskReleased(at=self._keeper.now(), task_id=task_id))
