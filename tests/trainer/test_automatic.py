"""Automatic staleness on the trainer's own channel: its moves are changes like any other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from structlog.testing import capture_logs

from configs.live import LiveSettings
from configs.loader import load
from sample_bus.messages import (
    AskHistory,
    ChangeSettings,
    EndReason,
    LiveSettingsState,
    RevertSettings,
    SettingsChanged,
    SettingsHistory,
    StepSummary,
)
from sample_bus.settings_log import SettingsLog
from tests.fakes.fake_clock import FakeClock
from tests.fakes.fake_control import FakeControl
from tests.trainer.daemons import daemon, end_of, offer_group, rollouter, settings_for
from trainer.automatic import AutomaticStaleness
from trainer.clock import Activity, ActivityClock
from trainer.live_settings import LiveSettingsTopic, Moment, restore

HANG_S = 10.0


@dataclass(kw_only=True)
class Bench:
    """A trainer's settings, clock and channel, without the training."""

    live: LiveSettings
    control: FakeControl
    automatic: AutomaticStaleness
    clock: ActivityClock
    time: FakeClock
    step: int = 0

    async def take_steps(self, count: int, *, waiting: float, ess: float = 1.0, replayed: bool = False) -> None:
        """Steps of one second each, of which `waiting` is waited for samples."""
        for _ in range(count):
            self.step += 1
            with self.clock.during(Activity.WAITING):
                self.time.advance(waiting)
            with self.clock.during(Activity.TRAINING):
                self.time.advance(1 - waiting)
            self.automatic.take_step(summary(self.step, ess), replayed=replayed)
            for _ in range(5):
                await asyncio.sleep(0)

    async def set(self, author: str, **values: object) -> SettingsChanged:
        change = ChangeSettings(values={key.replace("__", "."): value for key, value in values.items()}, author=author)
        return await self.control.request("settings.set", change, SettingsChanged)

    @property
    def threshold(self) -> float:
        return self.live.settings.staleness_threshold


def summary(step: int, ess: float) -> StepSummary:
    return StepSummary(
        step=step,
        policy_version=step,
        reward_mean=0.0,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        staleness_mean=0.0,
        staleness_max=0,
        mismatch_mean_abs=0.0,
        mismatch_max_abs=0.0,
        importance_mean=1.0,
        effective_sample_size=ess,
        num_samples=8,
        num_tokens=8,
        num_trained_tokens=8,
        step_time_s=1.0,
        finished_at=0.0,
    )


@asynccontextmanager
async def bench(directory: Path, *overrides: str) -> AsyncIterator[Bench]:
    settings = load(None, ["auto_staleness.interval_steps=4", *overrides], environment={})
    live, control, time = LiveSettings(settings), FakeControl(), FakeClock()
    with closing(SettingsLog(directory / "settings.log")) as journal:
        restore(live, journal)
        clock = ActivityClock(time)
        channel = LiveSettingsTopic(control, live, journal, moment=lambda: Moment(next_step=1, next_version=1))
        automatic = AutomaticStaleness(live, clock, channel)
        running = asyncio.create_task(automatic.run())
        try:
            yield Bench(live=live, control=control, automatic=automatic, clock=clock, time=time)
        finally:
            running.cancel()
            await asyncio.wait((running,), timeout=HANG_S)


async def test_a_waiting_trainer_raises_the_threshold_in_the_name_of_auto(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        with capture_logs() as logs:
            await trainer.take_steps(6, waiting=0.5)
        assert trainer.threshold == 0.75
        (change,) = trainer.live.changes
        assert (change.key, change.old, change.new, change.author, change.revision) == (
            "staleness_threshold",
            0.5,
            0.75,
            "auto",
            1,
        )
        (moved,) = [entry for entry in logs if entry["event"] == "automatic staleness moved"]
        assert "waits 50.0%" in moved["why"]
        state = trainer.control.get("settings", LiveSettingsState)
        assert state is not None
        assert state.values["staleness_threshold"] == 0.75
        history = await trainer.control.request("settings.history", AskHistory(), SettingsHistory)
        assert [one.author for one in history.changes] == ["auto"]


async def test_off_by_default_nothing_moves(tmp_path: Path) -> None:
    async with bench(tmp_path) as trainer:
        await trainer.take_steps(50, waiting=0.9, ess=0.1)
        assert trainer.live.revision == 0


async def test_a_humans_change_stops_it_until_it_is_turned_on_again(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        await trainer.take_steps(6, waiting=0.5)
        answer = await trainer.set("ann", staleness_threshold=2.0)
        assert {change.key: change.new for change in answer.changes} == {
            "staleness_threshold": 2.0,
            "auto_staleness.enabled": False,
        }
        await trainer.take_steps(50, waiting=0.9, ess=0.1)
        assert trainer.threshold == 2.0
        await trainer.set("ann", staleness_threshold="auto")
        await trainer.take_steps(8, waiting=0.0, ess=0.1)
        assert trainer.threshold == 1.0


async def test_its_moves_can_be_reverted_and_stay_reverted(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        await trainer.take_steps(6, waiting=0.5)
        await trainer.control.request("settings.revert", RevertSettings(to_revision=0, author="ann"), SettingsChanged)
        await trainer.take_steps(50, waiting=0.5)
        assert trainer.threshold == 0.5


async def test_a_move_that_a_human_overtook_is_let_go(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        await trainer.take_steps(5, waiting=0.5)
        decision = asyncio.create_task(trainer.take_steps(1, waiting=0.5))
        overtaking = asyncio.create_task(trainer.set("ann", staleness_threshold=3.0))
        await asyncio.gather(decision, overtaking)
        assert trainer.threshold == 3.0
        assert trainer.live.changes[-1].author == "ann"


async def test_steps_that_are_taken_again_show_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        await trainer.take_steps(50, waiting=0.9, ess=0.1, replayed=True)
        assert trainer.live.revision == 0


async def test_nobody_else_may_bear_its_name(tmp_path: Path) -> None:
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        answer = await trainer.set("auto", staleness_threshold=2.0)
        assert "trainer's own name" in answer.refused[0]
        assert trainer.live.revision == 0


async def test_it_goes_on_from_where_it_stood_after_a_restart(tmp_path: Path) -> None:
    """Threshold and switch come from the history; what was measured before says nothing any more."""
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        await trainer.take_steps(6, waiting=0.5)
    async with bench(tmp_path, "staleness_threshold=auto") as trainer:
        assert (trainer.threshold, trainer.live.settings.auto_staleness.enabled) == (0.75, True)
        await trainer.take_steps(3, waiting=0.5)
        assert trainer.threshold == 0.75
        await trainer.take_steps(3, waiting=0.5)
        assert trainer.threshold == 1.0


async def test_the_trainer_moves_it_as_it_trains(tmp_path: Path) -> None:
    """The whole daemon: it waits for a rollouter that is slower than it, and its history says what came of that."""
    settings = settings_for(
        tmp_path / "run",
        num_steps=6,
        staleness_threshold="auto",
        **{
            "auto_staleness.interval_steps": 1,
            "auto_staleness.target_waiting_share": 1e-6,
            "auto_staleness.min_effective_sample_size": 1e-6,
        },
    )
    async with daemon(settings), rollouter(settings) as link:
        for number in range(12):
            await offer_group(link, number)
        end = await end_of(link)
        state = link.get("settings", LiveSettingsState)
    assert end.reason is EndReason.FINISHED
    assert state is not None
    assert next((change.key, change.author, change.new) for change in state.changes) == ("staleness_threshold", "auto", 0.75)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["effective_sample_size"] <= 1 for row in rows if row["family"] == "train")
