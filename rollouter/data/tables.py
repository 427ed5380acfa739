"""Tables: raw rows by number, from memory or from files of any size.

Invariant: a table's rows have a fixed order and number, reading one costs no other, and its fingerprint is that of its content:
files that differ in one byte, or in the order of rows, have different ones.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from agent_loop.errors import words_of
from rollouter.data.open_file import PIECE_BYTES, OpenFile
from rollouter.data.rows import canonical
from rollouter.errors import DataError

MAX_ROW_BYTES = 256 << 20
"""Of one line of a file."""
_FORMATS = {
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"BZh": "compressed by bzip2: unpack it",
    b"\xfd7zXZ\0": "compressed by xz: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"PAR1": "Parquet: name it .parquet",
    b"ARROW1": "Arrow: name it .arrow",
}
"""By the first bytes, what a file is that has no JSON lines."""


class Table(Protocol):
    """Raw rows by number, as their source gives them."""

    default_source: str
    """Data source of rows that name none."""
    needs_ground_truth: bool
    """False where some rows have none by nature."""

    def __len__(self) -> int: ...

    def raw(self, index: int) -> Any:
        """Row `index`, from 0. Raises DataError when the file has something else there, DataChanged when it is no longer what
        it was."""
        ...

    def where(self, index: int) -> str:
        """For messages: source and number of the row, from 1."""
        ...

    def fingerprint(self) -> str:
        """Of the content (hex)."""
        ...


class MemoryTable:
    """Rows that are all there."""

    def __init__(self, rows: Sequence[Any], *, name: str, default_source: str, numbers: Sequence[int] | None = None) -> None:
        """`numbers`: of the rows in their source, where they are not 1, 2, 3, …"""
        self._rows = rows
        self._name = name
        self._numbers = numbers
        self.default_source = default_source
        self.needs_ground_truth = True

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, index: int) -> Any:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name} row {self._numbers[index] if self._numbers else index + 1}"

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_64()
        for row in self._rows:
            digest.update(_text_of(row).encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        return digest.hexdigest()


class GeneratedTable:
    """Rows that a function makes, each from its number alone."""

    def __init__(self, make: Callable[[int], Any], *, size: int, name: str, default_source: str, recipe: str) -> None:
        """`recipe` names everything that the rows depend on."""
        self._make = make
        self._size = size
        self._name = name
        self._recipe = recipe
        self.default_source = default_source
        self.needs_ground_truth = False

    def __len__(self) -> int:
        return self._size

    def raw(self, index: int) -> Any:
        return self._make(index)

    def where(self, index: int) -> str:
        return f"{self._name} row {index + 1}"

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(self._recipe.encode())


class JsonLinesTable:
    """A file of one JSON value a line; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        """Finds the lines. Raises DataError."""
        self._path = path
        self.default_source = path.stem
        self.needs_ground_truth = True
        self._file = OpenFile(path)
        head = self._file.read(0, min(8, self._file.size))
        for magic, what in _FORMATS.items():
            if head.startswith(magic):
                raise DataError(f"{path}: expected JSON lines, and the file is {what}")
        self._starts, self._ends, self._numbers = _lines(self._file)

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, index: int) -> Any:
        start, size = int(self._starts[index]), int(self._ends[index] - self._starts[index])
        if size > MAX_ROW_BYTES:
            raise DataError(f"{self.where(index)}: got a line of {size} bytes, expected at most {MAX_ROW_BYTES}")
        line = self._file.read(start, size)
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.where(index)}: is not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
        except RecursionError:
            raise DataError(f"{self.where(index)}: is nested too deeply") from None
        except ValueError as error:  # an integer of thousands of digits
            raise DataError(f"{self.where(index)}: cannot be read: {error}") from None

    def where(self, index: int) -> str:
        return f"{self._path} row {self._numbers[index]}"

    def fingerprint(self) -> str:
        return self._file.fingerprint()


class JoinedTable:
    """Tables behind each other."""

    def __init__(self, tables: Sequence[Table], *, default_source: str) -> None:
        self._tables = tables
        self._ends = list(accumulate(map(len, tables)))
        self.default_source = default_source
        self.needs_ground_truth = all(table.needs_ground_truth for table in tables)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, index: int) -> Any:
        table, at = self.place(index)
        return table.raw(at)

    def where(self, index: int) -> str:
        table, at = self.place(index)
        return table.where(at)

    def fingerprint(self) -> str:
        parts = ",".join(f"{table.fingerprint()}:{len(table)}" for table in self._tables)
        return xxhash.xxh3_64_hexdigest(parts.encode())

    def place(self, index: int) -> tuple[Table, int]:
        """The table that holds row `index`, and its number there."""
        number = bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)


def _text_of(row: Any) -> str:
    try:
        return canonical(row)
    except Exception as error:  # noqa: BLE001 - a row that has no text is refused where it is read
        return words_of(error)


def hash_of(path: Path) -> str:
    """Of a file's bytes (hex). Raises DataError."""
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _lines(file: OpenFile) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first byte, byte behind the last, number from 1) of each line that is not blank."""
    breaks: list[npt.NDArray[np.int64]] = []
    firsts: list[npt.NDArray[np.uint8]] = []
    """The first byte of each line that has one."""
    at_start = True
    for at, piece in file.pieces():
        view = np.frombuffer(piece, np.uint8)
        found = np.flatnonzero(view == ord("\n"))
        starts = found + 1 if not at_start else np.concatenate([np.zeros(1, np.int64), found + 1])
        firsts.append(view[starts[starts < len(view)]])
        at_start = bool(view[-1] == ord("\n"))
        breaks.append(found + at)
    if not breaks:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    ends = np.concatenate([*breaks, [file.size]]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    if at_start:  # nothing is behind the last break
        starts, ends = starts[:-1], ends[:-1]
    suspects = np.isin(np.concatenate(firsts), np.frombuffer(b" \t\r\n", np.uint8))
    sizes = ends - starts
    blank = [
        at
        for at in np.flatnonzero(suspects).tolist()
        if sizes[at] <= MAX_ROW_BYTES and not file.read(int(starts[at]), int(sizes[at])).strip()
    ]
    kept = np.ones(len(starts), np.bool_)
    kept[blank] = False
    return starts[kept], ends[kept], np.flatnonzero(kept) + 1
