"""Where messages that did not decode are kept, for whoever looks for the reason.

Invariant: a bounded number of files and bytes, each file complete; what no longer fits is counted by the hub all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from sample_bus.packing import pack

log = structlog.get_logger()

MAX_FILES = 64
MAX_BYTES = 256 << 20


class Quarantine:
    def __init__(self, directory: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
        """`directory` is made when the first message comes; what an earlier process left there counts."""
        self._directory = directory
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._full = False

    def keep(self, frames: Sequence[bytes], error: str, source: str) -> Path | None:
        """Write the frames, the reason and the sender as one msgpack map; None if that is not possible."""
        if self._full:
            return None
        content = pack({"error": error, "source": source, "frames": [bytes(frame) for frame in frames]})
        try:
            return self._write(content)
        except OSError as problem:
            log.warning("rejected messages are not kept", directory=str(self._directory), problem=str(problem))
            self._full = True
            return None

    def _write(self, content: bytes) -> Path | None:
        kept = [path.stat().st_size for path in self._directory.glob("*.msgpack")] if self._directory.is_dir() else []
        if len(kept) >= self._max_files or sum(kept) + len(content) > self._max_bytes:
            self._full = len(kept) >= self._max_files
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        number = len(kept)
        while (path := self._directory / f"rejected-{number:04d}.msgpack").exists():
            number += 1
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.replace(path)
        return path
