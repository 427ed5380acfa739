"""The run that is played now: its books and journal, its place in the data, its dispatcher.

Invariant: everything here belongs to one run id and one stream of this producer; another of either is taken up anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from configs.schema import Settings
from rollouter.admission import Admission
from rollouter.attempts import Attempts
from rollouter.bookkeeping import Bookkeeper
from rollouter.dispatch import Dispatcher, Situation
from rollouter.failure_notes import FailureNotes
from rollouter.failures import FailureStreak
from rollouter.flight import Cockpit
from rollouter.issues import Issues
from rollouter.live import LiveView
from rollouter.prompts import Prompts, PromptSource
from rollouter.retries import Retries
from rollouter.rollouts import Plan, Runner
from rollouter.seat_policy import SeatPolicy
from rollouter.task_quarantine import TaskQuarantine
from sample_bus.errors import PeerLost
from sample_bus.journal import LATE_RESULT, AttemptFailed
from sample_bus.protocols import Link, Resumption

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInHand:
    keeper: Bookkeeper
    issues: Issues
    dispatcher: Dispatcher
    retries: Retries
    epoch: int
    """Of the stream."""

    def is_of(self, resumption: Resumption) -> bool:
        return (resumption.run_id, resumption.epoch) == (self.keeper.run_id, self.epoch)

    def leave_out(self, num_groups: int) -> None:
        """The trainer accounts for so many groups: if none of them stands in this journal (it was written on another host, or
        is lost with its directory), their tasks are not issued again."""
        if self.issues.num_issued == 0 and num_groups > 0:
            log.warning("tasks that a rollouter with another journal issued are left out", groups=num_groups)
            self.issues.skip(num_groups)


async def take_up(
    settings: Settings,
    link: Link,
    *,
    prompts: Prompts,
    runner: Runner,
    admission: Admission,
    live: LiveView,
    situation: Situation,
    stop_token_ids: tuple[int, ...],
    process: str,
    rebase: Callable[[], bool],
    wake: Callable[[], None],
    on_change: Callable[[], None],
    notes: FailureNotes,
) -> RunInHand:
    """Open the journal of the trainer's run and go on where it stands; waits for a trainer.

    `rebase`, `process` and `on_change` are as in `Cockpit` and `Dispatcher`; `wake` is called when the journal can be written
    no more, or again. Raises JournalError, DataError, BusError.
    """
    resumption = await _resumption(link)
    keeper = await asyncio.to_thread(Bookkeeper, settings.run_dir, resumption.run_id, on_change=wake)
    try:
        await keeper.take_up(
            link,
            resumption,
            process=process,
            fingerprint=prompts.source.cursor.fingerprint,
            policy=seat_policy_of(live.settings),
            sampling=settings.sampling,
        )
        open_tasks = [group.admitted.task_id for group in keeper.books.open_groups.values()]
        await asyncio.to_thread(_read_tasks, prompts.source, open_tasks)
    except BaseException:
        keeper.release()
        raise

    def count_late(plan: Plan, number: int) -> None:
        keeper.write(
            AttemptFailed(
                at=keeper.now(),
                group_id=plan.group_id,
                seat=plan.seat,
                attempt=number,
                reason=LATE_RESULT,
                message="a result came after its attempt had been given up",
            )
        )

    quarantine = TaskQuarantine(settings.run_dir / "quarantine" / "tasks")
    retries = Retries(prompts.source, run_id=keeper.run_id, taken=keeper.books.replaced, holds=quarantine.holds)
    event_loop = asyncio.get_running_loop()

    def task_made() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            event_loop.call_soon_threadsafe(dispatcher.wake)

    issues = Issues(prompts.source, quarantine, keeper, retries, filters=lambda: live.settings.filters, on_made=task_made)
    cockpit = Cockpit(
        admission=admission,
        keeper=keeper,
        attempts=Attempts(runner, timeout_s=lambda: live.settings.rollouter.rollout_timeout_s, on_late=count_late),
        producer=link,
        policy=lambda: seat_policy_of(live.settings),
        quarantine=quarantine,
        max_task_failures=settings.rollouter.max_task_failures,
        streak=FailureStreak(
            limit=settings.rollouter.max_consecutive_failures,
            max_fraction=settings.rollouter.max_failed_fraction,
            window=settings.rollouter.failure_window,
        ),
        turnstile=runner.turnstile,
        is_current=rebase,
        notes=notes,
    )
    dispatcher = Dispatcher(
        admission=admission,
        keeper=keeper,
        source=prompts.source,
        issues=issues,
        cockpit=cockpit,
        producer=link,
        live=live,
        stop_token_ids=stop_token_ids,
        situation=situation,
        process=process,
        on_change=on_change,
    )
    return RunInHand(keeper=keeper, issues=issues, dispatcher=dispatcher, retries=retries, epoch=resumption.epoch)


def seat_policy_of(settings: Settings) -> SeatPolicy:
    """What follows a failure under these settings."""
    return SeatPolicy(
        on_failed_seat=settings.on_failed_seat,
        min_survivors=settings.min_survivors,
        max_attempts=settings.rollouter.max_attempts,
        max_refills=settings.rollouter.max_task_failures,
    )


def _read_tasks(source: PromptSource, task_ids: Sequence[str]) -> None:
    """Have the tasks of open groups made before the event loop asks for them."""
    for task_id in task_ids:
        source.task(task_id)


async def _resumption(link: Link) -> Resumption:
    async for newest in link.resumptions():
        return newest
    raise PeerLost("the bus closed before a trainer took this rollouter")
