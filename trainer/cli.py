"""Command `trainer`: exit 0 when the run finished or was drained, 1 when it failed, 2 when a setting is wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from configs.command import parse
from configs.errors import ConfigError
from configs.logs import set_up


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer daemon; returns the exit code."""
    settings = parse(
        sys.argv[1:] if argv is None else argv,
        prog="trainer",
        description="Headrace's trainer: takes samples from the bus, trains the model, publishes policy versions.",
    )
    set_up(settings.logging, daemon="trainer")
    from trainer.daemon import run, set_up_process

    try:
        set_up_process(settings)
        asyncio.run(run(settings))
    except ConfigError as error:
        sys.stderr.write(f"trainer: error: {error}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - the process ends here, with one line that says why
        structlog.get_logger().error(
            "trainer failed", error=f"{type(error).__name__}: {error}", exc_info=settings.logging.level == "debug"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
