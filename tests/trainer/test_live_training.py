"""Live changes of a real trainer: they hold from the step or version that was answered, over restarts too."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from configs.live import live_values
from configs.schema import Settings
from rollouter.live import LiveView
from sample_bus.journal import Saved, StepBegan, StepTrained, VersionPublished
from sample_bus.messages import (
    ChangeSettings,
    EndReason,
    LiveSettingsState,
    RevertSettings,
    SettingsChanged,
)
from sample_bus.protocols import Link
from sample_bus.settings_log import read_settings_log
from tests.fakes.samples import make_sample
from tests.trainer.daemons import HANG_S, daemon, end_of, journal, offer_group, rollouter, settings_for, status_where


async def change(link: Link, values: dict[str, Any]) -> SettingsChanged:
    return await link.request("settings.set", ChangeSettings(values=values, author="ann"), SettingsChanged)


def since(changed: SettingsChanged, key: str) -> str:
    return next(one.holds_from for one in changed.changes if one.key == key)


async def offer(link: Link, first: int, last: int) -> None:
    for number in range(first, last):
        await offer_group(link, number)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["family"] == "train"]


async def test_size_rate_and_clipping_hold_from_the_step_that_was_answered(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, num_steps=5, **{"trainer.warmup_steps": 0})
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await offer(link, 0, 2)
            await status_where(link, lambda status: status.step == 1)
            larger = await change(link, {"samples_per_step": 16, "trainer.learning_rate": 3e-3})
            assert {one.holds_from for one in larger.changes} == {"step 2"}
            await offer(link, 2, 6)
            await status_where(link, lambda status: status.step == 2)
            smaller = await change(
                link, {"samples_per_step": 4, "trainer.max_grad_norm": 1e-6, "trainer.normalize_by_std": False}
            )
            assert {one.holds_from for one in smaller.changes} == {"step 3"}
            await offer(link, 6, 9)
            assert (await end_of(link)).reason is EndReason.FINISHED
        await task
    began = journal(tmp_path, StepBegan)
    assert [len(record.samples) for record in began] == [8, 16, 4, 4, 4]
    assert [record.options["trainer.learning_rate"] for record in began] == [1e-3, *[3e-3] * 4]
    assert [record.options["trainer.max_grad_norm"] for record in began] == [1.0, 1.0, *[1e-6] * 3]
    assert [row["settings_revision"] for row in rows(tmp_path)] == [0, 1, 2, 2, 2]
    assert [row["learning_rate"] for row in rows(tmp_path)] == [1e-3, *[3e-3] * 4]


async def test_a_batch_that_waits_is_taken_at_once_when_a_smaller_one_will_do(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, num_steps=1)
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await offer(link, 0, 1)
            await status_where(link, lambda status: status.counts.queued == 4)
            assert since(await change(link, {"samples_per_step": 4}), "samples_per_step") == "step 1"
            await end_of(link)
        await task
    assert [len(record.samples) for record in journal(tmp_path, StepBegan)] == [4]


async def test_a_step_larger_than_what_the_full_bus_holds_does_not_wedge_the_run(tmp_path: Path) -> None:
    """B28 for the size of a step: four groups are whole and the bus is full of them and of the beginnings of others."""
    settings = settings_for(tmp_path, num_steps=3, samples_per_step=4, **{"bus.max_queued_samples": 16})
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await change(link, {"samples_per_step": 16})
            offering = asyncio.ensure_future(_offer_interleaved(link, 12))
            assert (await end_of(link)).reason is EndReason.FINISHED
            offering.cancel()
        await task
    assert [len(record.samples) for record in journal(tmp_path, StepBegan)] == [4, 16, 16]


async def _offer_interleaved(link: Link, num_groups: int) -> None:
    """The first group whole, then seat by seat over the others: the bus fills before sixteen samples are of whole groups."""
    await offer(link, 0, 1)
    await offer_seats(link, num_groups)


async def offer_seats(link: Link, num_groups: int) -> None:
    for first in range(1, num_groups, 4):
        for seat in range(4):
            for number in range(first, min(first + 4, num_groups)):
                await link.offer(
                    make_sample(
                        prompt=(4, 7, 13, 14),
                        reply=[3, 5, 7],
                        logprobs=[-1.0, -1.0, -1.0],
                        reward=float(seat % 2),
                        group_id=f"g{number}",
                        seat=seat,
                        group_size=4,
                    )
                )


async def test_another_interval_holds_from_the_version_that_was_answered_and_the_last_step_is_published(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, num_steps=7, trigger_parameter_sync_step=2)
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await offer(link, 0, 2)
            await status_where(link, lambda status: status.step == 1)
            changed = await change(link, {"trigger_parameter_sync_step": 4})
            assert since(changed, "trigger_parameter_sync_step") == "policy version 1"
            await offer(link, 2, 14)
            final = await status_where(link, lambda status: status.step == 7 and status.policy_version == 3)
            assert final.consumed_seats == 7 * 8
            await end_of(link)
        await task
    assert [(record.policy_version, record.step) for record in journal(tmp_path, VersionPublished)] == [
        (0, 0),
        (1, 2),
        (2, 4),
        (3, 7),
    ]


async def test_checkpoints_begin_and_end_with_their_cadence(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, num_steps=6)
    async with daemon(settings) as task:
        async with rollouter(settings) as link:
            await offer(link, 0, 2)
            await status_where(link, lambda status: status.step == 1)
            await change(link, {"checkpoint.every_steps": 2, "checkpoint.keep": 1})
            await offer(link, 2, 8)
            await status_where(link, lambda status: status.step == 4 and "step 5" in status.detail)
            await change(link, {"checkpoint.every_steps": 0})
            await offer(link, 8, 12)
            await end_of(link)
        await task
    assert [record.step for record in journal(tmp_path, Saved)] == [2, 4]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_4"]


async def test_what_is_trained_after_checkpoints_were_ended_stays_with_the_producers_over_a_restart(tmp_path: Path) -> None:
    """The run can still be taken up from its last checkpoint, whoever restarts how often."""
    settings = settings_for(tmp_path, num_steps=6, **{"checkpoint.every_steps": 1, "checkpoint.resume": "auto"})
    async with daemon(settings) as task, rollouter(settings) as link:
        await offer(link, 0, 2)
        await status_where(link, lambda status: status.step == 1 and "step 2" in status.detail)
        await change(link, {"checkpoint.every_steps": 0})
        await offer(link, 2, 4)
        await status_where(link, lambda status: status.step == 2)
        task.cancel()
    for last_step in (3, 4):
        async with daemon(settings) as task, rollouter(settings) as link:
            await offer(link, 2 * last_step - 2, 2 * last_step)
            await status_where(link, lambda status, until=last_step: status.step == until)
            assert link.producer_statistics().committed == 8
            task.cancel()
    taken = [(record.step, record.replayed) for record in journal(tmp_path, StepTrained)]
    assert taken == [(1, False), (2, False), (2, True), (3, False), (2, True), (3, True), (4, False)]


async def test_steps_taken_again_keep_their_options_and_later_ones_have_what_was_set_since(tmp_path: Path) -> None:
    """Step 2 is in no checkpoint; after it the rate was changed once more, and the restart is given a third one."""
    settings = settings_for(tmp_path, **{"checkpoint.every_steps": 1, "checkpoint.resume": "auto"})
    async with daemon(settings) as task, rollouter(settings) as link:
        await offer(link, 0, 2)
        await status_where(link, lambda status: status.step == 1 and "step 2" in status.detail)
        await change(link, {"checkpoint.every_steps": 100, "trainer.learning_rate": 2e-3, "samples_per_step": 4})
        await offer(link, 2, 3)
        await status_where(link, lambda status: status.step == 2)
        await change(link, {"trainer.learning_rate": 7e-3, "samples_per_step": 8})
        task.cancel()
    again = settings_for(tmp_path, **{"checkpoint.resume": "auto", "trainer.learning_rate": 9e-3})
    async with daemon(again) as task:
        async with rollouter(again) as link:
            clipped = await change(link, {"trainer.clip_low": 0.1})
            assert (clipped.revision, since(clipped, "trainer.clip_low")) == (3, "step 3")
            await offer(link, 3, 7)
            await end_of(link)
        await task
    taken = [
        (record.step, len(record.samples), record.options["trainer.learning_rate"], record.options["trainer.clip_low"])
        for record in journal(tmp_path, StepBegan)
    ]
    assert taken == [(1, 8, 1e-3, 0.2), (2, 4, 2e-3, 0.2), (2, 4, 2e-3, 0.2), (3, 8, 7e-3, 0.1), (4, 8, 7e-3, 0.1)]


async def test_changes_at_any_moment_leave_both_ends_alike(tmp_path: Path) -> None:
    """Random changes and reverts, many of them refused, during steps, publications, checkpoints and over two restarts of the
    trainer: revisions are dense, the tree is valid, and the rollouter's view is the trainer's."""
    draw = random.Random(5)
    values = {"num_steps": 40, "checkpoint.every_steps": 2, "checkpoint.resume": "auto"}
    settings = settings_for(tmp_path, **values)
    view = LiveView(settings)
    next_group = 0
    for life in range(3):
        async with daemon(settings) as task, rollouter(settings) as link:
            following = asyncio.ensure_future(_follow(link, view))
            for _ in range(12):
                await _disturb(link, draw)
                await offer(link, next_group, next_group + draw.randrange(3))
                next_group += 3
                await asyncio.sleep(0)
            trainer = await _at_rest(link, view)
            assert view.revision == trainer.revision
            assert live_values(view.settings) == trainer.values
            following.cancel()
            task.cancel()
        path = next((tmp_path / "journal").glob("*/settings.log"))
        kept = read_settings_log(path)
        assert {one.revision for one in kept} == set(range(1, trainer.revision + 1)), f"in life {life}"
        assert Settings.model_validate(view.settings.model_dump()) == view.settings
    assert view.revision > 10
    assert [record.step for record in journal(tmp_path, StepTrained)], "it trained all the while"


async def _follow(link: Link, view: LiveView) -> None:
    async for state in link.watch("settings", LiveSettingsState):
        view.take(state)


async def _at_rest(link: Link, view: LiveView) -> LiveSettingsState:
    marker = await change(link, {"evaluation.timeout_s": 1.0 + view.revision})
    async with asyncio.timeout(HANG_S):
        async for state in link.watch("settings", LiveSettingsState):
            if state.revision >= marker.revision and view.revision == state.revision:
                return state
            await asyncio.sleep(0)
    raise AssertionError("the bus closed first")


async def _disturb(link: Link, draw: random.Random) -> None:
    if draw.random() < 0.2:
        request = RevertSettings(to_revision=draw.randrange(12), author="eve")
        await link.request("settings.revert", request, SettingsChanged)
        return
    choices: dict[str, list[Any]] = {
        "samples_per_step": [4, 8, 12, 7],
        "trigger_parameter_sync_step": [1, 2, 3, 99],
        "staleness_threshold": [0, 0.5, -1],
        "trainer.learning_rate": [0.0, 1e-3, "fast"],
        "checkpoint.every_steps": [1, 2, 0],
        "max_staleness": [None, 1, 5],
        "on_failed_seat": ["drop", "refill", "train_survivors"],
        "min_survivors": [2, 4, 5],
        "rollouter.max_concurrent_rollouts": [2, 4, 64],
    }
    keys = draw.sample(sorted(choices), draw.randrange(1, 4))
    await change(link, {key: draw.choice(choices[key]) for key in keys})
