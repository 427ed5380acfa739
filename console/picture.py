"""What is known of a run, put together from the retained topics.

Invariant: pure state; time is an argument, and nothing here waits or draws. Every step that was seen is kept once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

from configs.schema import Settings
from sample_bus.messages import (
    EndOfRun,
    EvaluationResult,
    FailureNote,
    LiveSettingsState,
    RollouterStatus,
    StepSummary,
    TrainerStatus,
)

RATE_WINDOW_S = 20.0


class Phase(StrEnum):
    """The stretches of a run, in order."""

    SET_UP = "set-up"
    MODEL = "model"
    ENGINES = "engine start"
    EVALUATION = "first evaluation"
    TRAINING = "training"
    CLOSING = "closing"


class Rates(NamedTuple):
    samples_per_s: float
    trained_tokens_per_s: float


@dataclass(slots=True, kw_only=True)
class Picture:
    """One run as the console sees it. Times are Unix seconds."""

    name: str
    num_steps: int
    max_queued_samples: int
    started_at: float
    trainer: TrainerStatus | None = None
    rollouter: RollouterStatus | None = None
    live: LiveSettingsState | None = None
    end: EndOfRun | None = None
    steps: dict[int, StepSummary] = field(default_factory=dict)
    pauses: dict[tuple[str, int], float] = field(default_factory=dict)
    """Pause of generation in ms by (engine, policy version)."""
    notes: dict[str, str] = field(default_factory=dict)
    """What a daemon does, from its log, while it is not on the bus yet."""
    has_first_evaluation: bool = True
    """The first version is evaluated before training begins."""
    is_stopping: bool = False
    ended_phases: dict[Phase, float] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, *, now: float) -> Picture:
        """An empty picture of a run that starts now."""
        return cls(
            name=settings.name,
            num_steps=settings.num_steps,
            max_queued_samples=settings.bus.max_queued_samples,
            started_at=now,
            has_first_evaluation=settings.evaluation.at_start,
        )

    def see_connected(self, now: float) -> None:
        """The trainer answers."""
        self.ended_phases.setdefault(Phase.SET_UP, now)

    def see_trainer(self, status: TrainerStatus, now: float) -> None:
        self.trainer = status
        self.notes.pop("trainer", None)
        if status.model_dir is not None:
            self.ended_phases.setdefault(Phase.MODEL, now)
        if status.evaluations and not self.steps:
            self.ended_phases.setdefault(Phase.EVALUATION, now)
        if status.last_step is not None:
            self.add_steps([status.last_step])

    def see_rollouter(self, status: RollouterStatus, now: float) -> None:
        self.rollouter = status
        self.notes.pop("rollouter", None)
        if status.policy_version is not None:
            self.ended_phases.setdefault(Phase.ENGINES, now)
            if not self.has_first_evaluation:
                self.ended_phases.setdefault(Phase.EVALUATION, self.ended_phases[Phase.ENGINES])
        for engine in status.engines:
            if engine.last_pause_ms is not None and engine.policy_version is not None:
                self.pauses[engine.name, engine.policy_version] = engine.last_pause_ms

    def add_steps(self, steps: Iterable[StepSummary]) -> None:
        """Add steps that are not known yet."""
        for step in steps:
            self.steps.setdefault(step.step, step)
            if Phase.ENGINES in self.ended_phases:
                self.ended_phases.setdefault(Phase.EVALUATION, self.ended_phases[Phase.ENGINES])
            if step.step >= self.num_steps:
                self.ended_phases.setdefault(Phase.TRAINING, step.finished_at)

    def see_stopping(self, now: float) -> None:
        """The run is broken off; what it was at ends here."""
        self.is_stopping = True
        order = list(Phase)
        current = max((order.index(phase) for phase in self.ended_phases), default=-1) + 1
        if current < order.index(Phase.CLOSING):
            self.ended_phases[order[current]] = now

    def see_end(self, now: float) -> None:
        """All processes have ended."""
        self.ended_phases.setdefault(Phase.CLOSING, now)

    @property
    def history(self) -> list[StepSummary]:
        """Known steps in order."""
        return [self.steps[number] for number in sorted(self.steps)]

    @property
    def missing_steps(self) -> int:
        """Steps below the newest one that were not seen."""
        return max(self.steps) - min(self.steps) + 1 - len(self.steps) if self.steps else 0

    @property
    def evaluations(self) -> tuple[EvaluationResult, ...]:
        return self.trainer.evaluations if self.trainer else ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What a person should look at."""
        return self.trainer.advice if self.trainer else ()

    @property
    def failures(self) -> tuple[FailureNote, ...]:
        """Why attempts failed, the evaluations' included."""
        return self.rollouter.failures if self.rollouter else ()

    @property
    def versions_published(self) -> int:
        return self.trainer.policy_version - self.trainer.origin_version if self.trainer else 0

    @property
    def bus_depth(self) -> int:
        """Samples that the rollouter handed over and the trainer has neither trained nor dropped."""
        return self.trainer.counts.queued if self.trainer else 0

    @property
    def max_staleness(self) -> int:
        """Highest staleness of any trained sample."""
        return max((step.staleness_max for step in self.steps.values()), default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean over all trained samples."""
        total = sum(step.num_samples for step in self.steps.values())
        return sum(step.staleness_mean * step.num_samples for step in self.steps.values()) / total if total else 0.0

    @property
    def training_started_at(self) -> float:
        """When engines were ready and the first evaluation was over; at the latest when the first known step began."""
        first = self.history[0]
        began = first.finished_at - first.step_time_s
        return min(self.ended_phases.get(Phase.EVALUATION, began), began)

    def rates(self, now: float, window_s: float = RATE_WINDOW_S) -> Rates:
        """Samples and trained tokens a second over the last `window_s`, or since training began if that is later."""
        history = self.history
        if not history:
            return Rates(0.0, 0.0)
        since = max(now - window_s, self.training_started_at)
        recent = [step for step in history if step.finished_at > since]
        seconds = max(now - since, 1e-3)
        return Rates(
            sum(step.num_samples for step in recent) / seconds, sum(step.num_trained_tokens for step in recent) / seconds
        )

    def phase_seconds(self, now: float) -> dict[Phase, float]:
        """How long each phase took; the one that goes on counts up to `now`. Sums to the time from the start to `now`, or
        to the end of the run."""
        return phase_seconds(self.ended_phases, started_at=self.started_at, now=now)


def phase_seconds(ended: dict[Phase, float], *, started_at: float, now: float) -> dict[Phase, float]:
    """Split `now - started_at` among the phases by when each ended. A phase whose end was not seen, before one whose end was,
    took no time."""
    seconds = dict.fromkeys(Phase, 0.0)
    before = started_at
    seen = [phase for phase in Phase if phase in ended]
    for phase in seen:
        until = min(max(ended[phase], before), now)
        seconds[phase] = until - before
        before = until
    rest = [phase for phase in Phase if not seen or list(Phase).index(phase) > list(Phase).index(seen[-1])]
    if rest:
        seconds[rest[0]] += max(0.0, now - before)
    return seconds


def whole_percents(shares: dict[str, float]) -> dict[str, int]:
    """Shares as whole percents that sum to exactly 100 (largest remainders); all 0 when there is nothing to share."""
    total = sum(Fraction(value) for value in shares.values())
    if total <= 0:
        return dict.fromkeys(shares, 0)
    exact = {key: Fraction(value) * 100 / total for key, value in shares.items()}
    whole = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: exact[key] - whole[key], reverse=True)
    for key in by_remainder[: 100 - sum(whole.values())]:
        whole[key] += 1
    return whole
