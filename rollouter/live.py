"""The live settings as the rollouter holds them: the trainer's newest state, read at the moment of decision.

Invariant: `settings` is always a valid tree and `revision` names it; each change is logged once, with old and new value and
author.
"""

from __future__ import annotations

import structlog

from configs.live import live_values, with_live
from configs.logs import set_level
from configs.schema import Settings
from sample_bus.messages import LiveSettingsState

log = structlog.get_logger()


class LiveView:
    """Settings in force here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.revision = 0
        self.has_state = False
        """Whether the trainer has said what holds; until then it is what this process was started with."""

    def take(self, state: LiveSettingsState) -> None:
        """Hold `state` from now on. Raises ConfigError when it is not valid here."""
        before = live_values(self.settings)
        self.settings = with_live(self.settings, state.values)
        after = live_values(self.settings)
        unexplained = {key for key in after if after[key] != before[key]}
        for change in state.changes:
            if self.has_state and change.revision > self.revision:
                unexplained.discard(change.key)
                log.info(
                    "setting changed",
                    key=change.key,
                    old=change.old,
                    new=change.new,
                    author=change.author,
                    revision=change.revision,
                    holds_from=change.holds_from or change.scope,
                )
        for key in sorted(unexplained):
            log.info("setting taken from the trainer", key=key, old=before[key], new=after[key], revision=state.revision)
        if after["logging.level"] != before["logging.level"]:
            set_level(self.settings.logging.level)
        self.has_state = True
        self.revision = state.revision
