"""Curves: as text of Braille dots for the terminal, as PNG for the run directory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from console.picture import Picture

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the Braille cell by (row, column) of its 4 x 2 dots (Unicode, block U+2800)."""


def chart(values: Sequence[float], *, width: int, height: int, low: float, high: float, braille: bool = True) -> list[str]:
    """`height` lines of `width` characters with `values` drawn from left to right, joined by lines.

    The values span the whole width; those outside [low, high] lie on the border; NaN and infinities are left out.
    Without `braille` one `*` stands for a cell.
    """
    if width < 1 or height < 1 or not high > low:
        raise ValueError(f"chart: got {width}x{height} and range [{low}, {high}], expected at least 1x1 and low < high")
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height

    def spot(index: int, value: float) -> tuple[int, int]:
        across = index * (columns - 1) / (len(values) - 1) if len(values) > 1 else 0
        share = (min(max(value, low), high) - low) / (high - low)
        return round(across), round((1 - share) * (rows - 1))

    before: tuple[int, int] | None = None
    for index, value in enumerate(values):
        if not math.isfinite(value):
            before = None
            continue
        here = spot(index, value)
        for x, y in _line(before or here, here):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        before = here
    if braille:
        return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]
    return ["".join("*" if cell else " " for cell in line) for line in cells]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place, of fewer at the start."""
    means = []
    for index in range(len(values)):
        recent = values[max(0, index + 1 - window) : index + 1]
        means.append(sum(recent) / len(recent))
    return means


def write_png(picture: Picture, path: Path) -> Path | None:
    """Draw reward, held-out accuracy and staleness over the steps; None if there is no step to draw."""
    history = picture.history
    if not history:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = [step.step for step in history]
    rewards = [step.reward_mean for step in history]
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="reward of the step")
    top.plot(steps, moving_mean(rewards, 5), color="tab:blue", linewidth=2, label="mean of 5 steps")
    measured = [(_step_before(picture, result.policy_version), result.accuracy) for result in picture.evaluations]
    if measured:
        top.plot(*zip(*measured, strict=True), "o", color="tab:orange", markersize=8, label="held-out accuracy")
    top.set_ylabel("reward")
    top.set_title(f"{picture.name}: {len(history)} steps, {picture.versions_published} versions")
    if all(0 <= reward <= 1 for reward in rewards):
        top.set_ylim(-0.02, 1.02)
    top.grid(alpha=0.3)
    top.legend(loc="best")
    bottom.plot(steps, [step.staleness_mean for step in history], color="tab:green", label="mean")
    bottom.plot(steps, [step.staleness_max for step in history], color="tab:red", alpha=0.6, drawstyle="steps-mid", label="max")
    bottom.set_ylabel("staleness (versions)")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    bottom.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _step_before(picture: Picture, policy_version: int) -> int:
    """The last step before `policy_version` was published; 0 for the first version. A step bears the version it trained."""
    return max((step.step for step in picture.history if step.policy_version < policy_version), default=0)


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots from `start` to `end`, both included, without gaps."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            start[0] + round((end[0] - start[0]) * index / length),
            start[1] + round((end[1] - start[1]) * index / length),
        )
        for index in range(length + 1)
    ]
