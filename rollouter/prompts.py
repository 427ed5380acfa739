"""The prompt source: tasks in a fixed order, each issued exactly once an epoch, and the held-out ones kept apart.

Invariant: the order of issues is a pure function of (tasks, seed, shuffle) and the cursor is one number, so after a restore the
next task is the one that follows; no task is lost and none is repeated. A prompt's text is either trained or held out.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from agent_loop.errors import USER_CODE_FAILURES, words_of
from agent_loop.task import Task
from configs.schema import DataSettings
from rollouter.codec import Codec
from rollouter.data.encoding import Limits, OnOverlong, Refusal, nothing_left, task_of
from rollouter.data.framing import Framing
from rollouter.data.lazy import Hashed, LazyTasks, positions_kept
from rollouter.data.measure import Model, measure
from rollouter.data.order import Order
from rollouter.data.rows import Row, canonical, unwritable
from rollouter.data.sources import Rows, data_cache_dir, read_all
from rollouter.errors import DataError

log = structlog.get_logger()

MAX_ROWS_IN_MEMORY = 20_000
"""With data.filter=auto, more rows are not all encoded at the start."""
LOOK_AHEAD = 64
"""Numbers of the order that are made ready ahead."""
PREPARE_FROM = 20_000
"""Epochs of at least so many issues have their order made by a thread, half an epoch ahead."""

Curriculum = Callable[[Sequence[Task], int, int], Sequence[int]]
"""(tasks, epoch, seed) → positions in the order in which they come in that epoch; as many as there are tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCursor:
    """Where a source stands."""

    issued: int
    """Tasks issued since the start, over all epochs."""
    fingerprint: str
    """Of the tasks, in load order (hex): a cursor means nothing over other data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One task handed out, once unless the trainer asks for it again."""

    number: int
    """0, 1, 2, … over all epochs."""
    epoch: int
    task: Task
    requeue: int = 0
    """How often it was issued before, each time for a group that was too old when it came."""
    replaces: str = ""
    """The last such group."""
    replay: int = 0
    """Number of this one among the issues that came out of turn, from 1; 0: it came in the data's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A number of the order that has no task."""

    number: int
    epoch: int
    reason: Refusal


class TaskTable(Protocol):
    """Tasks by position."""

    fingerprint: str
    """Of all of them, in order (hex)."""

    def __len__(self) -> int: ...

    def at(self, position: int) -> Task | Refusal:
        """What the position holds."""
        ...

    def at_hand(self, position: int, then: Callable[[], None]) -> bool:
        """Whether `at` has nothing to make for it; else it is made by a thread, which calls `then`."""
        ...

    def find(self, task_id: str) -> Task | None:
        """The task of that id, if it is one of those that are trained."""
        ...

    def expect(self, positions: Iterable[int]) -> None:
        """These are asked for next."""
        ...


