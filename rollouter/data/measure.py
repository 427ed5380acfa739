"""Lengths of all prompts, measured in parallel and kept: whoever starts again over the same data and tokenizer reads them.

Invariant: what is kept is found by the fingerprints of rows, tokenizer and framing and by nothing else, appears in the cache
whole or not at all, and one that does not fit its rows is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from configs.schema import DataSettings
from rollouter.codec import load_codec
from rollouter.data.framing import Framing, PromptCodec
from rollouter.data.rows import canonical
from rollouter.data.sources import Rows, data_cache_dir, open_rows
from rollouter.data.tables import hash_of
from rollouter.errors import DataChanged, DataError

log = structlog.get_logger()

VERSION = 2
"""Of how lengths are measured."""
ROWS_PER_JOB = 2000
BAD = -1
"""Length of a row that cannot be read or that the chat template refuses."""
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measures:
    """Of N rows, in their order."""

    lengths: npt.NDArray[np.int32]
    """[N] tokens of the prompt, BAD where there is none."""
    prompts: npt.NDArray[np.uint64]
    """[N] hash of the prompt: rows of one prompt have one."""
    problems: tuple[str, ...] = ()
    """The first few bad rows, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Where a process that measures finds the tokenizer."""

    directory: str
    trust_remote_code: bool = False

    def fingerprint(self) -> str:
        """Of the tokenizer's files, chat template included."""
        names = ("tokenizer", "vocab", "merges", "special_tokens", "chat_template", "added_tokens")
        files = sorted(file for file in Path(self.directory).iterdir() if file.is_file() and file.name.startswith(names))
        return xxhash.xxh3_64_hexdigest(",".join(f"{file.name}:{hash_of(file)}" for file in files).encode())


def measure(
    rows: Rows,
    data: DataSettings,
    codec: PromptCodec,
    model: Model | None,
    *,
    cache_dir: Path,
    framing: Framing | None = None,
) -> Measures:
    """Lengths of all rows under `framing` (None: of their prompts alone); from the cache if they are there. `model` None:
    measured in this process, and not kept. Raises DataChanged when the sources do not stand still meanwhile."""
    framing = framing or Framing()
    if model is None:
        return _joined([measured(rows, codec, 0, len(rows), framing)])
    parts = (str(VERSION), rows.fingerprint(), model.fingerprint(), framing.fingerprint())
    key = xxhash.xxh3_64_hexdigest("\0".join(parts).encode())
    path = cache_dir / "lengths" / f"{key}.npz"
    kept = _read(path, len(rows))
    if kept is not None:
        log.info("prompt lengths found in the cache", rows=len(rows), path=str(path))
        return kept
    processes = data.filter_processes or os.cpu_count() or 1
    log.info("measuring prompts", rows=len(rows), processes=processes)
    jobs = [(first, min(len(rows), first + ROWS_PER_JOB)) for first in range(0, len(rows), ROWS_PER_JOB)]
    if processes == 1 or len(jobs) == 1:
        result = _joined([measured(rows, codec, first, last, framing) for first, last in jobs])
    else:
        result = _joined(list(_in_processes(jobs, data, model, framing, processes)))
        if (
            open_rows(data, cache_dir=cache_dir).fingerprint() != rows.fingerprint()
        ):  # each process opened the sources by itself
            raise _changed(data)
    _write(path, result)
    return result


def measured(rows: Rows, codec: PromptCodec, first: int, last: int, framing: Framing) -> Measures:
    """Of the rows from `first` up to `last`."""
    lengths = np.full(last - first, BAD, np.int32)
    prompts = np.zeros(last - first, np.uint64)
    problems: list[str] = []
    for at in range(first, last):
        try:
            row = rows[at]
            length = framing.length_of(row, codec)
        except DataChanged:
            raise
        except DataError as error:
            text = str(error)
            problems.append(text if text.startswith(rows.where(at)) else f"{rows.where(at)}: {text}")
            continue
        lengths[at - first] = length
        prompts[at - first] = prompt_hash(row.prompt)
    return Measures(lengths=lengths, prompts=prompts, problems=tuple(problems[:_MAX_SHOWN]))


def prompt_hash(prompt: object) -> int:
    """64 bits that are the same for equal prompts."""
    return xxhash.xxh3_64_intdigest(canonical(prompt).encode())


_worker: Callable[[int, int], Measures] | None = None


def _begin(settings: str, model: Model, framing: Framing, cache_dir: Path) -> None:
    global _worker
    data = DataSettings.model_validate_json(settings)
    rows = open_rows(data, cache_dir=cache_dir)
    codec = load_codec(model.directory, trust_remote_code=model.trust_remote_code)

    def work(first: int, last: int) -> Measures:
        if last > len(rows):
            raise _changed(data)
        return measured(rows, codec, first, last, framing)

    _worker = work


def _job(first: int, last: int) -> Measures:
    assert _worker is not None, "a job came before its process had begun"
    return _worker(first, last)


def _in_processes(
    jobs: Sequence[tuple[int, int]], data: DataSettings, model: Model, framing: Framing, processes: int
) -> Iterator[Measures]:
    arguments = (data.model_dump_json(), model, framing, data_cache_dir(data))
    with ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=get_context("spawn"), initializer=_begin, initargs=arguments
    ) as pool:
        yield from pool.map(_job, *zip(*jobs, strict=True))


def _changed(data: DataSettings) -> DataChanged:
    return DataChanged(f"data.source: {data.source}: was changed while its prompts were measured: start again")


def _joined(parts: Sequence[Measures]) -> Measures:
    return Measures(
        lengths=np.concatenate([part.lengths for part in parts]),
        prompts=np.concatenate([part.prompts for part in parts]),
        problems=tuple(problem for part in parts for problem in part.problems)[:_MAX_SHOWN],
    )


def _read(path: Path, num_rows: int) -> Measures | None:
    try:
        with np.load(path, allow_pickle=False) as kept:
            lengths, prompts = kept["lengths"], kept["prompts"]
            problems = tuple(kept["problems"].tolist())
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    if lengths.shape != (num_rows,) or prompts.shape != (num_rows,):
        return None
    return Measures(lengths=lengths.astype(np.int32), prompts=prompts.astype(np.uint64), problems=problems)


def _write(path: Path, measures: Measures) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, lengths=measures.lengths, prompts=measures.prompts, problems=np.array(measures.problems, np.str_))
        part.replace(path)
    except OSError as error:
        log.warning("prompt lengths are not kept", path=str(path), problem=error.strerror or str(error))
        with suppress(OSError):
            part.unlink()
