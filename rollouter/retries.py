"""Tasks that the trainer wants issued again since their groups were too old: topic `retries`.

Invariant: a group is replaced once. The admission of the group in its place names it, so the journal knows what was taken; the
trainer tells of it until this rollouter says so, whichever of the two is restarted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from rollouter.outcomes import replay_number
from rollouter.prompts import Issue, PromptSource
from sample_bus.group_id import parse
from sample_bus.messages import RetryTask, TaskRetries

log = structlog.get_logger()


class Retries:
    """Of one run."""

    def __init__(
        self, source: PromptSource, *, run_id: str, taken: Collection[str], holds: Callable[[str], bool] = lambda task_id: False
    ) -> None:
        """`taken`: groups that were replaced, as the books have them; `holds`: whether a task may not be issued now."""
        self._source = source
        self._run_id = run_id
        self._taken = taken
        self._holds = holds
        self._told: tuple[RetryTask, ...] = ()

    def take(self, topic: TaskRetries) -> None:
        """What the trainer wants now; another run's list says nothing here."""
        self._told = topic.tasks if topic.run_id == self._run_id else ()

    def next(self) -> Issue | None:
        """The oldest one that was not taken and whose task may be issued."""
        for retry in self._told:
            if retry.group_id in self._taken:
                continue
            issue = self._issue(retry)
            if issue is not None and not self._holds(retry.task_id):
                return issue
        return None

    def taken(self) -> tuple[str, ...]:
        """Of those that the trainer tells of, what was taken."""
        return tuple(retry.group_id for retry in self._told if retry.group_id in self._taken)

    def _issue(self, retry: RetryTask) -> Issue | None:
        name, task = parse(retry.group_id), self._source.task(retry.task_id)
        if name is None or task is None:
            log.debug("group is none of this rollouter's, not issued again", group_id=retry.group_id, task_id=retry.task_id)
            return None
        return Issue(
            number=name.issue,
            epoch=name.issue // self._source.num_tasks,
            task=task,
            requeue=name.num_requeues + 1,
            replaces=retry.group_id,
            replay=replay_number(retry.group_id),
        )
