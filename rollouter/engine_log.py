"""Reading an engine's log for the one line that says what went wrong. Pure but for `tail`."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_PREFIX = re.compile(r"^(\([^)]* pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ (\[[^\]]*\] )?)?")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception|Interrupt|Exit|Refused|Timeout)\b(: .*)?$")
_HINT = re.compile(r"root cause|see stack trace|stack trace above", re.IGNORECASE)


def tail(file: Path, *, since: int = 0, max_bytes: int = _TAIL_BYTES) -> str:
    """The end of a text file, nothing before byte `since`; empty if it is not there."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(since, stream.tell() - max_bytes))
            return stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def failure_line(text: str) -> str:
    """The line that names the first cause: of the exceptions' last lines the first one that is no mere pointer to another, else
    the last line. Without vLLM's prefix of process, level and time."""
    lines = [bare for line in text.splitlines() if (bare := _PREFIX.sub("", line.strip()).strip())]
    exceptions = [line for line in lines if _EXCEPTION.match(line) and not _HINT.search(line)]
    if exceptions:
        return exceptions[0][:500]
    return last_line(text)


def last_line(text: str) -> str:
    """What the engine did last, without vLLM's prefix."""
    for line in reversed(text.splitlines()):
        bare = _PREFIX.sub("", line.strip()).strip()
        if bare:
            return bare[:200]
    return "(nothing was logged)"
