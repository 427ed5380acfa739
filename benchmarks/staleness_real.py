"""Staleness of a real run: `headrace up` on the real engine, every sample kept, ages read from what each step took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.end_to_end import measure
from sample_bus.journal import TRAINER_FILE, journal_dir, read_journal
from sample_bus.staleness import sample_staleness, token_staleness
from trainer.recording import recording_of
from trainer.retained import Kept, retained_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPoint:
    """One run's figures. Ages in versions, of every sample that a step took."""

    staleness_threshold: float
    max_staleness: int | None
    num_steps: int
    samples_per_s: float
    trainer_idle_percent: int
    staleness_mean: float
    staleness_p95: float
    staleness_max: int
    token_staleness_mean: float
    effective_sample_size: float
    """Of the importance weights exp(policy - behavior), as a share of the tokens: (sum w)^2 / (n sum w^2), mean over steps."""
    accuracy_first: float | None
    accuracy_last: float | None
    run_dir: str


def play(config: Path, overrides: Sequence[str], *, run_dir: Path) -> RealPoint:
    """Raises what `end_to_end.measure` does."""
    measured = measure(config, [*overrides, "bus.retain=true"], run_dir=run_dir, name=None)
    settings, figures = measured.settings, measured.figures
    run_id = (settings.run_dir / "run_id").read_text().strip()
    kept = Kept(retained_dir(settings.run_dir, run_id))
    ages: list[int] = []
    token_ages: list[float] = []
    for step in recording_of(read_journal(journal_dir(settings.run_dir, run_id) / TRAINER_FILE)).steps:
        for sample in map(kept.sample, step.samples):
            ages.append(sample_staleness(sample, step.policy_version))
            sampled = sample.token_versions() >= 0
            token_ages.extend(token_staleness(sample, step.policy_version)[sampled].tolist())
    return RealPoint(
        staleness_threshold=settings.staleness_threshold,
        max_staleness=settings.max_staleness,
        num_steps=figures.num_steps,
        samples_per_s=figures.samples_per_s,
        trainer_idle_percent=figures.time_percents.get("waiting", 0),
        staleness_mean=float(np.mean(ages)),
        staleness_p95=float(np.percentile(ages, 95)),
        staleness_max=max(ages),
        token_staleness_mean=float(np.mean(token_ages)),
        effective_sample_size=statistics.fmean(row["effective_sample_size"] for row in _train_rows(settings.run_dir)),
        accuracy_first=figures.accuracy_first,
        accuracy_last=figures.accuracy_last,
        run_dir=str(settings.run_dir),
    )


def _train_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        row = orjson.loads(line)
        if "effective_sample_size" in row:
            yield row
