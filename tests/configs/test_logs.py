"""Logs are JSON lines where no terminal is, with event, level, daemon and values."""

from __future__ import annotations

import io
import json

import structlog

from configs.logs import set_up
from configs.schema import LoggingSettings


def test_lines_are_json_off_a_terminal() -> None:
    out = io.StringIO()
    set_up(LoggingSettings(), daemon="trainer", stream=out)
    structlog.get_logger().info("setting changed", key="staleness_threshold", old=0.5, new=0.0)
    structlog.get_logger().debug("not shown")
    (line,) = out.getvalue().splitlines()
    row = json.loads(line)
    assert (row["event"], row["level"], row["daemon"], row["old"], row["new"]) == (
        "setting changed",
        "info",
        "trainer",
        0.5,
        0.0,
    )
    structlog.reset_defaults()
