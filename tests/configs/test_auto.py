"""`staleness_threshold=auto`: what it is short for, and who stops it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.auto import AUTHOR
from configs.errors import ConfigError
from configs.live import LiveSettings
from configs.loader import load
from configs.schema import Settings


def given(*overrides: str, yaml: str = "", directory: Path | None = None) -> Settings:
    config = None
    if directory is not None:
        config = directory / "config.yaml"
        config.write_text(yaml)
    return load(config, overrides, environment={})


def test_auto_is_short_for_enabled_and_leaves_the_threshold_to_begin_with(tmp_path: Path) -> None:
    for settings in (given("staleness_threshold=auto"), given(yaml="staleness_threshold: auto", directory=tmp_path)):
        assert settings.auto_staleness.enabled
        assert settings.staleness_threshold == Settings().staleness_threshold


def test_the_last_word_on_the_threshold_wins(tmp_path: Path) -> None:
    """As for any setting: arguments over YAML, in both directions."""
    settings = given("staleness_threshold=2", yaml="staleness_threshold: auto", directory=tmp_path)
    assert (settings.auto_staleness.enabled, settings.staleness_threshold) == (False, 2.0)
    assert given("staleness_threshold=auto", yaml="staleness_threshold: 2", directory=tmp_path).auto_staleness.enabled


def test_a_first_value_is_given_with_enabled_itself() -> None:
    settings = given("staleness_threshold=2", "auto_staleness.enabled=true")
    assert (settings.auto_staleness.enabled, settings.staleness_threshold) == (True, 2.0)


def test_auto_and_not_enabled_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        given("staleness_threshold=auto", "auto_staleness.enabled=false")


@pytest.mark.parametrize("word", ["Auto", "automatic", "[auto]"])
def test_no_other_word_is_taken(word: str) -> None:
    with pytest.raises(ConfigError, match="staleness_threshold"):
        given(f"staleness_threshold={word}")


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"auto_staleness\.min=3\.0 is above auto_staleness\.max=2\.0"):
        given("auto_staleness.min=3", "auto_staleness.max=2")


def test_more_requests_than_an_engine_decodes_together_are_refused() -> None:
    """Those beyond would wait inside it, unseen."""
    with pytest.raises(ConfigError, match=r"engine\.max_requests=200 is above engine\.max_num_seqs=128"):
        given("engine.max_requests=200")
    live = LiveSettings(given())
    with pytest.raises(ConfigError, match=r"engine\.max_requests=129 is above"):
        changed(live, "ann", engine__max_requests=129)


def changed(live: LiveSettings, author: str, **values: Any) -> dict[str, Any]:
    changes = live.change({key.replace("__", "."): value for key, value in values.items()}, author=author, now=0.0)
    return {change.key: change.new for change in changes}


def test_its_own_moves_leave_it_on() -> None:
    live = LiveSettings(given("staleness_threshold=auto"))
    assert changed(live, AUTHOR, staleness_threshold=1.0) == {"staleness_threshold": 1.0}
    assert live.settings.auto_staleness.enabled


def test_anybody_elses_value_turns_it_off_in_the_same_revision() -> None:
    """Also the value that is in force: whoever sets it wants it to stay."""
    for value in (2.0, Settings().staleness_threshold):
        live = LiveSettings(given("staleness_threshold=auto"))
        assert changed(live, "ann", staleness_threshold=value)["auto_staleness.enabled"] is False
        assert live.revision == 1
        assert live.settings.staleness_threshold == value


def test_it_stays_off_until_somebody_turns_it_on_again() -> None:
    live = LiveSettings(given("staleness_threshold=auto"))
    changed(live, "ann", staleness_threshold=2.0)
    assert changed(live, "ann", staleness_threshold="auto") == {"auto_staleness.enabled": True}
    assert live.settings.staleness_threshold == 2.0, "it begins from what it finds"
    assert changed(live, "bob", staleness_threshold=3.0, auto_staleness__enabled=True) == {"staleness_threshold": 3.0}
    assert live.settings.auto_staleness.enabled, "said with it, it stays on"


def test_other_settings_do_not_turn_it_off() -> None:
    live = LiveSettings(given("staleness_threshold=auto"))
    assert changed(live, "ann", auto_staleness__max=2.0) == {"auto_staleness.max": 2.0}


def test_going_back_before_a_move_of_its_own_turns_it_off() -> None:
    """Else it would make the same move again."""
    live = LiveSettings(given("staleness_threshold=auto"))
    changed(live, AUTHOR, staleness_threshold=1.0)
    live.change(live.values_at(0), author="ann", now=0.0)
    assert (live.settings.staleness_threshold, live.settings.auto_staleness.enabled) == (0.5, False)


def test_going_back_before_somebody_took_over_turns_it_on_again() -> None:
    live = LiveSettings(given("staleness_threshold=auto"))
    changed(live, "ann", staleness_threshold=2.0)
    live.change(live.values_at(0), author="ann", now=0.0)
    assert (live.settings.staleness_threshold, live.settings.auto_staleness.enabled) == (0.5, True)
