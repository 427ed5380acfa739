"""A live change is in force at the next look and logged once."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from configs.errors import ConfigError
from configs.live import LiveSettings
from configs.schema import Settings
from rollouter.live import LiveView
from sample_bus.messages import LiveSettingsState, SettingChange


def _state(live: LiveSettings) -> LiveSettingsState:
    changes = tuple(
        SettingChange(
            revision=change.revision,
            key=change.key,
            old=change.old,
            new=change.new,
            author=change.author,
            changed_at=change.changed_at,
            scope=change.scope,
        )
        for change in live.changes
    )
    return LiveSettingsState(revision=live.revision, values=live.values(), changes=changes)


def test_change_is_in_force_and_logged_once_with_its_author() -> None:
    trainer, view = LiveSettings(Settings()), LiveView(Settings())
    view.take(_state(trainer))
    trainer.change({"staleness_threshold": 2.0}, author="ann", now=0.0)
    trainer.change({"sampling.temperature": 0.7}, author="bob", now=0.0)
    with capture_logs() as logs:
        view.take(_state(trainer))
        view.take(_state(trainer))
    assert view.settings.staleness_threshold == 2.0
    assert view.settings.sampling.temperature == 0.7
    assert view.revision == 2
    assert [(entry["event"], entry["key"], entry["old"], entry["new"], entry["author"]) for entry in logs] == [
        ("setting changed", "staleness_threshold", 0.5, 2.0, "ann"),
        ("setting changed", "sampling.temperature", 1.0, 0.7, "bob"),
    ]


def test_values_that_differ_from_the_start_are_taken_and_logged() -> None:
    view = LiveView(Settings())
    with capture_logs() as logs:
        view.take(_state(LiveSettings(Settings(staleness_threshold=3.0))))
    assert view.settings.staleness_threshold == 3.0
    assert [(entry["event"], entry["key"], entry["new"]) for entry in logs] == [
        ("setting taken from the trainer", "staleness_threshold", 3.0)
    ]


def test_state_that_is_not_valid_here_is_refused() -> None:
    """B118"""
    view = LiveView(Settings())
    with pytest.raises(ConfigError, match="stalenes_threshold"):
        view.take(LiveSettingsState(revision=1, values={"stalenes_threshold": 1.0}))
    assert (view.revision, view.settings) == (0, Settings())
