"""structlog set-up: console lines on a terminal, JSON lines otherwise, always to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import orjson
import structlog

from configs.schema import LoggingSettings


def set_up(settings: LoggingSettings, *, daemon: str, stream: TextIO | None = None) -> None:
    """After this every `structlog.get_logger()` of the process writes with the daemon's name at the chosen level."""
    out = sys.stderr if stream is None else stream
    as_json = settings.format == "json" or (settings.format == "auto" and not out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _name(daemon),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        renderers: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    else:
        renderers = [structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=32)]
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def _name(daemon: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("daemon", daemon)
        return event

    return add


def _json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
