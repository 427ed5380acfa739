"""The end of a daemon's log: what it did last and why it died, as one line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TAIL_BYTES = 256 << 10
_ROUTINE_KEYS = frozenset({"event", "level", "timestamp", "daemon", "exception", "exc_info", "stack", "logger"})
_SEVERE = frozenset({"error", "critical"})
_TREE = re.compile(r"^\s*[|+]\s?-*")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
_COMMAND_ERROR = re.compile(r"^[\w.-]+: error: ")


def last_event(path: Path) -> str | None:
    """The newest structlog event of any level as text; None if there is none yet."""
    for line in reversed(_tail(path)):
        event = _event(line)
        if event is not None:
            return _text(event)
    return None


def last_error(path: Path) -> str | None:
    """Why the daemon ended: its last error event, the exception that ended it, or its command line's complaint, whichever came
    last; failing these, its last line. None for an empty log."""
    lines = _tail(path)
    found: str | None = None
    in_traceback = False
    for line in lines:
        event = _event(line)
        bare = _TREE.sub("", line, count=1)
        if event is not None:
            in_traceback = False
            if event.get("level") in _SEVERE:
                found = _text(event)
        elif bare.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and bare and not bare[0].isspace() and _EXCEPTION.match(bare):
            in_traceback = False
            found = bare
        elif _COMMAND_ERROR.match(line):
            found = line
    if found is None and lines:
        event = _event(lines[-1])
        return _text(event) if event is not None else lines[-1].strip()
    return found


def _tail(path: Path) -> Sequence[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value else None


def _text(event: dict[str, Any]) -> str:
    extras = [f"{key}={value}" for key, value in event.items() if key not in _ROUTINE_KEYS]
    exception = event.get("exception")
    if isinstance(exception, str) and exception.strip():
        extras.append(exception.strip().splitlines()[-1])
    return " ".join([str(event["event"]), *extras])
