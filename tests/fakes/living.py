"""Which processes live: the dead whose parents have not collected them do not."""

from __future__ import annotations

import psutil


def is_alive(process: int | psutil.Process) -> bool:
    """Also of a number that was, or is given up in this moment."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living_children(word: str) -> list[psutil.Process]:
    """Descendants of this process whose command line has `word` in it, in whatever case."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if word.lower() in " ".join(child.cmdline()).lower():
                found.append(child)
        except psutil.NoSuchProcess:  # a zombie is one too
            continue
    return found
