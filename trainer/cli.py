"""Command `trainer`: exit 0 when the run finished or was drained, 1 when it failed, 2 when a setting is wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import NoReturn

import structlog

from configs.command import parse
from configs.errors import ConfigError
from configs.logs import set_up
from trainer.process import leave, set_up_process


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the trainer daemon and end the process with its exit code."""
    settings = parse(
        sys.argv[1:] if argv is None else argv,
        prog="trainer",
        description="Headrace's trainer: takes samples from the bus, trains the model, publishes policy versions.",
    )
    set_up(settings.logging, daemon="trainer")
    log = structlog.get_logger()
    try:
        set_up_process(settings)
        from trainer.daemon import run

        asyncio.run(run(settings))
    except ConfigError as error:
        sys.stderr.write(f"trainer: error: {error}\n")
        leave(2)
    except Exception as error:
        log.error("trainer failed", error=f"{type(error).__name__}: {error}", exc_info=settings.logging.level == "debug")
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
