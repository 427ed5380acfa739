"""Logs are JSON lines where no terminal is, with event, level, daemon and values."""

from __future__ import annotations

import io
import json
import tempfile
from typing import Any

import pytest
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


class FullDisk(io.StringIO):
    """Takes nothing while `is_full`."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            self.seek(0)
            self.truncate()
            raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_ends_no_run_and_says_later_what_it_lost() -> None:
    out = FullDisk()
    set_up(LoggingSettings(), daemon="trainer", stream=out)
    for step in range(3):
        structlog.get_logger().info("step", step=step)
    out.is_full = False
    structlog.get_logger().info("step", step=3)
    lost, line = out.getvalue().splitlines()
    assert lost == "3 lines of this log could not be written"
    assert json.loads(line)["step"] == 3
    structlog.reset_defaults()


class Silent:
    """Does not tell what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("value", [chr(0xD800), {"name": chr(0xDFFF)}, 1 << 70, b"\xff", "\0"])
def test_whatever_a_model_wrote_can_be_logged(value: object, form: Any) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        set_up(LoggingSettings(format=form), daemon="rollouter", stream=out)
        structlog.get_logger().warning("call refused", words=value)
        out.seek(0)
        assert "call refused" in out.read()
    structlog.reset_defaults()


def test_a_value_that_does_not_tell_itself_ends_no_run() -> None:
    out = io.StringIO()
    set_up(LoggingSettings(format="json"), daemon="rollouter", stream=out)
    structlog.get_logger().warning("call refused", words=Silent())
    assert "Silent whose words raise RuntimeError" in json.loads(out.getvalue())["words"]
    structlog.reset_defaults()
