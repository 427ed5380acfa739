"""The live settings as the trainer owns them: topic `settings`, requests `settings.set`, `.revert` and `.history`.

Invariant: each change is on disk, logged with old value, new value and author, and published before it is answered; what was
answered is in force in every later process of the run. Nothing is awaited between finding a change valid and putting it in
force, so no two changes meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from configs.auto import AUTHOR
from configs.errors import ConfigError, RevisionMoved
from configs.live import Change, LiveSettings, Proposal
from configs.schema import Scope, Settings
from sample_bus.messages import (
    AskHistory,
    ChangeSettings,
    LiveSettingsState,
    RevertSettings,
    SettingChange,
    SettingsChanged,
    SettingsHistory,
)
from sample_bus.protocols import ControlServer
from sample_bus.settings_log import SettingsLog

log = structlog.get_logger()

_KEPT_CHANGES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where the training stands when a change is made."""

    next_step: int
    """First step whose settings are not taken yet."""
    next_version: int
    """First policy version that is not announced yet."""


def holds_from(scope: Scope, moment: Moment) -> str:
    """From when a change made at `moment` holds, as `headrace set` answers it."""
    match scope:
        case Scope.NEXT_STEP:
            return f"step {moment.next_step}"
        case Scope.NEXT_SYNC:
            return f"policy version {moment.next_version}"
        case Scope.NEXT_ADMISSION | Scope.NEXT_ROLLOUT | Scope.AT_ONCE:
            return scope.value


def restore(live: LiveSettings, journal: SettingsLog) -> None:
    """Take up what earlier processes of the run changed; a value given at this start loses against it, and the log says so.

    Raises JournalError, and ConfigError when the changes do not fit the settings that were given.
    """
    beaten = live.restore(Change(**change.model_dump()) for change in journal.read())
    if live.revision:
        log.info("live settings restored", revision=live.revision, path=str(journal.path))
    for key, (given, in_force) in beaten.items():
        log.warning(
            "a setting given at the start loses against a live change",
            key=key,
            given=given,
            in_force=in_force,
            author=next(change.author for change in reversed(live.changes) if change.key == key),
        )


class LiveSettingsTopic:
    def __init__(
        self,
        control: ControlServer,
        live: LiveSettings,
        journal: SettingsLog,
        *,
        moment: Callable[[], Moment],
        on_change: Callable[[Settings], None] = lambda settings: None,
    ) -> None:
        """`on_change` hears of the settings that are in force now, before anyone else does."""
        self._control = control
        self._live = live
        self._journal = journal
        self._moment = moment
        self._on_change = on_change
        control.handle("settings.set", ChangeSettings, self._set)
        control.handle("settings.revert", RevertSettings, self._revert)
        control.handle("settings.history", AskHistory, self._tell_history)

    async def publish(self) -> None:
        """Tell everyone what is in force."""
        await self._control.publish(
            "settings",
            LiveSettingsState(
                revision=self._live.revision,
                values=self._live.values(),
                changes=_messages(self._live.changes[-_KEPT_CHANGES:]),
            ),
        )

    def tell_what_was_set_otherwise(self, options: Mapping[str, Any]) -> None:
        """A setting given at this start that is not the one of the last step before (`options`): whoever starts it is told."""
        values = self._live.values()
        for key, value in options.items():
            if key in values and values[key] != value:
                log.warning(
                    "a setting had another value when the run was left: it holds for the steps that are taken again only",
                    key=key,
                    then=value,
                    now=values[key],
                )

    async def change(
        self, values: Mapping[str, Any], *, author: str, expected_revision: int | None = None, dry_run: bool = False
    ) -> SettingsChanged:
        """As request `settings.set`. Raises RevisionMoved, JournalError; what is not valid is answered as refused."""
        try:
            proposal = self._live.propose(
                values,
                author=author,
                now=time.time(),
                expected_revision=expected_revision,
                holds_from=lambda scope: holds_from(scope, self._moment()),
            )
        except RevisionMoved:
            raise
        except ConfigError as error:
            log.info("change of settings refused", author=author, why=str(error))
            return SettingsChanged(revision=self._live.revision, refused=tuple(str(error).splitlines()))
        if proposal.changes and not dry_run:
            await self._enforce(proposal)
        return SettingsChanged(revision=self._live.revision, changes=_messages(proposal.changes))

    def _impostor(self, author: str) -> SettingsChanged | None:
        """The answer to a request in the name of the trainer itself: its changes do not come by the bus."""
        if author != AUTHOR:
            return None
        refusal = f"author: got {author!r}, which is the trainer's own name in the history; give another one"
        return SettingsChanged(revision=self._live.revision, refused=(refusal,))

    async def _set(self, request: ChangeSettings) -> SettingsChanged:
        impostor = self._impostor(request.author)
        if impostor is not None:
            return impostor
        return await self.change(
            request.values, author=request.author, expected_revision=request.expected_revision, dry_run=request.dry_run
        )

    async def _revert(self, request: RevertSettings) -> SettingsChanged:
        impostor = self._impostor(request.author)
        if impostor is not None:
            return impostor
        try:
            values = self._live.values_at(request.to_revision)
        except ConfigError as error:
            return SettingsChanged(revision=self._live.revision, refused=(str(error),))
        return await self.change(
            values, author=request.author, expected_revision=request.expected_revision, dry_run=request.dry_run
        )

    async def _tell_history(self, _: AskHistory) -> SettingsHistory:
        return SettingsHistory(changes=_messages(self._live.changes))

    async def _enforce(self, proposal: Proposal) -> None:
        self._journal.write(_messages(proposal.changes))
        self._live.apply(proposal)
        for change in proposal.changes:
            log.info(
                "setting changed",
                key=change.key,
                old=change.old,
                new=change.new,
                author=change.author,
                revision=change.revision,
                holds_from=change.holds_from,
            )
        self._on_change(self._live.settings)
        await self.publish()


def _messages(changes: tuple[Change, ...]) -> tuple[SettingChange, ...]:
    return tuple(SettingChange(**asdict(change)) for change in changes)
