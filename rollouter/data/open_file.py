"""A data file that is held open while a run reads from it.

Invariant: what is read is what stood in the file when it was opened. One that is replaced by another (a rename) is read on as
it was; one that is written anew in place is noticed, not served. It is read and not mapped: a mapped file that becomes shorter
ends the process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import xxhash

from rollouter.errors import DataChanged, DataError

PIECE_BYTES = 8 << 20


class OpenFile:
    """Read at any place, by any thread."""

    def __init__(self, path: Path) -> None:
        """Raises DataError."""
        self._path = path
        try:
            self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._number)
        self._stood = self._stands()
        self.size = self._stood[0]
        """Bytes."""

    def read(self, at: int, count: int) -> bytes:
        """`count` bytes from `at` on, all of them in the file. Raises DataChanged."""
        pieces: list[bytes] = []
        left = count
        try:
            while left and (piece := os.pread(self._number, left, at + count - left)):
                pieces.append(piece)
                left -= len(piece)
        except OSError as error:  # of the disk, not of a row
            raise DataChanged(f"{self._path}: cannot be read any more: {error.strerror}") from None
        self.check()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """(its first byte, piece) of the whole file. Raises DataChanged."""
        for at in range(0, self.size, PIECE_BYTES):
            yield at, self.read(at, min(PIECE_BYTES, self.size - at))

    def check(self) -> None:
        """Raises DataChanged when it was written to since it was opened."""
        if self._stands() != self._stood:
            raise DataChanged(
                f"{self._path}: was changed while a run reads it: got {self._words(self._stands())}, expected "
                f"{self._words(self._stood)}, as it was opened; bring it back and start again, or begin another run (to "
                "replace a file under a run, write another one and rename it)"
            )

    def fingerprint(self) -> str:
        """Of its bytes (hex). Raises DataChanged."""
        digest = xxhash.xxh3_64()
        for _, piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def _stands(self) -> tuple[int, int]:
        found = os.fstat(self._number)
        return found.st_size, found.st_mtime_ns

    @staticmethod
    def _words(stands: tuple[int, int]) -> str:
        size, written_ns = stands
        return f"{size} bytes written at {written_ns / 1e9:.3f}"
