"""What staleness_threshold and max_staleness buy and cost: a sweep in simulated time, and a few points on the real engine.

    python -m benchmarks.staleness [--quick] [--json] [--simulated-only] [--config F] [key=value ...]

Simulated: thresholds 0 to 4, lengths log-normal with a heavy tail, each with pacing alone and with max_staleness at the
threshold rounded up; means over seeds. Real: `headrace up` with the tiny model on CPU, given overrides applied to each run.
Progress goes to stderr, the result to stdout, the plot and result.json below runs/.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.end_to_end import Stopped
from benchmarks.staleness_real import RealPoint, play
from benchmarks.staleness_sim import Plant, Point, simulate
from configs.errors import ConfigError
from console.errors import ConsoleError

THRESHOLDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
REAL_THRESHOLDS = (0.0, 0.5, 2.0)
CONFIG = Path("configs/demo-tiny.yaml")
QUICK_REAL = ("num_steps=6", "samples_per_step=64", "evaluation.at_start=false", "evaluation.at_end=false")
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
QUICK_STEPS, QUICK_WARMUP = 60, 10


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when everything was measured."""
    arguments = _arguments(argv)
    place = Path("runs") / f"staleness-{time.strftime('%Y%m%d-%H%M%S')}"
    place.mkdir(parents=True)
    plant = Plant(num_steps=QUICK_STEPS, warmup_steps=QUICK_WARMUP) if arguments.quick else Plant()
    points = sweep(plant, QUICK_SEEDS if arguments.quick else SEEDS)
    real: list[RealPoint] = []
    try:
        if not arguments.simulated_only:
            overrides = [*(QUICK_REAL if arguments.quick else ()), *arguments.overrides]
            for threshold in REAL_THRESHOLDS[:: 2 if arguments.quick else 1]:
                given = [*overrides, f"staleness_threshold={threshold}"]
                real.append(play(arguments.config, given, run_dir=place / f"threshold-{threshold:g}"))
    except ConfigError as error:
        sys.stderr.writelines(f"staleness: error: {line}\n" for line in str(error).splitlines())
        return 2
    except (ConsoleError, OSError) as error:
        sys.stderr.write(f"staleness: error: {error}\n")
        return 1
    except Stopped as error:
        sys.stderr.write(f"staleness: {error}\n")
        return error.exit_code
    draw(points, real, place / "staleness.png")
    result = {
        "plant": asdict(plant),
        "simulated": [asdict(point) for point in points],
        "real": [asdict(point) for point in real],
        "plot": str(place / "staleness.png"),
    }
    (place / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    if arguments.json:
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        sys.stdout.write("\n".join([*_simulated_table(points), *(_real_table(real) if real else ())]) + "\n")
        sys.stdout.write(f"plot: {place / 'staleness.png'}\n")
    return 0


def sweep(plant: Plant, seeds: Sequence[int], thresholds: Sequence[float] = THRESHOLDS) -> list[Point]:
    """For each threshold pacing alone, then with the gate at the threshold rounded up."""
    points = []
    for threshold in thresholds:
        for max_staleness in (None, math.ceil(threshold)):
            begun = time.monotonic()
            runs = [
                simulate(replace(plant, seed=seed), staleness_threshold=threshold, max_staleness=max_staleness)
                for seed in seeds
            ]
            points.append(mean_of(runs))
            gate = "no gate" if max_staleness is None else f"max_staleness {max_staleness}"
            sys.stderr.write(f"simulated threshold {threshold:g}, {gate}: {time.monotonic() - begun:.1f} s\n")
    return points


def mean_of(points: Sequence[Point]) -> Point:
    """One point of several seeds: means, and the largest age."""
    first = points[0]
    averaged: dict[str, Any] = {
        one.name: statistics.fmean(getattr(point, one.name) for point in points)
        for one in fields(Point)
        if one.name not in ("staleness_threshold", "max_staleness", "staleness_max")
    }
    return replace(first, **averaged, staleness_max=max(point.staleness_max for point in points))


def draw(points: Sequence[Point], real: Sequence[RealPoint], path: Path) -> None:
    """Ages and throughput over the threshold."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    age, speed, length = figure.subplots(1, 3)
    for gated, color, label in ((False, "tab:blue", "pacing alone"), (True, "tab:orange", "with max_staleness")):
        chosen = [point for point in points if (point.max_staleness is not None) is gated]
        at = [point.staleness_threshold for point in chosen]
        age.plot(at, [point.staleness_mean for point in chosen], "o-", color=color, label=f"{label}: mean")
        age.plot(at, [point.staleness_max for point in chosen], "^:", color=color, label=f"{label}: max")
        speed.plot(at, [point.samples_per_s for point in chosen], "o-", color=color, label=f"{label}: samples/s")
        shorter = [point.trained_tokens_mean / point.drawn_tokens_mean for point in chosen]
        length.plot(at, shorter, "o-", color=color, label=label)
    if real:
        at = [point.staleness_threshold for point in real]
        age.plot(at, [point.staleness_mean for point in real], "s--", color="tab:green", label="real engine: mean")
        age.plot(at, [point.staleness_max for point in real], "v--", color="tab:green", label="real engine: max")
    age.plot(THRESHOLDS, THRESHOLDS, color="black", linewidth=0.8, label="mean = threshold")
    age.set_yscale("symlog", linthresh=1)
    for axes, title in ((age, "age of trained samples (versions)"), (speed, "throughput"), (length, "trained / drawn length")):
        axes.set_title(title)
        axes.set_xlabel("staleness_threshold")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def _simulated_table(points: Sequence[Point]) -> list[str]:
    lines = [
        "simulated                        trained   trainer   age of samples       over the  samples  tokens     trained",
        "threshold  max_staleness       samples/s      idle   mean   p95   max     bound     dropped  discarded  length",
    ]
    for point in points:
        gate = "none" if point.max_staleness is None else str(point.max_staleness)
        lines.append(
            f"{point.staleness_threshold:<9g}  {gate:<13}  {point.samples_per_s:>14.2f}  {point.trainer_idle_share:>8.0%}  "
            f"{point.staleness_mean:>5.2f}  {point.staleness_p95:>4.1f}  {point.staleness_max:>4}  "
            f"{point.above_bound_share:>8.1%}  {point.dropped_share:>10.1%}  {point.discarded_token_share:>9.1%}  "
            f"{point.trained_tokens_mean / point.drawn_tokens_mean - 1:>+7.1%}"
        )
    return lines


def _real_table(points: Sequence[RealPoint]) -> list[str]:
    lines = ["", "real engine: threshold  samples/s  trainer idle  mean   p95   max  effective sample size  held-out accuracy"]
    for point in points:
        first, last = (f"{one:.3f}" if one is not None else "-" for one in (point.accuracy_first, point.accuracy_last))
        lines.append(
            f"             {point.staleness_threshold:<9g}  {point.samples_per_s:>9.1f}  {point.trainer_idle_percent:>11}%  "
            f"{point.staleness_mean:.2f}  {point.staleness_p95:>4.1f}  {point.staleness_max:>4}  "
            f"{point.effective_sample_size:>21.4f}  {first} -> {last}"
        )
    return lines


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and one seed; two short real runs")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    parser.add_argument("--simulated-only", action="store_true", help="no real engine")
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"settings of the real runs; default {CONFIG}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the real runs that win over the file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