class MemoryTasks:
    """Tasks that are all there."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self._by_id = {task.task_id: task for task in tasks}
        self.fingerprint = _fingerprint(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def at(self, position: int) -> Task | Refusal:
        return self._tasks[position]

    def at_hand(self, position: int, then: Callable[[], None]) -> bool:
        return True

    def find(self, task_id: str) -> Task | None:
        return self._by_id.get(task_id)

    def expect(self, positions: Iterable[int]) -> None:
        """Nothing is to be made."""


class PromptSource:
    """Hands out the trained tasks, epoch after epoch."""

    def __init__(
        self,
        tasks: Sequence[Task] | TaskTable,
        *,
        seed: int,
        shuffle: bool,
        num_epochs: int | None,
        order: Order | None = None,
    ) -> None:
        """`num_epochs` None: without end. `order` None: each task once an epoch. Raises DataError when there is no task."""
        if not len(tasks):
            raise DataError("no task is left to train on")
        self._table: TaskTable = MemoryTasks(tasks) if isinstance(tasks, Sequence) else tasks
        self._order = order or Order((len(tasks),), seed=seed, shuffle=shuffle)
        self._num_epochs = num_epochs
        self._issued = 0
        self._expected = 0
        self._prepared = 0
        """Epoch whose order a thread was asked for last."""

    @property
    def cursor(self) -> PromptCursor:
        return PromptCursor(issued=self._issued, fingerprint=self._table.fingerprint)

    @property
    def num_tasks(self) -> int:
        """Issues of one epoch."""
        return self._order.epoch_size

    def task(self, task_id: str) -> Task | None:
        """The task of that name, if it is one of those that are trained."""
        return self._table.find(task_id)

    @property
    def remaining(self) -> int | None:
        """Numbers that may still be issued; None: without end."""
        if self._num_epochs is None:
            return None
        return max(0, self._num_epochs * self.num_tasks - self._issued)

    def restore(self, cursor: PromptCursor) -> None:
        """Go on behind `cursor`. Raises DataError when the data is not the one it was taken over."""
        if cursor.fingerprint != self._table.fingerprint:
            raise DataError(
                f"data changed: got tasks with fingerprint {self._table.fingerprint}, expected {cursor.fingerprint}, over "
                f"which {cursor.issued} tasks were issued"
            )
        self._issued = cursor.issued

    def skip(self, count: int) -> None:
        """Count `count` tasks as issued: an earlier process issued them."""
        if count < 0:
            raise ValueError(f"skip: got {count}, expected >= 0")
        self._issued += count

    def next(self) -> Issue | None:
        """Issue the next task, leaving out numbers that have none; None once `num_epochs` are over. Raises DataError when a
        whole epoch has none."""
        for _ in range(self.num_tasks):
            issue = self.peek()
            if issue is not None:
                self._issued += 1
            if not isinstance(issue, Refused):
                return issue
        raise DataError(f"no task is left to train on: all {self.num_tasks} rows of an epoch were left out")

    def is_ready(self, ahead: int, then: Callable[[], None]) -> bool:
        """Whether `peek(ahead)` has nothing to make; else it is made by a thread, which calls `then` from there."""
        remaining = self.remaining
        if remaining is not None and remaining <= ahead:
            return True
        number = self._issued + ahead
        is_made = self._table.at_hand(self._order.at(number)[1], then)
        self._look_ahead(number)
        return is_made

    def peek(self, ahead: int = 0) -> Issue | Refused | None:
        """What comes after `ahead` other numbers; None if `num_epochs` are over by then. Raises DataError."""
        remaining = self.remaining
        if remaining is not None and remaining <= ahead:
            return None
        number = self._issued + ahead
        self._look_ahead(number)
        self._prepare(number)
        epoch, position = self._order.at(number)
        found = self._table.at(position)
        if isinstance(found, Refusal):
            return Refused(number=number, epoch=epoch, reason=found)
        return Issue(number=number, epoch=epoch, task=found)

    def head(self, count: int) -> list[Task]:
        """The tasks among the next `count` numbers, which stay at hand where they had to be made. Raises DataError."""
        numbers = (self.peek(ahead) for ahead in range(min(count, self.num_tasks)))
        return [issue.task for issue in numbers if isinstance(issue, Issue)]

    def _prepare(self, number: int) -> None:
        """Drawing millions of numbers, or a user's curriculum, must not hold up the event loop where an epoch begins."""
        size = self.num_tasks
        epoch, place = divmod(number, size)
        following = epoch + 1
        if size < PREPARE_FROM or 2 * place < size or following <= self._prepared or following == self._num_epochs:
            return
        self._prepared = following
        threading.Thread(target=self._order.prepare, args=(following,), name="order-ahead", daemon=True).start()

    def _look_ahead(self, number: int) -> None:
        """Tell a table that makes its tasks what comes, a piece at a time."""
        if isinstance(self._table, MemoryTasks) or number + LOOK_AHEAD // 2 < self._expected:
            return
        first = max(number + 1, self._expected)
        self._expected = number + 1 + LOOK_AHEAD
        if self._num_epochs is not None:
            self._expected = min(self._expected, self._num_epochs * self.num_tasks)
        self._table.expect([self._order.at(one)[1] for one in range(first, self._expected)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The data of a run, split."""

    source: PromptSource
    held_out: tuple[Task, ...]
    """In an order drawn by the seed, so that the first n are a fair selection."""


def prepare(
    rows: Rows | Sequence[Row],
    data: DataSettings,
    codec: Codec,
    *,
    seed: int,
    max_prompt_tokens: int,
    model: Model | None = None,
    max_held_out: int = 64,
    framing: Framing | None = None,
) -> Prompts:
    """Encode `rows`, leave out or cut prompts beyond `max_prompt_tokens` (counted and logged) and split off the held-out share.

    `model`: where other processes find the codec's tokenizer; None: this process measures by itself. `max_held_out`: how many
    held-out tasks are looked for where not all are in memory. `framing`: what the agent loops put around a prompt, which counts
    too. Raises DataError when nothing is left.
    """
    limits = Limits(max_prompt_tokens=max_prompt_tokens, on_overlong=OnOverlong(data.on_overlong), framing=framing or Framing())
    if isinstance(rows, Rows) and (data.filter == "lazy" or (len(rows) > MAX_ROWS_IN_MEMORY and data.curriculum is None)):
        return _prepare_lazily(rows, data, codec, limits, seed=seed, model=model, max_held_out=max_held_out)
    all_rows = read_all(rows) if isinstance(rows, Rows) else list(rows)
    tasks = encoded(all_rows, codec, limits)
    trained, held_out = split([task for _, task in tasks], fraction=data.held_out_fraction, seed=seed)
    log.info(
        "tasks loaded", source=data.source, trained=len(trained), held_out=len(held_out), refused=len(all_rows) - len(tasks)
    )
    order = None
    if data.weights and isinstance(rows, Rows):
        row_of_task = {task.task_id: number for number, task in tasks}
        parts = np.searchsorted(np.cumsum(rows.sizes), [row_of_task[task.task_id] for task in trained], side="right")
        sizes = np.bincount(parts, minlength=len(rows.sizes)).tolist()
        order = Order(sizes, seed=seed, shuffle=data.shuffle, weights=data.weights)
    elif data.curriculum is not None:
        hook = load_curriculum(data.curriculum)
        order = Order((len(trained),), seed=seed, shuffle=data.shuffle, curriculum=lambda epoch: hook(trained, epoch, seed))
    source = PromptSource(trained, seed=seed, shuffle=data.shuffle, num_epochs=data.num_epochs, order=order)
    return Prompts(source=source, held_out=tuple(held_out))


def _prepare_lazily(
    rows: Rows, data: DataSettings, codec: Codec, limits: Limits, *, seed: int, model: Model | None, max_held_out: int
) -> Prompts:
    by_hash = Hashed(fraction=data.held_out_fraction, seed=seed)
    kept: npt.NDArray[np.int64] | None = None
    sizes: Sequence[int] = rows.sizes
    if data.filter == "at_start":
        measures = measure(rows, data, codec, model, cache_dir=data_cache_dir(data), framing=limits.framing)
        if measures.problems:
            raise DataError(f"{measures.problems[0]} ({int((measures.lengths < 0).sum())} bad rows of {len(rows)})")
        kept = positions_kept(measures, limits, by_hash)
        if not kept.size:
            raise nothing_left(len(rows), Counter(), limits, int(measures.lengths.max()))
        sizes = np.diff(np.searchsorted(kept, np.cumsum([0, *rows.sizes]))).tolist()
    table = LazyTasks(rows, codec, limits, by_hash, kept=kept)
    held_out = tuple(table.held_out(max_held_out if data.held_out_fraction else 0, seed=seed))
    order = Order(sizes, seed=seed, shuffle=data.shuffle, weights=data.weights)
    log.info(
        "tasks are made as their turn comes", source=data.source, rows=len(rows), positions=len(table), held_out=len(held_out)
    )
    source = PromptSource(table, seed=seed, shuffle=data.shuffle, num_epochs=data.num_epochs, order=order)
    return Prompts(source=source, held_out=held_out)


def encode(
    rows: Sequence[Row], codec: Codec, *, max_prompt_tokens: int, on_overlong: OnOverlong = OnOverlong.DROP
) -> list[Task]:
    """Tasks of the rows whose prompt has 1 to `max_prompt_tokens` tokens, or is cut to them. Raises DataError when none has."""
    return [task for _, task in encoded(rows, codec, Limits(max_prompt_tokens=max_prompt_tokens, on_overlong=on_overlong))]


def encoded(rows: Sequence[Row], codec: Codec, limits: Limits) -> list[tuple[int, Task]]:
    """(number of its row from 0, task) of each row that is one. Raises DataError when none is."""
    tasks: list[tuple[int, Task]] = []
    ids: set[str] = set()
    refused: Counter[Refusal] = Counter()
    longest = 0
    for number, row in enumerate(rows):
        if problems := unwritable(row):
            log.warning("row is left out", row=number + 1, error="; ".join(map(str, problems)))
            refused[Refusal.BAD_ROW] += 1
            continue
        try:
            made = task_of(row, codec, limits)
        except DataError as error:
            raise DataError(f"data row {number + 1}: {error}") from error
        if isinstance(made, Refusal):
            refused[made] += 1
            longest = max(longest, limits.framing.length_of(row, codec))
            continue
        task_id = _unique(made.task_id, ids)
        ids.add(task_id)
        tasks.append((number, made if task_id == made.task_id else replace(made, task_id=task_id)))
    if refused:
        log.warning("prompts refused", refused=refused.total(), of=len(rows), max_prompt_tokens=limits.max_prompt_tokens)
    if not tasks:
        raise nothing_left(len(rows), refused, limits, longest)
    return tasks


def load_curriculum(path: str) -> Curriculum:
    """The function at `module:function`, what it raises wrapped. Raises DataError naming what is missing."""
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (*USER_CODE_FAILURES, ValueError) as error:
        raise DataError(f"data.curriculum: got {path!r}, expected `module:function`: {words_of(error)}") from error

    def order(tasks: Sequence[Task], epoch: int, seed: int) -> Sequence[int]:
        try:
            found: Sequence[int] = function(tasks, epoch, seed)
        except USER_CODE_FAILURES as error:
            raise DataError(f"data.curriculum: {path} raised {words_of(error)} for epoch {epoch}") from error
        return found

    return order


def split(tasks: Sequence[Task], *, fraction: float, seed: int) -> tuple[list[Task], list[Task]]:
    """(trained, held out): `fraction` of the distinct prompt texts is held out, chosen by a hash of seed and text, whatever
    the order of rows. At least one text stays in training; at least one is held out if fraction > 0.

    Raises DataError when a share is asked for and there is but one distinct prompt.
    """
    texts = {task.prompt_text: xxhash.xxh3_64_intdigest(f"{seed}\0{task.prompt_text}".encode()) for task in tasks}
    if fraction == 0:
        return list(tasks), []
    if len(texts) < 2:
        raise DataError(f"data.held_out_fraction={fraction}: {len(texts)} distinct prompt cannot be split; set it to 0")
    count = min(len(texts) - 1, max(1, round(fraction * len(texts))))
    chosen = frozenset(sorted(texts, key=lambda text: (texts[text], text))[:count])
    trained = [task for task in tasks if task.prompt_text not in chosen]
    held_out = [task for task in tasks if task.prompt_text in chosen]
    return trained, sorted(held_out, key=lambda task: (texts[task.prompt_text], task.task_id))


def _unique(task_id: str, taken: set[str]) -> str:
    if task_id not in taken:
        return task_id
    number = 2
    while f"{task_id}~{number}" in taken:
        number += 1
    return f"{task_id}~{number}"


def _fingerprint(tasks: Sequence[Task]) -> str:
    digest = xxhash.xxh3_64()
    for task in tasks:
        digest.update(task.task_id.encode())
        digest.update(task.prompt_ids.tobytes())
        digest.update(canonical(task.ground_truth).encode())
    return digest.hexdigest()
