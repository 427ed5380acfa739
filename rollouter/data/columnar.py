"""Parquet and Arrow files as tables: mapped, so that a file larger than memory is read a row at a time.

Invariant: a large Parquet file is converted once, piece by piece, to an Arrow file in the cache, named by its content, which
appears there whole or not at all.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet
import structlog
import xxhash

from rollouter.data.open_file import OpenFile
from rollouter.data.tables import hash_of
from rollouter.errors import DataError

log = structlog.get_logger()

MAX_BYTES_IN_MEMORY = 64 << 20
"""A smaller Parquet file is read as it is."""
_ROWS_PER_PIECE = 1024

_Batch = tuple[pa.RecordBatch, OpenFile | None]
"""Rows, and the file that they are mapped from; None: they are in memory."""


class ArrowTable:
    """Record batches, of one file or of several, in memory or mapped."""

    def __init__(self, files: list[OpenFile], batches: list[_Batch], *, name: str, default_source: str) -> None:
        """`files`: what the rows were read from, for the fingerprint."""
        self._files = files
        self._batches = [(batch, file) for batch, file in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch, _ in self._batches))
        self._name = name
        self.default_source = default_source
        self.needs_ground_truth = True

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def raw(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        at = index - (self._ends[number - 1] if number else 0)
        batch, file = self._batches[number]
        try:
            if file is not None:
                file.check()  # before as well: a mapped file that became shorter ends the process where it is read
            row = {name: batch.column(column)[at].as_py() for column, name in enumerate(batch.schema.names)}
            if file is not None:
                file.check()
            return row
        except DataError:
            raise
        except (pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise DataError(f"{self.where(index)}: cannot be read: {' '.join(str(error).split())}") from None

    def where(self, index: int) -> str:
        return f"{self._name} row {index + 1}"

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(",".join(file.fingerprint() for file in self._files).encode())


def open_parquet(path: Path, *, cache_dir: Path) -> ArrowTable:
    """Raises DataError."""
    file = OpenFile(path)
    try:
        batches: list[_Batch]
        if file.size <= MAX_BYTES_IN_MEMORY:
            batches = [(batch, None) for batch in parquet.ParquetFile(path).iter_batches(batch_size=_ROWS_PER_PIECE)]
        else:
            batches = _mapped(OpenFile(target := _converted(path, cache_dir)), target)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, "Parquet", error) from None
    return ArrowTable([file], batches, name=str(path), default_source=path.stem)


def open_arrow(path: Path) -> ArrowTable:
    """An Arrow file, of either of its formats. Raises DataError."""
    file = OpenFile(path)
    try:
        batches = _mapped(file, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, "Arrow", error) from None
    return ArrowTable([file], batches, name=str(path), default_source=path.stem)


def open_saved(directory: Path) -> ArrowTable:
    """What Hugging Face datasets' `save_to_disk` wrote: a data set, or a dictionary of splits with a split `train`.

    Raises DataError.
    """
    splits_file, state_file = directory / "dataset_dict.json", directory / "state.json"
    try:
        if splits_file.is_file():
            splits = json.loads(splits_file.read_text(encoding="utf-8"))["splits"]
            if "train" not in splits:
                raise DataError(f"{directory}: has splits {', '.join(splits)}, none is `train`: name {directory}/SPLIT")
            return open_saved(directory / "train")
        state = json.loads(state_file.read_text(encoding="utf-8"))
        paths = [directory / entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_files"):
            raise DataError(f"{directory}: rows are chosen by an index file: call flatten_indices() before save_to_disk()")
        files = [OpenFile(path) for path in paths]
        batches = [batch for file, path in zip(files, paths, strict=True) for batch in _mapped(file, path)]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{directory}: is no saved data set: {type(error).__name__}: {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(directory, "saved data set", error) from None
    name = directory.parent.name if directory.name == "train" else directory.name
    return ArrowTable(files, batches, name=str(directory), default_source=name)


def _mapped(file: OpenFile, path: Path) -> list[_Batch]:
    source = pa.memory_map(str(path))
    try:
        reader = ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return [(batch, file) for batch in ipc.open_stream(source)]
    return [(reader.get_batch(number), file) for number in range(reader.num_record_batches)]


def _converted(path: Path, cache_dir: Path) -> Path:
    target = cache_dir / "arrow" / f"{hash_of(path)}.arrow"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    log.info("converting Parquet file, once", path=str(path), to=str(target))
    file = parquet.ParquetFile(path)
    try:
        with ipc.new_file(str(part), file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=_ROWS_PER_PIECE):
                writer.write_batch(batch)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _unreadable(path: Path, what: str, error: Exception) -> DataError:
    return DataError(f"{path}: is no readable {what}: {' '.join(str(error).split())}")
