"""Command `rollouter`: exit 0 when the run ended well or was drained, 1 when it failed, 2 when a setting is wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from configs.command import parse
from configs.errors import ConfigError
from configs.logs import set_up


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rollouter daemon; returns the exit code."""
    settings = parse(
        sys.argv[1:] if argv is None else argv,
        prog="rollouter",
        description="Headrace's rollouter: runs agent loops against engines and streams their samples to the trainer.",
    )
    set_up(settings.logging, daemon="rollouter")
    from rollouter.daemon import run

    try:
        asyncio.run(run(settings))
    except ConfigError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"rollouter: error: {line}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - the process ends here, with one line that says why
        structlog.get_logger().error(
            "rollouter failed", error=f"{type(error).__name__}: {error}", exc_info=settings.logging.level == "debug"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
