"""Topic `settings` and request `settings.set`: the live settings as the trainer owns them.

Invariant: each change is logged with old value, new value and author, and published before it is answered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import structlog

from configs.live import LiveSettings
from sample_bus.messages import ChangeSettings, LiveSettingsState, SettingChange, SettingsChanged
from sample_bus.protocols import ControlServer

log = structlog.get_logger()

_KEPT_CHANGES = 100


class LiveSettingsTopic:
    def __init__(self, control: ControlServer, live: LiveSettings) -> None:
        self._control = control
        self._live = live
        control.handle("settings.set", ChangeSettings, self._change)

    async def publish(self) -> None:
        """Tell everyone what is in force."""
        await self._control.publish(
            "settings",
            LiveSettingsState(
                revision=self._live.revision,
                values=self._live.values(),
                changes=tuple(SettingChange(**asdict(change)) for change in self._live.changes[-_KEPT_CHANGES:]),
            ),
        )

    def tell_what_was_set_otherwise(self, options: Mapping[str, Any]) -> None:
        """Live changes end with the process that took them: whoever restarts it is told which, from the `options` of the last
        step before."""
        values = self._live.values()
        for key, value in options.items():
            if key in values and values[key] != value:
                log.warning(
                    "a setting had another value when the run was left: it holds for the steps that are taken again only",
                    key=key,
                    then=value,
                    now=values[key],
                )

    async def _change(self, request: ChangeSettings) -> SettingsChanged:
        changes = self._live.change(
            request.values, author=request.author, now=time.time(), expected_revision=request.expected_revision
        )
        for change in changes:
            log.info(
                "setting changed",
                key=change.key,
                old=change.old,
                new=change.new,
                author=change.author,
                revision=change.revision,
                scope=change.scope,
            )
        await self.publish()
        return SettingsChanged(
            revision=self._live.revision, changes=tuple(SettingChange(**asdict(change)) for change in changes)
        )
