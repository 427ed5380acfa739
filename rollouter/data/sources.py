"""What `data.source` may name, opened: built-in tasks, generators, files, directories, functions.

Invariant: opening finds the rows and reads none of them beyond what finding takes; a source that is none is refused with the
choices named.
"""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from agent_loop.errors import USER_CODE_FAILURES, words_of
from configs.paths import cache_dir as default_cache_dir
from configs.schema import DataSettings
from rollouter.data.built_in import BUILT_IN
from rollouter.data.generated import PREFIX, open_reasoning_gym
from rollouter.data.rows import Keys, Row, first_problem, row_of
from rollouter.data.tables import JoinedTable, JsonLinesTable, MemoryTable, Table
from rollouter.errors import DataChanged, DataError

_LINES = (".jsonl", ".ndjson")
_READ = (*_LINES, ".json", ".parquet", ".arrow")


@dataclass(frozen=True)
class Rows:
    """The rows of all sources behind each other, checked as they are read."""

    tables: tuple[Table, ...]
    keys: Keys
    weights: tuple[float, ...] = ()
    """How often each row of each table comes in an epoch; empty: once."""

    @classmethod
    def of(cls, data: DataSettings, tables: tuple[Table, ...]) -> Rows:
        """The rows of these tables, read as `data` says."""
        return cls(tables=tables, keys=Keys.of(data), weights=data.weights)

    def __len__(self) -> int:
        return len(self._joined)

    def __getitem__(self, index: int) -> Row:
        """Raises DataError naming source, row, every problem, the columns found and what is needed."""
        table, at = self._joined.place(index)
        return row_of(table.raw(at), table.default_source, self.keys_at(index), where=table.where(at))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(map(len, self.tables))

    def raw(self, index: int) -> Any:
        return self._joined.raw(index)

    def keys_at(self, index: int) -> Keys:
        """How that row is read."""
        table, _ = self._joined.place(index)
        return self.keys if table.needs_ground_truth else replace(self.keys, needs_ground_truth=False)

    def where(self, index: int) -> str:
        """For messages: source and number of the row."""
        return self._joined.where(index)

    def fingerprint(self) -> str:
        """Of the content of all tables and of how rows are made of it (hex)."""
        return xxhash.xxh3_64_hexdigest(f"{self._joined.fingerprint()}\0{self.keys}\0{self.weights}".encode())

    @cached_property
    def _joined(self) -> JoinedTable:
        return JoinedTable(self.tables, default_source="")


def open_rows(data: DataSettings, *, cache_dir: Path | None = None) -> Rows:
    """Every source of the settings. Raises DataError."""
    cache = cache_dir or data_cache_dir(data)
    tables = tuple(open_table(source, cache_dir=cache) for source in data.sources)
    for source, table in zip(data.sources, tables, strict=True):
        if not len(table):
            raise DataError(f"{source}: no row found")
    return Rows.of(data, tables)


def read_all(rows: Rows, *, at_most: int | None = None) -> list[Row]:
    """All of them in memory, or the first `at_most`. Raises DataError with the first bad row in full and the others counted."""
    num_rows = len(rows) if at_most is None else min(len(rows), at_most)
    good: list[Row] = []
    problems: list[str] = []
    for index in range(num_rows):
        try:
            good.append(rows[index])
        except DataChanged:
            raise
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise first_problem(problems, num_rows)
    return good


def load_rows(source: str | Sequence[str]) -> list[Row]:
    """All rows of a source, or of several, in memory, columns named as they are by default. Raises DataError."""
    return read_all(open_rows(DataSettings(source=source if isinstance(source, str) else tuple(source))))


def data_cache_dir(data: DataSettings) -> Path:
    """Where converted files and measured lengths of these settings lie."""
    return data.cache_dir or default_cache_dir() / "data"


def open_table(source: str, *, cache_dir: Path) -> Table:
    """One source. Raises DataError."""
    if source in BUILT_IN:
        return MemoryTable(list(BUILT_IN[source]()), name=source, default_source=source)
    if source.startswith(PREFIX):
        return open_reasoning_gym(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path, cache_dir)
    if path.is_file():
        return _file(path, cache_dir)
    module_name, colon, function_name = source.partition(":")
    if colon and function_name.isidentifier() and all(part.isidentifier() for part in module_name.split(".")):
        return MemoryTable(_call(module_name, function_name), name=source, default_source=function_name)
    raise DataError(
        f"data.source: got {source!r}, expected one of {', '.join(sorted(BUILT_IN))}, reasoning_gym:NAME, an existing file "
        f"({', '.join(_READ)}) or directory, or a dotted path `module:function`"
    )


def _file(path: Path, cache_dir: Path) -> Table:
    from rollouter.data.columnar import open_arrow, open_parquet

    match path.suffix:
        case ".parquet":
            return open_parquet(path, cache_dir=cache_dir)
        case ".arrow":
            return open_arrow(path)
        case ".json":
            return _json(path)
        case _:
            return JsonLinesTable(path)


def _directory(path: Path, cache_dir: Path) -> Table:
    from rollouter.data.columnar import open_saved

    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return open_saved(path)
    files = sorted(file for file in path.iterdir() if file.suffix in _READ)
    if not files:
        raise DataError(f"{path}: neither a saved data set nor a directory with files of {', '.join(_READ)}")
    return JoinedTable([_file(file, cache_dir) for file in files], default_source=path.name)


def _json(path: Path) -> Table:
    """A list of rows, or JSON lines under another name."""
    try:
        with path.open("rb") as file:
            if not file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                return JsonLinesTable(path)
            file.seek(0)
            rows = json.loads(file.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise DataError(f"{path}: is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return MemoryTable(rows, name=str(path), default_source=path.stem)


def _call(module_name: str, function_name: str) -> list[Any]:
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except USER_CODE_FAILURES as error:
        raise DataError(f"data.source: got {module_name}:{function_name}, which does not import: {words_of(error)}") from error
    try:
        rows = function()
        if isinstance(rows, Iterable):
            return list(rows)
    except USER_CODE_FAILURES as error:
        raise DataError(f"data.source: {module_name}:{function_name} raised {words_of(error)}") from error
    raise DataError(f"data.source: {module_name}:{function_name} returned {type(rows).__name__}, expected rows")
