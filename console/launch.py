"""`headrace up` as a command: settings, display, summary, learning curve, exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import structlog

from configs.command import remember
from configs.errors import ConfigError
from configs.loader import load
from configs.logs import set_up
from configs.schema import LoggingSettings, Settings
from console.children import StopTimes
from console.display import Display
from console.errors import ConsoleError
from console.run_dirs import claim, reserved
from console.summary import Files, summary
from console.up import Commands, Outcome, run

log = structlog.get_logger()


def up(
    config: Path | None,
    overrides: Sequence[str],
    *,
    plain: bool = False,
    commands: Commands | None = None,
    times: StopTimes | None = None,
) -> int:
    """Run from settings to summary. Returns the exit code: 0 finished, 1 failed, 2 a setting is wrong, 128 + signal stopped."""
    with ExitStack() as held:
        try:
            settings, arguments = resolve(config, overrides, held=held)
            stream = held.enter_context((settings.run_dir / "logs" / "console.log").open("a", encoding="utf-8"))
        except ConfigError as error:
            sys.stderr.writelines(f"headrace up: error: {line}\n" for line in str(error).splitlines())
            return 2
        except (ConsoleError, OSError) as error:
            sys.stderr.write(f"headrace up: error: {error}\n")
            return 1
        sys.stdout.write(f"headrace up: run {settings.name}, directory {settings.run_dir}\n")
        sys.stdout.flush()
        set_up(LoggingSettings(format="json"), daemon="console", stream=stream)
        outcome = asyncio.run(
            run(settings, config=config, overrides=arguments, display=_display(plain=plain), commands=commands, times=times)
        )
        return report(outcome, settings)


def resolve(config: Path | None, overrides: Sequence[str], *, held: ExitStack) -> tuple[Settings, list[str]]:
    """The settings of a new run with its own absolute run_dir, made and described on disk, and the overrides that say the same.

    The directory is this run's alone until `held` is closed.

    Raises ConfigError, RunIsLive, OSError.
    """
    settings = load(config, overrides)
    is_explicit = any(text.partition("=")[0] == "run_dir" for text in overrides)
    run_dir = claim(settings, is_explicit=is_explicit)
    arguments = [*(text for text in overrides if text.partition("=")[0] != "run_dir"), f"run_dir={run_dir}"]
    settings = load(config, arguments)
    held.enter_context(reserved(run_dir))
    (run_dir / "logs").mkdir(exist_ok=True)
    remember(settings)
    return settings, arguments


def report(outcome: Outcome, settings: Settings) -> int:
    """Write the learning curve and say how the run ended. Returns the exit code."""
    png = learning_curve(outcome, settings.run_dir)
    name = f"headrace {settings.name}: {outcome.verdict.headline}"
    files = Files(run_dir=settings.run_dir, png=png)
    try:
        sys.stdout.write("\n" + summary(outcome.picture, files, headline=name, now=outcome.ended_at) + "\n")
        sys.stdout.flush()
        sys.stderr.writelines(f"headrace up: {death}\n" for death in outcome.deaths)
    except OSError as error:
        log.warning("the summary has no reader", error=str(error))
        let_go(sys.stdout, sys.stderr)
    return outcome.verdict.exit_code


def let_go(*streams: TextIO) -> None:
    """Turn closed streams to the null device, so that the interpreter's last flush does not fail and change the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())
    os.close(null)


def learning_curve(outcome: Outcome, run_dir: Path) -> Path | None:
    """Draw `reward.png`; a run is not judged by whether it can be drawn."""
    from console.plot import write_png

    try:
        return write_png(outcome.picture, run_dir / "reward.png")
    except (OSError, ImportError) as error:
        log.warning("learning curve cannot be drawn", error=str(error))
        return None


def _display(*, plain: bool) -> Display:
    if plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        from console.plain import PlainDisplay

        return PlainDisplay(sys.stdout)
    from rich.console import Console

    from console.view import LiveDisplay

    return LiveDisplay(Console())
