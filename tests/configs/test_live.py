"""Live changes are all or nothing, validated against the whole tree, and bear their author."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.keys import leaves, listing, live_keys
from configs.live import LiveSettings, live_values, with_live
from configs.schema import Settings


def test_change_is_in_force_with_old_new_author_and_scope() -> None:
    live = LiveSettings(Settings())
    (change,) = live.change({"staleness_threshold": 0}, author="ann", now=12.0)
    assert (change.old, change.new, change.author, change.revision, change.changed_at) == (0.5, 0.0, "ann", 1, 12.0)
    assert change.scope == "next admission"
    assert live.settings.staleness_threshold == 0
    assert live.revision == 1


def test_setting_the_same_value_moves_nothing() -> None:
    live = LiveSettings(Settings())
    assert live.change({"staleness_threshold": 0.5}, author="ann", now=0.0) == ()
    assert live.revision == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stalenes_threshold": 1}, "nearest valid: staleness_threshold"),
        ({"stale": 1}, "nearest valid: on_stale"),
        ({"seed": 1}, "seed is fixed for the run"),
        ({"staleness_threshold": math.nan}, "finite"),
        ({"staleness_threshold": math.inf}, "finite"),
        ({"staleness_threshold": -1}, "greater than or equal to 0"),
        ({"staleness_threshold": 1e300}, "less than or equal to"),
        ({"staleness_threshold": True}, "got True"),
        ({"staleness_threshold": [1]}, "valid number"),
        ({"staleness_threshold": None}, "valid number"),
        ({"rollouter.max_concurrent_rollouts": 4}, "no group could ever start"),
        ({}, "no setting was given"),
    ],
)
def test_bad_change_is_refused_and_changes_nothing(values: dict[str, Any], words: str) -> None:
    """B118: also for live requests."""
    live = LiveSettings(Settings())
    with pytest.raises(ConfigError, match=words):
        live.change({"trainer.learning_rate": 1e-3, **values} if values else values, author="ann", now=0.0)
    assert live.revision == 0
    assert live.settings == Settings()


def test_of_two_writers_one_wins_and_the_other_is_told() -> None:
    live = LiveSettings(Settings())
    live.change({"staleness_threshold": 1}, author="ann", now=0.0, expected_revision=0)
    with pytest.raises(ConfigError, match="revision 1, expected 0"):
        live.change({"staleness_threshold": 2}, author="bob", now=0.0, expected_revision=0)
    assert live.settings.staleness_threshold == 1


@given(
    st.dictionaries(
        st.sampled_from(sorted(leaves())), st.one_of(st.integers(-3, 10**7), st.floats(), st.text(max_size=3), st.none())
    )
)
def test_whatever_is_asked_the_tree_stays_valid(values: dict[str, Any]) -> None:
    live = LiveSettings(Settings())
    try:
        live.change(values, author="x", now=0.0)
    except ConfigError:
        assert live.settings == Settings()
    assert with_live(Settings(), live_values(live.settings)) == live.settings
    assert set(live.values()) == set(live_keys())


_CHOICES: dict[str, list[Any]] = {
    "staleness_threshold": [0.0, 0.5, 4.0],
    "samples_per_step": [8, 64, 100, 512, 1024],
    "trigger_parameter_sync_step": [1, 4, 101],
    "max_staleness": [None, 0, 3],
    "min_survivors": [2, 8, 9],
    "rollouter.max_concurrent_rollouts": [4, 8, 256],
    "trainer.learning_rate": [0.0, 1e-3, math.nan],
    "logging.level": ["debug", "info", "loud"],
}
_SOME = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in _CHOICES.items()})


@given(st.lists(st.one_of(_SOME, st.integers(-1, 12)), max_size=12), st.integers(0, 12))
def test_any_series_of_changes_reverts_and_restarts_leaves_dense_revisions_and_a_valid_tree(
    moves: list[dict[str, Any] | int], restart_after: int
) -> None:
    """A number is a revert to that revision; somewhere the process is another one, started with other values."""
    live, seen = LiveSettings(Settings()), [live_values(Settings())]
    for number, move in enumerate(moves):
        if number == restart_after:
            restarted = LiveSettings(
                Settings(staleness_threshold=3.25) if "staleness_threshold" in _changed(live) else Settings()
            )
            restarted.restore(live.changes)
            assert (restarted.settings, restarted.revision) == (live.settings, live.revision)
            live = restarted
        before = live.settings
        try:
            values = live.values_at(move) if isinstance(move, int) else move
            changes = live.change(values, author="x", now=0.0)
        except ConfigError:
            assert live.settings == before
            continue
        if changes:
            seen.append(live_values(live.settings))
        if isinstance(move, int):
            assert live_values(live.settings) == seen[move]
        assert len(seen) == live.revision + 1
    assert [change.revision for change in live.changes] == sorted(change.revision for change in live.changes)
    assert {change.revision for change in live.changes} == set(range(1, live.revision + 1))
    assert Settings.model_validate(live.settings.model_dump()) == live.settings


def _changed(live: LiveSettings) -> set[str]:
    return {change.key for change in live.changes}


def test_every_key_says_whether_it_is_live_and_from_when() -> None:
    lines = [line for line in listing().splitlines() if not line.startswith("   ")]
    assert len(lines) == len(leaves())
    for line, leaf in zip(lines, leaves().values(), strict=True):
        assert line.endswith(f"[live: {leaf.scope}]" if leaf.scope else "[fixed for the run]")


@pytest.mark.parametrize("key", live_keys())
@pytest.mark.parametrize("value", [10**30, -(10**30), 1e308, -1e308, math.nan, math.inf, [], {}, "", "x" * 10_000])
def test_no_live_setting_takes_what_no_run_could_mean(key: str, value: Any) -> None:
    """B118: huge, negative, no number, infinite, of another type: each setting refuses it by itself, before it is sent."""
    with pytest.raises(ConfigError, match=rf"^set: {re.escape(key)}"):
        with_live(Settings(), {key: value})
