"""Carries out what `trainer.auto_staleness` decides: through the same channel as anybody's change, in the name of `auto`.

Consumes each step's summary; waits for a decision; produces changes of `staleness_threshold`, which stand in the history and
can be reverted like any other. Ends when cancelled. A change that somebody else overtook, or that is refused, is logged and
let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import structlog

from configs.auto import AUTHOR, THRESHOLD
from configs.errors import RevisionMoved
from configs.live import LiveSettings
from sample_bus.errors import JournalError
from sample_bus.messages import SettingsChanged, StepSummary
from trainer.auto_staleness import Move, Observation, State, observe
from trainer.clock import Activity, ActivityClock

log = structlog.get_logger()


class Channel(Protocol):
    """Where live settings are changed (`trainer.live_settings.LiveSettingsTopic`)."""

    async def change(
        self, values: Mapping[str, Any], *, author: str, expected_revision: int | None = None
    ) -> SettingsChanged: ...


class AutomaticStaleness:
    """Belongs to the trainer's event loop."""

    def __init__(self, live: LiveSettings, clock: ActivityClock, channel: Channel) -> None:
        self._live = live
        self._clock = clock
        self._channel = channel
        self._state = State()
        self._seen_s = clock.seconds()
        self._decided: tuple[Move, int] | None = None
        self._wake = asyncio.Event()

    def take_step(self, summary: StepSummary, *, replayed: bool) -> None:
        """An optimizer step was taken. One that is taken again after a restart waited for nobody: it shows nothing."""
        before, self._seen_s = self._seen_s, self._clock.seconds()
        if replayed:
            return
        settings = self._live.settings
        seen = Observation(
            waiting_s=self._seen_s[Activity.WAITING] - before[Activity.WAITING],
            elapsed_s=sum(self._seen_s.values()) - sum(before.values()),
            effective_sample_size=summary.effective_sample_size,
        )
        self._state, move = observe(
            self._state,
            seen,
            threshold=settings.staleness_threshold,
            steps_per_period=settings.trigger_parameter_sync_step,
            settings=settings.auto_staleness,
        )
        if move is not None:
            self._decided = move, self._live.revision
            self._wake.set()

    async def run(self) -> None:
        """Carry decisions out until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._decided is not None:
                (move, revision), self._decided = self._decided, None
                await self._set(move, revision)

    async def _set(self, move: Move, revision: int) -> None:
        words = {"to": move.threshold, "why": move.why}
        try:
            answer = await self._channel.change({THRESHOLD: move.threshold}, author=AUTHOR, expected_revision=revision)
        except RevisionMoved as error:
            log.info("automatic staleness was overtaken", **words, by=str(error))
        except JournalError as error:
            log.warning("automatic staleness cannot be noted, it stays as it is", **words, problem=str(error))
        else:
            if answer.refused:
                log.warning("automatic staleness was refused", **words, refused="; ".join(answer.refused))
            else:
                log.info("automatic staleness moved", **words, revision=answer.revision)
