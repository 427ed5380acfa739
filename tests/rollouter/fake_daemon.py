"""The rollouter as a process of its own, with a fake engine: `python -m tests.rollouter.fake_daemon key=value …`.

With `FAKE_ENGINE_DELAY_S` in the environment each reply takes a random time up to so many seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
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
from tests.fakes.fake_engine import Call, FakeEngine, FakeTokenizer


def open_fake(
    settings: Settings,
    *,
    live: Callable[[], Settings],
    on_change: Callable[[], None],
    on_round_result: Callable[[RoundResult], None],
) -> EngineFleet:
    delay_s = float(os.environ.get("FAKE_ENGINE_DELAY_S", "0"))

    async def before_reply(call: Call) -> None:
        await asyncio.sleep(random.random() * delay_s)

    return FakeEngine(before_reply=before_reply)


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
