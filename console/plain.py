"""A run as plain lines: one a step, one a change of what the daemons do, one for each reason for which attempts begin to fail
(again when they have doubled), one for each piece of advice, and one every few seconds of waiting."""

from __future__ import annotations

from typing import TextIO

from console.picture import Picture
from console.words import evaluation_text, failure_count, failure_text, number, rollouter_text, shares_text, trainer_text

QUIET_S = 10.0
"""After this long without a line, one says what is waited for."""
_SECOND_TELLING = 8
"""Failures of one reason of which a second line tells; the next ones tell of twice as many as the one before."""


class PlainDisplay:
    """Writes to `out`, a line at a time."""

    refresh_interval_s = 0.2

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last_step = 0
        self._num_evaluations = 0
        self._said: dict[str, str] = {}
        self._advised: set[str] = set()
        self._failures_said: dict[tuple[str, bool], int] = {}
        self._spoke_at: float | None = None

    def start(self) -> None:
        """Nothing to prepare."""

    def show(self, picture: Picture, now: float) -> None:
        self._spoke_at = picture.started_at if self._spoke_at is None else self._spoke_at
        self._states(picture, now)
        self._failures(picture, now)
        for result in picture.evaluations[self._num_evaluations :]:
            self._line(picture, now, f"held-out accuracy {evaluation_text(result)}")
        self._num_evaluations = len(picture.evaluations)
        for step in sorted(known for known in picture.steps if known > self._last_step):
            self._line(picture, now, step_line(picture, step, now))
            self._last_step = step
        for words in picture.advice:
            if words not in self._advised:
                self._advised.add(words)
                self._line(picture, now, f"advice: {words}")
        if now - self._spoke_at >= QUIET_S and not picture.is_stopping:
            self._line(picture, now, f"trainer: {trainer_text(picture)}; rollouter: {rollouter_text(picture)}")

    def close(self) -> None:
        self._out.flush()

    def _states(self, picture: Picture, now: float) -> None:
        """A daemon's change of state, before the first step and at the end; between them the steps say enough."""
        if picture.steps and picture.end is None:
            return
        for name, text in (("trainer", trainer_text(picture)), ("rollouter", rollouter_text(picture))):
            state = text.partition(":")[0]
            if self._said.get(name) != state:
                self._said[name] = state
                self._line(picture, now, f"{name}: {text}")

    def _failures(self, picture: Picture, now: float) -> None:
        for note in picture.failures:
            key = (note.reason, note.is_evaluation)
            said = self._failures_said.get(key, 0)
            if note.count < said:  # another process counts from 0
                said = 0
            if note.count >= (max(_SECOND_TELLING, 2 * said) if said else 1):
                self._failures_said[key] = note.count
                self._line(picture, now, f"{failure_count(note)} so far" if said else failure_text(note))

    def _line(self, picture: Picture, now: float, text: str) -> None:
        self._out.write(f"[{now - picture.started_at:6.1f} s] {text}\n")
        self._out.flush()
        self._spoke_at = now


def step_line(picture: Picture, number_of_step: int, now: float) -> str:
    """One step in one line."""
    step = picture.steps[number_of_step]
    rates = picture.rates(now)
    generated = picture.rollouter.generated_tokens_per_s if picture.rollouter else 0.0
    parts = [
        f"step {step.step}/{picture.num_steps}",
        f"version {step.policy_version}",
        f"reward {step.reward_mean:.3f}",
        f"staleness mean {step.staleness_mean:.2f} max {step.staleness_max}",
        f"{number(rates.samples_per_s)} samples/s",
        f"{number(rates.trained_tokens_per_s)} trained tokens/s",
        f"{number(generated)} generated tokens/s",
        f"bus {picture.bus_depth}",
    ]
    shares = shares_text(picture.trainer.shares) if picture.trainer else ""
    return "  ".join([*parts, shares] if shares else parts)
