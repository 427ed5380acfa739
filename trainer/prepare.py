"""`python -m trainer.prepare --config FILE [key=value …]`: prepare a run's model ahead of time, into the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from configs.command import parse
from configs.errors import ConfigError
from configs.logs import set_up
from trainer.errors import ModelError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when the model cannot be prepared, 2 when a setting is wrong."""
    settings = parse(
        sys.argv[1:] if argv is None else argv,
        prog="trainer.prepare",
        description="Converts, makes or fetches the model of a run, into the cache.",
    )
    set_up(settings.logging, daemon="prepare")
    from trainer.models import prepare_model

    try:
        prepare_model(settings)
    except ConfigError as error:
        sys.stderr.write(f"trainer.prepare: error: {error}\n")
        return 2
    except ModelError as error:
        structlog.get_logger().error("model not prepared", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
