"""What a measured run comes to, and runs side by side. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from console.picture import Phase, Picture, whole_percents

_LAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. A figure that does not exist for this kind of run is None."""

    name: str
    num_steps: int
    training_s: float
    """From the first batch's start (engines ready, first evaluation over) to the end of the last step."""
    wall_s: float
    """From the command to the last process's end."""
    samples_per_s: float
    trained_tokens_per_s: float
    steps_per_s: float
    reward_first: float
    """Mean reward of the first step."""
    reward_last: float
    """Mean over the last five steps."""
    accuracy_first: float | None = None
    """Held out, before training."""
    accuracy_last: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    time_percents: Mapping[str, int] = field(default_factory=dict)
    """The trainer's time; sums to 100."""
    sync_pause_median_ms: float | None = None
    sync_pause_max_ms: float | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)


def figures_of(picture: Picture, *, name: str, ended_at: float) -> Figures:
    """Figures of a finished run. Raises ValueError if it made no step."""
    history = picture.history
    if not history:
        raise ValueError(f"run {name}: got no step, expected {picture.num_steps}")
    phases = picture.phase_seconds(ended_at)
    training_s = max(phases[Phase.TRAINING], 1e-3)
    pauses = list(picture.pauses.values())
    accuracies = [result.accuracy for result in picture.evaluations]
    rewards = [step.reward_mean for step in history]
    return Figures(
        name=name,
        num_steps=len(history),
        training_s=training_s,
        wall_s=ended_at - picture.started_at,
        samples_per_s=sum(step.num_samples for step in history) / training_s,
        trained_tokens_per_s=sum(step.num_trained_tokens for step in history) / training_s,
        steps_per_s=len(history) / training_s,
        reward_first=rewards[0],
        reward_last=statistics.fmean(rewards[-_LAST:]),
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if len(accuracies) > 1 else None,
        staleness_mean=picture.mean_staleness,
        staleness_max=picture.max_staleness,
        time_percents=whole_percents(picture.trainer.shares.model_dump()) if picture.trainer else {},
        sync_pause_median_ms=statistics.median(pauses) if pauses else None,
        sync_pause_max_ms=max(pauses, default=None),
        phases_s={str(phase): seconds for phase, seconds in phases.items()},
    )


def figures_of_peer(
    *, name: str, rewards: Sequence[float], trained_tokens: int, samples_per_step: int, training_s: float, wall_s: float
) -> Figures:
    """Figures of another trainer's run. Raises ValueError if it made no step."""
    if not rewards:
        raise ValueError(f"run {name}: got no step")
    return Figures(
        name=name,
        num_steps=len(rewards),
        training_s=training_s,
        wall_s=wall_s,
        samples_per_s=len(rewards) * samples_per_step / training_s,
        trained_tokens_per_s=trained_tokens / training_s,
        steps_per_s=len(rewards) / training_s,
        reward_first=rewards[0],
        reward_last=statistics.fmean(rewards[-_LAST:]),
    )


def table(columns: Sequence[Figures]) -> str:
    """The runs side by side, a row a figure."""
    shares = dict.fromkeys(key for column in columns for key, percent in column.time_percents.items() if percent)
    phases = dict.fromkeys(key for column in columns for key, seconds in column.phases_s.items() if seconds >= 0.05)
    rows = [
        ("", [column.name for column in columns]),
        ("steps", [str(column.num_steps) for column in columns]),
        ("samples/s", [f"{column.samples_per_s:.2f}" for column in columns]),
        ("trained tokens/s", [f"{column.trained_tokens_per_s:.1f}" for column in columns]),
        ("steps/s", [f"{column.steps_per_s:.3f}" for column in columns]),
        ("seconds per step", [f"{1 / column.steps_per_s:.2f}" for column in columns]),
        *((f"trainer {key} %", [str(column.time_percents.get(key, "-")) for column in columns]) for key in shares),
        (
            "trainer time sum %",
            [str(sum(column.time_percents.values())) if column.time_percents else "-" for column in columns],
        ),
        ("sync pause median ms", [_optional(column.sync_pause_median_ms, ".1f") for column in columns]),
        ("sync pause max ms", [_optional(column.sync_pause_max_ms, ".1f") for column in columns]),
        ("staleness mean", [_optional(column.staleness_mean, ".2f") for column in columns]),
        ("staleness max", [_optional(column.staleness_max, "d") for column in columns]),
        ("reward first step", [f"{column.reward_first:.3f}" for column in columns]),
        (f"reward last {_LAST} steps", [f"{column.reward_last:.3f}" for column in columns]),
        ("held-out at start", [_optional(column.accuracy_first, ".3f") for column in columns]),
        ("held-out at end", [_optional(column.accuracy_last, ".3f") for column in columns]),
        *(
            (f"{key} s", [f"{column.phases_s[key]:.1f}" if key in column.phases_s else "-" for column in columns])
            for key in phases
        ),
        ("training wall s", [f"{column.training_s:.1f}" for column in columns]),
        ("whole wall s", [f"{column.wall_s:.1f}" for column in columns]),
    ]
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join([label.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for label, cells in rows
    )


def ratio_line(ours: Figures, other: Figures) -> str:
    """How the training wall times of two runs compare, per step."""
    ratio = ours.steps_per_s / other.steps_per_s
    return (
        f"{ours.name} takes {1 / ours.steps_per_s:.2f} s a step, {other.name} {1 / other.steps_per_s:.2f} s: "
        f"{ratio:.2f} times as fast, {100 / ratio:.0f} % of its wall time; "
        f"reward of the last steps {ours.reward_last:.3f} and {other.reward_last:.3f}"
    )


def _optional(value: float | int | None, form: str) -> str:
    return "-" if value is None else format(value, form)
