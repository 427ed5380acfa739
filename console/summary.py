"""The end of a run, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from console.ledger import books_line
from console.picture import Picture
from console.words import duration, evaluation_text, failure_text, number, shares_text
from sample_bus.errors import JournalError
from sample_bus.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where a run's files are."""

    run_dir: Path
    png: Path | None

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"


def summary(picture: Picture, files: Files, *, headline: str, now: float) -> str:
    """What the run did; a few aligned lines."""
    rows = [
        *_learning(picture),
        *_books(picture),
        *(("advice" if index == 0 else "", words) for index, words in enumerate(picture.advice)),
        *(("failures" if index == 0 else "", failure_text(note)) for index, note in enumerate(picture.failures)),
        *_ledger(picture, files.run_dir),
        ("wall time", _phases(picture, now)),
        *_files(files),
    ]
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join([headline, *(f"  {label:<{width}}{text}" for label, text in rows)])


def ledger_line(picture: Picture) -> str | None:
    """The ledger by what the daemons said last; None while a side has not spoken."""
    if picture.trainer is None or picture.rollouter is None:
        return None
    return Ledger(rollouts=picture.rollouter.counts, samples=picture.trainer.counts).line()


def _learning(picture: Picture) -> list[tuple[str, str]]:
    rows = []
    evaluations = picture.evaluations
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        gain = round(100 * (last.accuracy - first.accuracy))
        rows.append(("held-out accuracy", f"{evaluation_text(first)} → {evaluation_text(last)}: {gain:+d} points"))
    elif evaluations:
        rows.append(("held-out accuracy", evaluation_text(evaluations[0])))
    history = picture.history
    if history:
        tail = history[-5:]
        recent = sum(step.reward_mean for step in tail) / len(tail)
        rows.append(("reward", f"{history[0].reward_mean:.3f} (first step) → {recent:.3f} (last {len(tail)} steps)"))
    return rows


def _books(picture: Picture) -> list[tuple[str, str]]:
    history = picture.history
    samples = sum(step.num_samples for step in history)
    tokens = sum(step.num_trained_tokens for step in history)
    rows = [
        ("steps", f"{history[-1].step if history else 0} of {picture.num_steps}"),
        ("samples trained", f"{samples:,} ({tokens:,} trained tokens)"),
        ("versions published", f"{picture.versions_published}"),
    ]
    if history:
        span = max(history[-1].finished_at - picture.training_started_at, 1e-3)
        rows.append(("speed", f"{number(samples / span)} samples/s, {number(tokens / span)} trained tokens/s"))
        rows.append(("staleness", f"mean {picture.mean_staleness:.2f}, max {picture.max_staleness}"))
    if picture.trainer is not None and shares_text(picture.trainer.shares):
        rows.append(("trainer's time", shares_text(picture.trainer.shares)))
    return rows


def _ledger(picture: Picture, run_dir: Path) -> list[tuple[str, str]]:
    """From the journals, which know of restarts; from what the daemons said last, if there are none."""
    try:
        line = books_line(run_dir)
    except JournalError as error:
        line = f"the journals cannot be read: {error}"
    line = line or ledger_line(picture)
    return [("ledger" if number == 0 else "", text) for number, text in enumerate((line or "").splitlines())]


def _phases(picture: Picture, now: float) -> str:
    phases = picture.phase_seconds(now)
    parts = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in phases.items() if seconds >= 0.05)
    return f"{duration(now - picture.started_at)} ({parts})"


def _files(files: Files) -> Sequence[tuple[str, str]]:
    rows = [("metrics", str(files.metrics)), ("logs", str(files.logs))]
    if files.png is not None:
        rows.append(("learning curve", str(files.png)))
    return rows
