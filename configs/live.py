"""Settings that change while the run goes on.

Invariant: at every revision the whole tree is valid. A change is all or nothing, bears its author and moves the revision by
one; two writers at once: one wins, the other is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.keys import leaves, live_keys
from configs.loader import dump, unknown_key, validate
from configs.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key's change."""

    revision: int
    key: str
    old: Any
    new: Any
    author: str
    changed_at: float
    """Unix seconds."""
    scope: str
    """From when it holds."""


class LiveSettings:
    """The settings in force, their revision and the changes so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.revision = 0
        self.changes: tuple[Change, ...] = ()

    def values(self) -> dict[str, Any]:
        """Every live key's value."""
        return live_values(self.settings)

    def change(
        self, values: Mapping[str, Any], *, author: str, now: float, expected_revision: int | None = None
    ) -> tuple[Change, ...]:
        """Apply all of `values` or none; afterwards `settings` holds them and `revision` has moved by one if anything differs.

        Raises ConfigError: nothing given, an unknown or fixed key, an invalid value, a revision that has moved.
        """
        if expected_revision is not None and expected_revision != self.revision:
            raise ConfigError(
                f"settings are at revision {self.revision}, expected {expected_revision}: someone else changed them"
            )
        if not values:
            raise ConfigError("no setting was given")
        if not author:
            raise ConfigError("a change needs an author")
        changed = with_live(self.settings, values)
        old, new = live_values(self.settings), live_values(changed)
        moved = [key for key in values if old[key] != new[key]]
        if not moved:
            return ()
        changes = tuple(
            Change(
                revision=self.revision + 1,
                key=key,
                old=old[key],
                new=new[key],
                author=author,
                changed_at=now,
                scope=leaves()[key].scope or "",
            )
            for key in moved
        )
        self.settings = changed
        self.revision += 1
        self.changes = (*self.changes, *changes)
        return changes


def live_values(settings: Settings) -> dict[str, Any]:
    """Every live key's value in `settings`."""
    values = dump(settings)
    return {key: values[key] for key in live_keys()}


def with_live(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`settings` with live `values` in force. Raises ConfigError, one line per problem."""
    problems = []
    for key, value in values.items():
        if key not in leaves():
            problems.append(unknown_key(key, "set", live_keys()))
        elif leaves()[key].scope is None:
            problems.append(f"set: {key} is fixed for the run; live settings are {', '.join(live_keys())}")
        elif isinstance(value, bool) and "bool" not in leaves()[key].type_text:
            problems.append(f"set: {key}: got {value!r}, expected {leaves()[key].type_text}")
    if problems:
        raise ConfigError("\n".join(problems))
    return validate({**dump(settings), **values}, dict.fromkeys(values, "set"))
