"""The rollouter as a process of its own, with a fake engine: `python -m tests.rollouter.fake_daemon key=value …`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import structlog

from configs.command import parse
from configs.logs import set_up
from configs.schema import Settings
from rollouter.codec import Codec
from rollouter.daemon import run
from rollouter.engines import EngineFleet
from sample_bus.messages import RoundResult
from tests.fakes.fake_engine import FakeEngine, FakeTokenizer


def open_fake(
    settings: Settings, *, on_change: Callable[[], None], on_round_result: Callable[[RoundResult], None]
) -> EngineFleet:
    return FakeEngine()


def main() -> int:
    settings = parse(sys.argv[1:], prog="fake_daemon", description="The rollouter with a fake engine.")
    set_up(settings.logging, daemon="rollouter")
    try:
        asyncio.run(run(settings, open_fleet=open_fake, codec_of=lambda model_dir: Codec(FakeTokenizer())))
    except Exception as error:  # noqa: BLE001 - the test reads this line and the exit code
        structlog.get_logger().error("rollouter failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
