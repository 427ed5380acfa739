"""The real trainer asks for a task again over its own restarts, until the rollouter says that it has taken it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sample_bus.journal import RetriesTaken, RetryAsked
from sample_bus.messages import BiasReport, RollouterState, RollouterStatus, TaskRetries
from sample_bus.protocols import Link
from tests.fakes.samples import make_sample
from tests.trainer.daemons import GROUP_SIZE, HANG_S, daemon, journal, offer_group, rollouter, settings_for, status_where

STALE = "t#7@p"


async def told(link: Link, *groups: str) -> None:
    """Wait until the trainer asks for exactly these."""
    async with asyncio.timeout(HANG_S):
        async for retries in link.watch("retries", TaskRetries):
            if tuple(task.group_id for task in retries.tasks) == groups:
                return


async def test_a_task_is_asked_for_until_it_is_taken(tmp_path: Path) -> None:
    """B34: the trainer is stopped at once while nobody has taken the task, and again when it was taken."""
    changes = {"max_staleness": 1, "on_stale": "retry", "checkpoint.every_steps": 1, "checkpoint.resume": "auto"}
    settings = settings_for(tmp_path, **changes)
    for life in range(3):
        async with daemon(settings) as task, rollouter(settings) as link:
            if life == 0:
                for number in range(4):
                    await offer_group(link, number)
                await status_where(link, lambda status: status.policy_version == 2)
                for seat in range(GROUP_SIZE):
                    await link.offer(make_sample(group_id=STALE, seat=seat, group_size=GROUP_SIZE, task_id="t"))
            if life < 2:
                await told(link, STALE)
            if life == 1:
                status = RollouterStatus(state=RollouterState.GENERATING, retries_taken=(STALE,))
                await link.publish("rollouter", status)
            if life > 0:
                await told(link)
            await status_where(link, lambda status: status.counts.dropped == {"stale, retried": GROUP_SIZE})
            async with asyncio.timeout(HANG_S):
                async for report in link.watch("bias", BiasReport):
                    if (report.trained.length.count, report.dropped.length.count) == (4 * GROUP_SIZE, GROUP_SIZE):
                        break
            task.cancel()
    assert [(record.group_id, record.task_id) for record in journal(tmp_path, RetryAsked)] == [(STALE, "t")]
    assert [record.group_ids for record in journal(tmp_path, RetriesTaken)] == [[STALE]]
