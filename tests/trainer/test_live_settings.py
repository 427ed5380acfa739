"""Changes on a running job: kept before they are answered, refused with a reason, taken back, restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from configs.errors import ConfigError
from configs.live import LiveSettings
from configs.schema import Scope, Settings
from sample_bus.errors import RequestFailed
from sample_bus.messages import (
    AskHistory,
    ChangeSettings,
    LiveSettingsState,
    RevertSettings,
    SettingsChanged,
    SettingsHistory,
)
from sample_bus.settings_log import SettingsLog, read_settings_log
from tests.fakes.fake_control import FakeControl
from trainer.live_settings import LiveSettingsTopic, Moment, holds_from, restore

MOMENT = Moment(next_step=17, next_version=9)


class Owner:
    """A trainer's end of the live settings, with its journal on disk."""

    def __init__(self, path: Path, settings: Settings | None = None) -> None:
        self.control = FakeControl()
        self.live = LiveSettings(settings or Settings())
        self.journal = SettingsLog(path)
        restore(self.live, self.journal)
        self.heard: list[Settings] = []
        self.topic = LiveSettingsTopic(
            self.control, self.live, self.journal, moment=lambda: MOMENT, on_change=self.heard.append
        )

    async def set(self, values: dict[str, Any], **how: Any) -> SettingsChanged:
        return await self.control.request("settings.set", ChangeSettings(values=values, author="ann", **how), SettingsChanged)

    async def revert(self, to_revision: int, **how: Any) -> SettingsChanged:
        request = RevertSettings(to_revision=to_revision, author="eve", **how)
        return await self.control.request("settings.revert", request, SettingsChanged)

    @property
    def state(self) -> LiveSettingsState | None:
        return self.control.get("settings", LiveSettingsState)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.log"


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def owner(settings: Settings | None = None) -> Owner:
        made.append(Owner(path, settings))
        return made[-1]

    yield owner
    for one in made:
        one.journal.close()


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (Scope.NEXT_STEP, "step 17"),
        (Scope.NEXT_SYNC, "policy version 9"),
        (Scope.NEXT_ADMISSION, "next admission"),
        (Scope.NEXT_ROLLOUT, "next rollout"),
        (Scope.AT_ONCE, "at once"),
    ],
)
def test_every_scope_says_from_when_a_change_holds(scope: Scope, words: str) -> None:
    assert holds_from(scope, MOMENT) == words


async def test_a_change_is_kept_in_force_and_published_when_it_is_answered(make: Callable[..., Owner], path: Path) -> None:
    owner = make()
    changed = await owner.set({"trainer.learning_rate": 1e-3, "partial_rollout": "finish", "logging.level": "debug"})
    assert [(change.key, change.new, change.holds_from) for change in changed.changes] == [
        ("trainer.learning_rate", 1e-3, "step 17"),
        ("partial_rollout", "finish", "policy version 9"),
        ("logging.level", "debug", "at once"),
    ]
    assert (changed.revision, changed.refused) == (1, ())
    assert read_settings_log(path) == changed.changes
    assert owner.state is not None
    assert (owner.state.revision, owner.state.changes) == (1, changed.changes)
    assert owner.state.values["partial_rollout"] == "finish"
    assert [settings.partial_rollout for settings in owner.heard] == ["finish"]
    history = await owner.control.request("settings.history", AskHistory(), SettingsHistory)
    assert history.changes == changed.changes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stalenes_threshold": 1}, "unknown setting 'stalenes_threshold'; nearest valid: staleness_threshold"),
        ({"seed": 1}, "seed is fixed for the run"),
        ({"trainer.learning_rate": -1}, "greater than or equal to 0"),
        ({"trainer.clip_high": 1e300}, "less than or equal to"),
        ({"trigger_parameter_sync_step": 0}, "greater than or equal to 1"),
        ({"trigger_parameter_sync_step": 101}, "is above num_steps=100"),
        ({"samples_per_step": "many"}, "valid integer"),
        ({"samples_per_step": 60}, "no multiple of group_size=8 (nearest: 56 or 64)"),
        ({"samples_per_step": 1024}, "bus.max_queued_samples=512 is below samples_per_step=1024"),
        ({"min_survivors": 9}, "min_survivors=9 is above group_size=8"),
        ({"on_stale": "burn"}, "'drop', 'retry'"),
        ({"trainer.normalize_by_std": 3}, "valid boolean"),
        ({"max_staleness": True}, "got True"),
        ({}, "no setting was given"),
    ],
)
async def test_what_is_wrong_is_refused_with_a_reason_and_nothing_of_it_happens(
    values: dict[str, Any], words: str, make: Callable[..., Owner], path: Path
) -> None:
    """B118, B120 for live requests: also what contradicts a setting that is not named."""
    owner = make()
    changed = await owner.set({"staleness_threshold": 2.0, **values} if values else values)
    assert changed.changes == ()
    assert words in "\n".join(changed.refused)
    assert (owner.live.revision, owner.live.settings, owner.heard) == (0, Settings(), [])
    assert read_settings_log(path) == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_and_never_becomes_null_on_its_way(value: float) -> None:
    with pytest.raises(ValidationError, match="expected a finite number"):
        ChangeSettings(values={"rollouter.group_timeout_s": value}, author="ann")


