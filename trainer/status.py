"""What the trainer tells the world about itself: topic `trainer`.

Invariant: the topic follows every change within 100 ms, however often things change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from sample_bus.messages import Counts, EvaluationResult, StepSummary, TrainerState, TrainerStatus
from sample_bus.protocols import Control
from trainer.clock import ActivityClock

_MIN_INTERVAL_S = 0.1


class StatusBoard:
    """Collects what changes and publishes it."""

    def __init__(
        self,
        control: Control,
        clock: ActivityClock,
        *,
        incarnation: str,
        origin_version: int = 0,
        step: int = 0,
        num_steps: int,
        agreed: Mapping[str, Any],
        counts: Callable[[], Counts],
        rollouter: Callable[[], str | None],
        on_step: Callable[[StepSummary, bool], None] = lambda summary, replayed: None,
    ) -> None:
        """`on_step` hears of each step and whether it was taken again."""
        self._control = control
        self._clock = clock
        self._counts = counts
        self._rollouter = rollouter
        self._on_step = on_step
        self._status = TrainerStatus(
            state=TrainerState.STARTING,
            incarnation=incarnation,
            origin_version=origin_version,
            policy_version=origin_version,
            step=step,
            num_steps=num_steps,
            agreed=dict(agreed),
        )
        self._entered_at = time.monotonic()
        self._dirty = asyncio.Event()
        self._dirty.set()

    @property
    def status(self) -> TrainerStatus:
        return self._status

    def set(self, **changes: Any) -> None:
        """Change fields of the status; published soon."""
        self._status = self._status.model_copy(update=changes)
        self._dirty.set()

    def touch(self) -> None:
        """Counts have moved; published soon."""
        self._dirty.set()

    def enter(self, state: TrainerState, detail: str = "") -> None:
        self._entered_at = time.monotonic()
        self.set(state=state, detail=detail)

    def state_age_s(self) -> float:
        """Seconds since the state was entered."""
        return time.monotonic() - self._entered_at

    def add_step(self, summary: StepSummary, *, replayed: bool = False) -> None:
        self.set(last_step=summary, step=summary.step)
        self._on_step(summary, replayed)

    def add_evaluation(self, result: EvaluationResult) -> None:
        self.set(evaluations=(*self._status.evaluations, result)[-100:])

    def advise(self, words: str) -> None:
        """Say it to whoever watches."""
        self.set(advice=(*self._status.advice, words))

    async def run(self) -> None:
        """Publish on change until cancelled."""
        while True:
            await self._dirty.wait()
            await self.flush()
            await asyncio.sleep(_MIN_INTERVAL_S)

    async def flush(self) -> None:
        """Publish now."""
        self._dirty.clear()
        self._status = self._status.model_copy(
            update={"counts": self._counts(), "shares": self._clock.shares(), "rollouter": self._rollouter()}
        )
        await self._control.publish("trainer", self._status)
