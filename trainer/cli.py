"""Command `trainer`: exit 0 when the run finished or was drained, 1 when it failed, 2 when a setting is wrong.

With `--replay RUN_DIR`: 0 when the outcome is the run's bit for bit or a setting explains why not, 1 when nothing explains it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import structlog

from configs.command import parse
from configs.errors import ConfigError
from configs.logs import set_up
from configs.schema import Settings
from trainer.process import leave, set_up_process

PROG = "trainer"
DESCRIPTION = "Headrace's trainer: takes samples from the bus, trains the model, publishes policy versions."
REPLAY_DESCRIPTION = (
    "Trains again from the samples that a run kept (bus.retain=true), with no bus, no rollouter and no engines, and compares "
    "losses and weights with the run's. Settings are the run's own, or --config; a live setting that differs from the run's, "
    "or is given as an argument, holds for every step instead of what was recorded."
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the trainer daemon, or a replay, and end the process with its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_dir, rest = _split(arguments)
    if run_dir is not None:
        _replay(run_dir, rest)
    settings = parse(
        rest,
        prog=PROG,
        description=f"{DESCRIPTION} `--replay RUN_DIR` trains again from a run's kept samples; see `--replay RUN_DIR --help`.",
    )

    def work() -> int:
        from trainer.daemon import run

        asyncio.run(run(settings))
        return 0

    _run(settings, work, "trainer failed")


def _replay(run_dir: Path, rest: list[str]) -> NoReturn:
    given = {word.partition("=")[0] for word in rest if "=" in word and not word.startswith("-")}
    if not {"-h", "--help"} & set(rest):
        from trainer.replay_request import replay_dir, settings_file

        try:
            defaults = settings_file(run_dir)
        except ConfigError as error:
            _refuse(error)
        if not any(word.partition("=")[0] == "--config" for word in rest):
            rest = ["--config", str(defaults), *rest]
        if "run_dir" not in given:
            rest = [*rest, f"run_dir={replay_dir(run_dir)}"]
    settings = parse(rest, prog=f"{PROG} --replay RUN_DIR", description=REPLAY_DESCRIPTION)

    def work() -> int:
        from trainer.replay import replay

        text, comparison = replay(settings, of=run_dir, given=given)
        sys.stdout.write(f"{text}\n")
        return 0 if comparison.is_explained else 1

    _run(settings, work, "replay failed")


def _run(settings: Settings, work: Callable[[], int], failure: str) -> NoReturn:
    set_up(settings.logging, daemon="trainer")
    log = structlog.get_logger()
    try:
        set_up_process(settings)
        code = work()
    except ConfigError as error:
        _refuse(error)
    except Exception as error:
        log.error(failure, error=f"{type(error).__name__}: {error}", exc_info=settings.logging.level == "debug")
        leave(1)
    leave(code)


def _split(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The directory after `--replay`, and the other arguments."""
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--replay", type=Path, metavar="RUN_DIR")
    known, rest = parser.parse_known_args(arguments)
    return known.replay, rest


def _refuse(error: ConfigError) -> NoReturn:
    sys.stderr.write(f"trainer: error: {error}\n")
    leave(2)


if __name__ == "__main__":
    main()
