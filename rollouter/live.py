"""The live settings as the rollouter holds them: the trainer's newest state, read at the moment of decision.

Invariant: `settings` is always a valid tree and `revision` names it; each change is logged once, with old and new value and author.
"""

from __future__ import annotations

import structlog

from configs.live import with_live
from configs.schema import Settings
from sample_bus.messages import LiveSettingsState

log = structlog.get_logger()


class LiveView:
    """Settings in force here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.revision = 0
        self._incarnation_seen = False

    def take(self, state: LiveSettingsState) -> bool:
        """Hold `state` from now on; True if any value changed. Raises ConfigError when it is not valid here."""
        before = self.settings
        self.settings = with_live(self.settings, state.values)
        if self._incarnation_seen:
            for change in state.changes:
                if change.revision > self.revision:
                    log.info(
                        "setting changed",
                        key=change.key,
                        old=change.old,
                        new=change.new,
                        author=change.author,
                        revision=change.revision,
                        holds_from=change.scope,
                    )
        self._incarnation_seen = True
        self.revision = state.revision
        return self.settings != before
