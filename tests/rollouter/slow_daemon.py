"""The rollouter as a process of its own, with a slow engine: `python -m tests.rollouter.slow_daemon key=value …`.

`SLOW_ENGINE_TALLY` names the file in which the engine leaves what it generated, `SLOW_ENGINE_SPEED` is one request's tokens per
second.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from configs.command import parse
from configs.logs import set_up
from configs.schema import Settings
from rollouter.codec import Codec
from rollouter.daemon import run
from rollouter.engines import EngineFleet
from sample_bus.messages import RoundResult
from tests.fakes.fake_engine import FakeTokenizer
from tests.fakes.slow_engine import SlowEngine


def open_slow(
    settings: Settings,
    *,
    live: Callable[[], Settings],
    on_change: Callable[[], None],
    on_round_result: Callable[[RoundResult], None],
) -> EngineFleet:
    return SlowEngine(tokens_per_s=float(os.environ["SLOW_ENGINE_SPEED"]), tally=Path(os.environ["SLOW_ENGINE_TALLY"]))


def main() -> None:
    settings = parse(sys.argv[1:], prog="slow_daemon", description="The rollouter with a slow engine.")
    set_up(settings.logging, daemon="rollouter")
    asyncio.run(run(settings, open_fleet=open_slow, codec_of=lambda model_dir: Codec(FakeTokenizer())))


if __name__ == "__main__":
    main()
