"""Files that are whole or not there, on the disk itself."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Return once the file or directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path`, on the disk; whoever reads meanwhile, and after any death, sees the old content or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    fsync(part)
    part.replace(path)
    fsync(path.parent)
