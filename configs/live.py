"""Settings that change while the run goes on.

Invariant: at every revision the whole tree is valid. A change is all or nothing, bears its author and moves the revision by
one; two writers at once: one wins, the other is told. Revisions are dense: the changes of each lie in the history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.auto import spelled_out, with_pause
from configs.errors import ConfigError, RevisionMoved
from configs.keys import leaves, live_keys
from configs.loader import dump, unknown_key, validate
from configs.schema import Scope, Settings


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
    """From when it holds, in general (`configs.schema.Scope`)."""
    holds_from: str = ""
    """The step, version or event from which it holds, such as `step 17`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A change that was found valid and is not in force yet."""

    settings: Settings
    changes: tuple[Change, ...]
    """None of them when the values are those in force: then there is nothing to apply."""


def _by_scope(scope: Scope) -> str:
    return scope.value


class LiveSettings:
    """The settings in force, their revision and the changes so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.revision = 0
        self.changes: tuple[Change, ...] = ()

    def values(self) -> dict[str, Any]:
        """Every live key's value."""
        return live_values(self.settings)

    def propose(
        self,
        values: Mapping[str, Any],
        *,
        author: str,
        now: float,
        expected_revision: int | None = None,
        holds_from: Callable[[Scope], str] = _by_scope,
    ) -> Proposal:
        """What all of `values` would change; nothing does yet.

        Raises ConfigError: nothing given, an unknown or fixed key, an invalid value; RevisionMoved.
        """
        self._expect(expected_revision)
        if not values:
            raise ConfigError("no setting was given")
        if not author:
            raise ConfigError("a change needs an author")
        values = with_pause(values, author=author, enabled=self.settings.auto_staleness.enabled)
        changed = with_live(self.settings, values)
        old, new = live_values(self.settings), live_values(changed)
        changes = tuple(
            Change(
                revision=self.revision + 1,
                key=key,
                old=old[key],
                new=new[key],
                author=author,
                changed_at=now,
                scope=leaves()[key].scope or "",
                holds_from=holds_from(Scope(leaves()[key].scope or "")),
            )
            for key in values
            if old[key] != new[key]
        )
        return Proposal(settings=changed, changes=changes)

    def apply(self, proposal: Proposal) -> None:
        """Put what was proposed under the present revision in force; one without changes moves nothing."""
        if not proposal.changes:
            return
        revision = proposal.changes[0].revision
        assert revision == self.revision + 1, f"a proposal for revision {revision} is applied at revision {self.revision}"
        self.settings = proposal.settings
        self.revision = revision
        self.changes = (*self.changes, *proposal.changes)

    def change(
        self, values: Mapping[str, Any], *, author: str, now: float, expected_revision: int | None = None
    ) -> tuple[Change, ...]:
        """Propose and apply. Raises ConfigError, RevisionMoved."""
        proposal = self.propose(values, author=author, now=now, expected_revision=expected_revision)
        self.apply(proposal)
        return proposal.changes

    def values_at(self, revision: int) -> dict[str, Any]:
        """What to set to have the values of `revision` again: every key that was changed since, as it was then.

        Raises ConfigError when there is no such revision before the present one.
        """
        if not 0 <= revision < self.revision:
            raise ConfigError(f"there is no revision {revision} to go back to: settings are at revision {self.revision}")
        values = {change.key: change.old for change in reversed(self.changes) if change.revision > revision}
        return {key: value for key, value in values.items() if key in live_keys()}

    def restore(self, changes: Iterable[Change]) -> dict[str, tuple[Any, Any]]:
        """Take up the history of an earlier process, oldest first: its values win over those given to this one. Returns each
        key whose given value loses, with (given, in force).

        Raises ConfigError when its values do not fit the settings that cannot change.
        """
        assert self.revision == 0, f"settings are restored at revision {self.revision}, not before the first change"
        changes = tuple(changes)
        given = live_values(self.settings)
        values = {change.key: change.new for change in changes if change.key in given}
        if not changes:
            return {}
        try:
            self.settings = with_live(self.settings, values)
        except ConfigError as error:
            raise ConfigError(
                f"settings that were changed live (revision {changes[-1].revision}) do not fit those given now: "
                f"{'; '.join(str(error).splitlines())}"
            ) from error
        self.revision = changes[-1].revision
        self.changes = changes
        now = live_values(self.settings)
        return {key: (given[key], now[key]) for key in values if given[key] != now[key]}

    def _expect(self, revision: int | None) -> None:
        if revision is not None and revision != self.revision:
            raise RevisionMoved(f"settings are at revision {self.revision}, expected {revision}: someone else changed them")


def live_values(settings: Settings) -> dict[str, Any]:
    """Every live key's value in `settings`."""
    values = dump(settings)
    return {key: values[key] for key in live_keys()}


def with_live(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`settings` with live `values` in force. Raises ConfigError, one line per problem."""
    values = spelled_out(values)
    problems = []
    for key, value in values.items():
        if key not in leaves():
            problems.append(unknown_key(key, "set", live_keys()))
        elif leaves()[key].scope is None:
            problems.append(f"set: {key} is fixed for the run; `headrace settings` marks those that are live")
        elif isinstance(value, bool) and "bool" not in leaves()[key].type_text:
            problems.append(f"set: {key}: got {value!r}, expected {leaves()[key].type_text}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"set: {key}: got {value!r}, expected a finite number")
    if problems:
        raise ConfigError("\n".join(problems))
    return validate({**dump(settings), **values}, dict.fromkeys(values, "set"))
