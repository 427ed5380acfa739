"""Tasks of data that does not fit into memory, made as their turn comes.

Invariant: what a position holds does not depend on when or how often it is asked for; a task's id names its row, so it is found
again without a search. A thread makes ahead what is expected next, so that asking seldom waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from agent_loop.task import Task
from rollouter.data.encoding import Limits, Refusal, task_of
from rollouter.data.framing import PromptCodec
from rollouter.data.measure import BAD, Measures, prompt_hash
from rollouter.data.sources import Rows
from rollouter.errors import DataChanged, DataError

log = structlog.get_logger()

MAX_KEPT_TASKS = 1024
MAX_SCANNED_ROWS = 1_000_000
"""Rows that are looked at to find held-out ones."""


class Hashed:
    """The share of prompts that is held out, by a hash of seed and prompt: equal prompts are on one side."""

    def __init__(self, *, fraction: float, seed: int) -> None:
        self._bound = int(fraction * 2**64)
        self._seed = seed

    def holds_out(self, hash_of_prompt: int) -> bool:
        if self._bound == 0:
            return False
        return xxhash.xxh3_64_intdigest(f"{self._seed}\0{hash_of_prompt}".encode()) < self._bound


class LazyTasks:
    """A task for each position that has one."""

    def __init__(
        self, rows: Rows, codec: PromptCodec, limits: Limits, split: Hashed, *, kept: npt.NDArray[np.int64] | None = None
    ) -> None:
        """`kept`: the row of each position, where rows were measured; None: positions are rows, and what is too long or held
        out is refused as it comes."""
        self._rows = rows
        self._codec = codec
        self._limits = limits
        self._split = split
        self._kept = kept
        self._made: OrderedDict[int, Task | Refusal | Exception] = OrderedDict()
        """By row; the exception that its making raised, if it did."""
        self._awaited: dict[int, list[Callable[[], None]]] = {}
        """By row, who is told when it is made."""
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="tasks-ahead")
        content = f"{rows.fingerprint()}\0lazy".encode() + (b"" if kept is None else kept.tobytes())
        self.fingerprint = xxhash.xxh3_64_hexdigest(content)

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self._kept)

    def at(self, position: int) -> Task | Refusal:
        """What the position holds. Raises DataError where a prompt that is too long is an error."""
        return self._of_row(self._row_of(position))

    def at_hand(self, position: int, then: Callable[[], None]) -> bool:
        """Whether `at` has nothing to make for it; else it is made by the thread, which calls `then`."""
        row = self._row_of(position)
        with self._lock:
            if row in self._made:
                return True
            is_asked_for = row in self._awaited
            self._awaited.setdefault(row, []).append(then)
        if not is_asked_for:
            self._ahead.submit(self._make_all, [position])
        return False

    def find(self, task_id: str) -> Task | None:
        """The task of that id."""
        _, _, number = task_id.rpartition("/")
        if not (number.isascii() and number.isdigit() and int(number) < len(self._rows)):
            return None
        found = self._of_row(int(number))
        return found if isinstance(found, Task) and found.task_id == task_id else None

    def expect(self, positions: Iterable[int]) -> None:
        """Make these ahead: they are asked for next."""
        wanted = [int(one) for one in positions]
        self._ahead.submit(self._make_all, wanted)

    def held_out(self, count: int, *, seed: int) -> Iterator[Task]:
        """Up to `count` held-out tasks, drawn by the seed."""
        found = 0
        for row in scattered(len(self._rows), seed=seed, at_most=MAX_SCANNED_ROWS):
            if found == count:
                return
            task = self._make(row, trained=False)
            if isinstance(task, Task):
                found += 1
                yield task

    def close(self) -> None:
        """Nothing is made ahead any more."""
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def _make_all(self, positions: list[int]) -> None:
        for position in positions:
            try:
                self.at(position)
            except Exception as error:  # noqa: BLE001 - kept, and raised again where the task is asked for
                log.debug("task not made ahead", error=str(error))

    def _row_of(self, position: int) -> int:
        return position if self._kept is None else int(self._kept[position])

    def _of_row(self, row: int) -> Task | Refusal:
        with self._lock:
            made = self._made.get(row)
            if made is not None:
                self._made.move_to_end(row)
        if made is None:
            try:
                made = self._make(row, trained=True)
            except Exception as error:  # noqa: BLE001 - raised below, and to everybody who asks later
                made = error
            self._keep(row, made)
        if isinstance(made, Exception):
            raise made
        return made

    def _keep(self, row: int, made: Task | Refusal | Exception) -> None:
        with self._lock:
            self._made[row] = made
            while len(self._made) > MAX_KEPT_TASKS:
                self._made.popitem(last=False)
            awaited = self._awaited.pop(row, [])
        for then in awaited:
            then()

    def _make(self, number: int, *, trained: bool) -> Task | Refusal:
        """`trained`: of the trained side of the split; else of the other one."""
        try:
            row = self._rows[number]
        except DataChanged:
            raise
        except DataError as error:
            log.warning("row is left out", error=str(error))
            return Refusal.BAD_ROW
        if self._split.holds_out(prompt_hash(row.prompt)) is trained:
            return Refusal.HELD_OUT
        name = row.task_id or row.data_source
        try:
            return task_of(row, self._codec, self._limits, task_id=f"{name}/{number}")
        except DataError as error:
            raise DataError(f"{self._rows.where(number)}: {error}") from error


def positions_kept(measures: Measures, limits: Limits, split: Hashed) -> npt.NDArray[np.int64]:
    """Rows that are trained: readable, not too long, not held out."""
    lengths = measures.lengths
    fits = lengths > 0
    for length in np.unique(lengths[fits]).tolist():
        if limits.refusal_of(length) is not None:
            fits &= lengths != length
    hashes = measures.prompts
    out = np.array([split.holds_out(int(one)) for one in hashes.tolist()], np.bool_)
    return np.flatnonzero(fits & ~out & (lengths != BAD)).astype(np.int64)


def scattered(size: int, *, seed: int, at_most: int) -> Iterator[int]:
    """Numbers below `size`, each once, in an order drawn by the seed, without a list of them all: i → (a i + b) mod size."""
    if size == 0:
        return
    draw = np.random.default_rng([seed, size])
    step = int(draw.integers(1, size + 1))
    while np.gcd(step, size) != 1:
        step = step % size + 1
    start = int(draw.integers(size))
    for number in range(min(size, at_most)):
        yield (start + number * step) % size
