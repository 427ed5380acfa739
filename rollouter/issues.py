"""Which task is issued next: one that the trainer wants again, one that comes again out of turn, else the prompt source's order
less what is left out.

Invariant: an issue of that order is handed out once or noted as skipped; the journal's cursor never stands behind the source's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from configs.schema import FilterSettings
from rollouter.admission import Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.errors import DataError
from rollouter.prompts import Issue, PromptCursor, PromptSource, Refused
from rollouter.retries import Retries
from rollouter.task_quarantine import TaskQuarantine
from sample_bus.journal import IssueSkipped, TaskReleased

log = structlog.get_logger()

MAX_PASSED_AT_ONCE = 64
"""Issues that are passed over before whoever asked gets a chance to do something else."""


class Issues:
    def __init__(
        self,
        source: PromptSource,
        quarantine: TaskQuarantine,
        keeper: Bookkeeper,
        retries: Retries | None = None,
        *,
        filters: Callable[[], FilterSettings] = FilterSettings,
        on_made: Callable[[], None] | None = None,
    ) -> None:
        """The source goes on behind what the books say was issued. `on_made` is called, by another thread, when there is a
        task again after `Hold.READING`; None: tasks are made where they are asked for. Raises DataError."""
        self._on_made = on_made
        self._retries = retries
        self._source = source
        self._quarantine = quarantine
        self._keeper = keeper
        self._filters = filters
        self._left_out: Counter[str] = Counter()
        """Issues passed over since the last one that was handed out, by reason."""
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
        """The next task that is not left out; or why there is none now: the data is exhausted, all of it is in quarantine, so
        many were passed over that the rest is for the next call, or it is not read yet. Raises DataError when no row of an
        epoch is a task."""
        again = None if self._retries is None else self._retries.next()
        if again is not None:
            return again
        filters = self._filters()
        again = self._replay(filters)
        if again is not None:
            return again
        passed = 0
        for ahead in range(self._source.num_tasks):
            if self._on_made is not None and not self._source.is_ready(ahead - passed, self._on_made):
                return Hold.READING
            issue = self._source.peek(ahead - passed)
            if issue is None:
                self._pass_over(ahead - passed)
                return Hold.NO_DATA
            why = issue.reason.value if isinstance(issue, Refused) else self._left_out_for(issue, filters)
            if isinstance(issue, Issue) and why is None:
                if self._quarantine.holds(issue.task.task_id):
                    continue
                self._pass_over(ahead - passed)
                self._released(issue.task.task_id)
                self._source.skip(1)
                self._left_out.clear()
                return issue
            self._pass_over(ahead - passed + 1)
            passed = ahead + 1
            self._note_left_out(str(why))
            if passed >= MAX_PASSED_AT_ONCE:
                return Hold.LOOKING
        return Hold.LOOKING if passed else Hold.QUARANTINED

    def _left_out_for(self, issue: Issue, filters: FilterSettings) -> str | None:
        """Why the task is not issued in its turn; None: it is. When a whole epoch would be left out, none is."""
        if self._left_out.total() >= self._source.num_tasks:
            return None
        outcomes = self._keeper.books.outcomes
        size = self._source.num_tasks
        if outcomes.is_passed_over(issue.task.task_id, epoch=issue.epoch, epoch_size=size, filters=filters):
            return "pass rate"
        return None

    def _note_left_out(self, why: str) -> None:
        """Raises DataError when every row of an epoch was refused."""
        self._left_out[why] += 1
        total, size = self._left_out.total(), self._source.num_tasks
        if total < size:
            return
        words = ", ".join(f"{count} {reason}" for reason, count in self._left_out.most_common())
        if "pass rate" not in self._left_out:
            raise DataError(f"data: of {size} rows of an epoch, 0 are left ({words}): raise data.max_prompt_tokens")
        if total == size:
            log.warning("every task of an epoch would be left out: the next one is taken all the same", left_out=words)

    def _replay(self, filters: FilterSettings) -> Issue | None:
        outcomes = self._keeper.books.outcomes
        if not filters.replay_share or not outcomes.is_replay_due(filters):
            return None
        for outcome in outcomes.to_replay(filters):
            task = self._source.task(outcome.name.task_id)
            if task is not None and not self._quarantine.holds(task.task_id):
                issue = outcome.name.issue
                number = outcomes.num_replays + 1
                return Issue(number=issue, epoch=issue // self._source.num_tasks, task=task, replay=number)
        return None

    def _pass_over(self, count: int) -> None:
        for _ in range(count):
            issue = self._source.peek()
            assert issue is not None, "an issue was seen ahead and is not there"
            self._source.skip(1)
            if isinstance(issue, Refused):
                log.debug("row passed over", issue=issue.number, why=issue.reason.value)
                self._keeper.write(IssueSkipped(at=self._keeper.now(), task_id="", issue=issue.number))
            else:
                log.info("task passed over", task_id=issue.task.task_id, issue=issue.number)
                self._keeper.write(IssueSkipped(at=self._keeper.now(), task_id=issue.task.task_id, issue=issue.number))

    def _released(self, task_id: str) -> None:
        if task_id in self._keeper.books.quarantined:
            log.info("task released", task_id=task_id)
            self._keeper.write(TaskReleased(at=self._keeper.now(), task_id=task_id))
