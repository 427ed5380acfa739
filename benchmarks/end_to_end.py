"""The demo's setting from command to summary, measured: asynchronous and with staleness_threshold=0, side by side.

    python -m benchmarks.end_to_end [--config F] [--quick] [--json] [--peer trl] [key=value ...]

Both runs take place in fresh directories through the same machinery as `headrace up`. `--peer trl` then trains with TRL's
GRPOTrainer, in an environment of its own: same model, tasks, batch, tokens, learning rate and number of steps.
Progress goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import orjson

from benchmarks.figures import Figures, figures_of, ratio_line, table
from configs.errors import ConfigError
from configs.logs import set_up
from configs.schema import LoggingSettings, Settings
from console.errors import ConsoleError
from console.launch import learning_curve, resolve
from console.plain import PlainDisplay
from console.summary import Files, ledger_line, summary
from console.up import Outcome, run

DEMO = Path("configs/demo.yaml")
QUICK = Path("configs/demo-tiny.yaml")
QUICK_OVERRIDES = ("num_steps=6", "samples_per_step=64", "evaluation.at_start=false", "evaluation.at_end=false")


class Measured(NamedTuple):
    settings: Settings
    outcome: Outcome
    figures: Figures


class Stopped(Exception):
    """Raised when a run did not finish."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when all runs finished."""
    arguments = _arguments(argv)
    config = arguments.config or (QUICK if arguments.quick else DEMO)
    overrides = [*(QUICK_OVERRIDES if arguments.quick else ()), *arguments.overrides]
    place = Path("runs") / f"end_to_end-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        first = measure(config, overrides, run_dir=place / "asynchronous", name=None)
        runs = [first.figures]
        second = measure(config, [*overrides, "staleness_threshold=0"], run_dir=place / "synchronous", name="staleness 0")
        runs.append(second.figures)
        if arguments.peer == "trl":
            from benchmarks.peer_trl.compare import measure_trl

            model_dir = first.outcome.picture.trainer.model_dir if first.outcome.picture.trainer else None
            assert model_dir is not None, "the trainer told its model directory before the first step"
            runs.append(measure_trl(first.settings, Path(model_dir), run_dir=place / "trl"))
    except ConfigError as error:
        sys.stderr.writelines(f"end_to_end: error: {line}\n" for line in str(error).splitlines())
        return 2
    except (ConsoleError, OSError) as error:
        sys.stderr.write(f"end_to_end: error: {error}\n")
        return 1
    except Stopped as error:
        sys.stderr.write(f"end_to_end: {error}\n")
        return error.exit_code
    _print(runs, as_json=arguments.json, directory=place)
    return 0


def measure(config: Path, overrides: Sequence[str], *, run_dir: Path, name: str | None) -> Measured:
    """One run. Raises ConfigError, ConsoleError, OSError, Stopped."""
    with ExitStack() as held:
        settings, resolved = resolve(config, [*overrides, f"run_dir={run_dir.absolute()}"], held=held)
        label = name or f"staleness {settings.staleness_threshold:g}"
        sys.stderr.write(f"── {label}: {settings.run_dir}\n")
        stream = held.enter_context((settings.run_dir / "logs" / "console.log").open("a", encoding="utf-8"))
        set_up(LoggingSettings(format="json"), daemon="console", stream=stream)
        outcome = asyncio.run(run(settings, config=config, overrides=resolved, display=PlainDisplay(sys.stderr)))
    files = Files(run_dir=settings.run_dir, png=learning_curve(outcome, settings.run_dir))
    sys.stderr.write(summary(outcome.picture, files, headline=outcome.verdict.headline, now=outcome.ended_at) + "\n")
    if outcome.verdict.exit_code:
        raise Stopped("; ".join([f"{label}: {outcome.verdict.headline}", *outcome.deaths]), outcome.verdict.exit_code)
    sys.stderr.write(f"ledger: {ledger_line(outcome.picture)}\n")
    return Measured(settings, outcome, figures_of(outcome.picture, name=label, ended_at=outcome.ended_at))


def _print(runs: Sequence[Figures], *, as_json: bool, directory: Path) -> None:
    if as_json:
        result = {"directory": str(directory), "runs": [asdict(figures) for figures in runs]}
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
        return
    sys.stdout.write(table(runs) + "\n")
    for other in runs[1:]:
        sys.stdout.write(ratio_line(runs[0], other) + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, help=f"settings of the run; default {DEMO}")
    parser.add_argument("--quick", action="store_true", help=f"a few steps of {QUICK}: under a minute")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on the last line")
    parser.add_argument("--peer", choices=["trl"], help="also train with this library, in an environment of its own")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