async def test_a_dry_run_says_what_would_happen_and_leaves_everything(make: Callable[..., Owner], path: Path) -> None:
    owner = make()
    would = await owner.set({"samples_per_step": 128, "staleness_threshold": 0.5}, dry_run=True)
    assert [(change.revision, change.key, change.old, change.new) for change in would.changes] == [
        (1, "samples_per_step", 64, 128)
    ]
    assert (would.revision, owner.live.revision, owner.heard, owner.state) == (0, 0, [], None)
    assert read_settings_log(path) == ()
    refused = await owner.set({"samples_per_step": 1000}, dry_run=True)
    assert "bus.max_queued_samples" in refused.refused[0]


async def test_of_two_writers_one_wins_and_the_other_is_told(make: Callable[..., Owner]) -> None:
    owner = make()
    await owner.set({"staleness_threshold": 1.0}, expected_revision=0)
    with pytest.raises(RequestFailed, match="revision 1, expected 0"):
        await owner.set({"staleness_threshold": 2.0}, expected_revision=0)
    with pytest.raises(RequestFailed, match="revision 1, expected 0"):
        await owner.revert(0, expected_revision=0)
    assert owner.live.settings.staleness_threshold == 1.0


async def test_a_revert_is_a_new_revision_with_the_values_of_the_old_one(make: Callable[..., Owner]) -> None:
    owner = make()
    await owner.set({"staleness_threshold": 1.0})
    await owner.set({"staleness_threshold": 2.0, "max_staleness": 4})
    await owner.set({"trainer.learning_rate": 1e-3})
    changed = await owner.revert(1)
    assert {change.key: change.new for change in changed.changes} == {
        "staleness_threshold": 1.0,
        "max_staleness": None,
        "trainer.learning_rate": 1e-5,
    }
    assert (changed.revision, {change.author for change in changed.changes}) == (4, {"eve"})
    assert (await owner.revert(3)).revision == 5
    assert owner.live.settings.max_staleness == 4
    for missing in (-1, 5, 99):
        assert "no revision" in (await owner.revert(missing)).refused[0]


async def test_a_change_that_cannot_be_kept_is_not_made(make: Callable[..., Owner], path: Path) -> None:
    """A full disk: what would be forgotten by the next process is not answered as done."""
    owner = make()
    owner.journal.close()
    with pytest.raises(RequestFailed, match="cannot be written"):
        await owner.set({"staleness_threshold": 1.0})
    assert (owner.live.revision, owner.live.settings, owner.heard) == (0, Settings(), [])
    owner.journal = SettingsLog(path)


async def test_a_restart_restores_every_change_and_the_values_given_then_lose(make: Callable[..., Owner]) -> None:
    before = make()
    await before.set({"staleness_threshold": 2.0, "trainer.learning_rate": 1e-3})
    await before.set({"staleness_threshold": 3.0})
    with capture_logs() as logs:
        after = make(Settings(staleness_threshold=0.25, seed=5))
    assert (after.live.settings.staleness_threshold, after.live.settings.trainer.learning_rate) == (3.0, 1e-3)
    assert after.live.settings.seed == 5
    assert (after.live.revision, after.live.changes) == (2, before.live.changes)
    told = {entry["key"]: (entry["given"], entry["in_force"]) for entry in logs if "given" in entry}
    assert told == {"staleness_threshold": (0.25, 3.0), "trainer.learning_rate": (1e-5, 1e-3)}
    changed = await after.set({"staleness_threshold": 0.0})
    assert (changed.revision, changed.changes[0].old) == (3, 3.0)
    assert (await after.revert(1)).changes[0].new == 2.0


async def test_changes_that_do_not_fit_what_is_given_at_a_restart_are_told_before_anything_starts(
    make: Callable[..., Owner], path: Path
) -> None:
    await make().set({"samples_per_step": 128})
    live, journal = LiveSettings(Settings.model_validate({"bus": {"max_queued_samples": 100}})), SettingsLog(path)
    with pytest.raises(ConfigError, match=r"changed live \(revision 1\).*max_queued_samples=100 is below samples_per_step=128"):
        restore(live, journal)
    journal.close()
