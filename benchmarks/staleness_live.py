"""A running job whose staleness is turned up and down: measured ages around each change, with a plot.

    python -m benchmarks.staleness_live [--json] [--config F] [key=value ...]

Plays the tiny demo on the real engine with staleness_threshold=0, sets it to 2 after a third of the steps and back to 0 after
two thirds, with `headrace set`. Nothing is restarted; the exit code is 1 unless the ages follow and the ledger closes.
Progress goes to stderr, the result to stdout, the plot and the run below runs/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from benchmarks.end_to_end import Stopped, measure
from configs.errors import ConfigError
from console.errors import ConsoleError

CONFIG = Path("configs/demo-tiny.yaml")
OVERRIDES = (
    "num_steps=45",
    "samples_per_step=64",
    "staleness_threshold=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)
UP = 2.0
_LOOK_EVERY_S = 0.05


class Row(NamedTuple):
    """What is read of a step's metrics."""

    step: int
    staleness_mean: float
    staleness_max: int
    settings_revision: int
    """When its batch was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """From when the steps show the two changes."""

    raised_at: int
    """The newest step that had its batch when the threshold was raised."""
    lowered_at: int
    """The same when it was lowered."""
    first_stale_step: int | None
    """The first one with a sample older than 0."""
    last_stale_step: int | None
    ledger_closes: bool
    """No sample was lost or trained twice."""

    @property
    def holds(self) -> bool:
        """Nothing stale before the threshold was raised and something soon after (a period's samples are there already); after
        it was lowered what was begun before, at most UP periods, and nothing stale from then on."""
        if self.first_stale_step is None or self.last_stale_step is None:
            return False
        return (
            self.raised_at < self.first_stale_step <= self.raised_at + 3
            and self.last_stale_step <= self.lowered_at + UP + 2
            and self.ledger_closes
        )


class Changes:
    """Turns settings of the run in `run_dir` once it has made so many steps."""

    def __init__(self, run_dir: Path, planned: Sequence[tuple[int, str]]) -> None:
        self._run_dir = run_dir
        self._planned = planned
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.made: list[str] = []

    def __enter__(self) -> Changes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        for at_step, change in self._planned:
            while self._newest_step() < at_step:
                if self._over.wait(_LOOK_EVERY_S):
                    return
            if _headrace("set", "--run-dir", str(self._run_dir), "--author", "benchmark", change):
                self.made.append(change)

    def _newest_step(self) -> int:
        return max((row.step for row in rows_of(self._run_dir / "metrics.jsonl")), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when the run finished and its ages followed."""
    arguments = _arguments(argv)
    place = Path("runs") / f"staleness_live-{time.strftime('%Y%m%d-%H%M%S')}"
    overrides = [*OVERRIDES, *arguments.overrides]
    num_steps = int(next(one for one in reversed(overrides) if one.startswith("num_steps=")).removeprefix("num_steps="))
    planned = [(num_steps // 3, f"staleness_threshold={UP:g}"), (2 * num_steps // 3, "staleness_threshold=0")]
    run_dir = (place / "run").absolute()
    try:
        with Changes(run_dir, planned) as changes:
            measure(arguments.config, overrides, run_dir=run_dir, name="live")
    except ConfigError as error:
        sys.stderr.writelines(f"staleness_live: error: {line}\n" for line in str(error).splitlines())
        return 2
    except (ConsoleError, OSError) as error:
        sys.stderr.write(f"staleness_live: error: {error}\n")
        return 1
    except Stopped as error:
        sys.stderr.write(f"staleness_live: {error}\n")
        return error.exit_code
    if len(changes.made) < len(planned):
        sys.stderr.write(f"staleness_live: made {len(changes.made)} of {len(planned)} changes before the run was over\n")
        return 1
    steps = rows_of(run_dir / "metrics.jsonl")
    closes = _headrace("ledger", "--run-dir", str(run_dir))
    result = follow(steps, raised_at=before(steps, 1), lowered_at=before(steps, 2), ledger_closes=closes)
    png = place / "staleness.png"
    draw(steps, [(result.raised_at, changes.made[0]), (result.lowered_at, changes.made[1])], png)
    _print(steps, result, png, as_json=arguments.json)
    return 0 if result.holds else 1


def _headrace(*arguments: str) -> bool:
    """Whether the command succeeded; what it prints goes to stderr."""
    done = subprocess.run([sys.executable, "-m", "console.cli", *arguments], check=False, capture_output=True, text=True)
    sys.stderr.write(done.stdout + done.stderr)
    return done.returncode == 0


def rows_of(metrics: Path) -> list[Row]:
    """The steps in the file so far; a line that is still being written is left out."""
    steps = []
    for line in metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else ():
        if line.endswith(b"\n"):
            row = orjson.loads(line)
            if "settings_revision" in row:
                steps.append(Row(**{name: row[name] for name in Row._fields}))
    return steps


def before(steps: Sequence[Row], revision: int) -> int:
    """The last step before a revision; 0 if there is none."""
    return max((row.step for row in steps if row.settings_revision < revision), default=0)


def follow(steps: Sequence[Row], *, raised_at: int, lowered_at: int, ledger_closes: bool) -> Followed:
    """What the steps show of the two changes."""
    stale = [step.step for step in steps if step.staleness_max > 0]
    return Followed(
        raised_at=raised_at,
        lowered_at=lowered_at,
        first_stale_step=min(stale, default=None),
        last_stale_step=max(stale, default=None),
        ledger_closes=ledger_closes,
    )


def draw(steps: Sequence[Row], changes: Sequence[tuple[int, str]], path: Path) -> None:
    """Ages of each step's samples, with a line at each change."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    at = [step.step for step in steps]
    axes.plot(at, [step.staleness_mean for step in steps], "o-", color="tab:blue", label="mean")
    axes.plot(at, [step.staleness_max for step in steps], "^:", color="tab:red", label="max")
    for step, change in changes:
        axes.axvline(step + 0.5, color="black", linewidth=0.8)
        axes.text(step + 0.6, 1.02, change, transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("age of trained samples (versions)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def _print(steps: Sequence[Row], result: Followed, png: Path, *, as_json: bool) -> None:
    if as_json:
        rows = [step._asdict() for step in steps]
        plain = {**asdict(result), "holds": result.holds, "steps": rows, "plot": str(png)}
        sys.stdout.write(orjson.dumps(plain).decode() + "\n")
        return
    sys.stdout.write("step: mean age, max age\n")
    sys.stdout.write("  ".join(f"{step.step}: {step.staleness_mean:.2f} {step.staleness_max}" for step in steps) + "\n")
    sys.stdout.write(
        f"raised after step {result.raised_at}, first stale step {result.first_stale_step}; lowered after step "
        f"{result.lowered_at}, last stale step {result.last_stale_step}; the ledger "
        f"{'closes' if result.ledger_closes else 'does not close'}\nplot: {png}\n"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness_live", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="the result as one JSON object on the last line")
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"settings of the run; default {CONFIG}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
