"""Which processes of a kind live below this one."""

from __future__ import annotations

import psutil


def living_children(word: str) -> list[psutil.Process]:
    """Descendants of this process whose command line has `word` in it. The dead that nobody has waited for have none."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if word in " ".join(child.cmdline()).lower():
                found.append(child)
        except psutil.NoSuchProcess:  # a zombie is one too
            continue
    return found
