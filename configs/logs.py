"""structlog set-up: console lines on a terminal, JSON lines otherwise, always to stderr."""

from __future__ import annotations

import logging
import sys
import threading
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
    lines = _Lines(out)
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=_filtering(settings.level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )


def set_level(level: str) -> None:
    """From now on `level` is the least severe one that is logged; nothing else changes."""
    structlog.configure(wrapper_class=_filtering(level))


def _filtering(level: str) -> Any:
    return structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])


class _Lines:
    """Writes each event as a line. A log that cannot be written, as on a full disk, ends no run: what it lost is counted and
    told when it can be written again."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._num_lost = 0

    def msg(self, line: str) -> None:
        line = line.encode(errors="backslashreplace").decode()  # half a surrogate is no text that can be written
        with self._lock:
            try:
                if self._num_lost:
                    self._out.write(f"{self._num_lost} lines of this log could not be written\n")
                self._out.write(f"{line}\n")
                self._out.flush()
            except (OSError, UnicodeError):
                self._num_lost += 1
            else:
                self._num_lost = 0

    debug = info = warning = error = critical = exception = msg


def _name(daemon: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("daemon", daemon)
        return event

    return add


def _json(event: Any, **_: Any) -> str:
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # half a surrogate, a number beyond 64 bits, a value that does not tell itself: no log ends a run
        return orjson.dumps({_plain(key): _plain(value) for key, value in event.items()}).decode()


def _plain(value: Any) -> str:
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - a value of somebody else's class
        text = f"<{type(value).__name__} whose words raise {type(error).__name__}>"
    return text.encode(errors="backslashreplace").decode()
