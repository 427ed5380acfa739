"""The prompt source: tasks in a fixed order, each issued exactly once an epoch, and the held-out ones kept apart.

Invariant: the order of issues is a pure function of (tasks, seed, shuffle) and the cursor is one number, so after a restore the
next task is the one that follows; no task is lost and none is repeated. A prompt's text is either trained or held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import xxhash

from agent_loop.task import Task
from configs.schema import DataSettings
from rollouter.codec import Codec
from rollouter.errors import DataError
from rollouter.tasks import Row

log = structlog.get_logger()


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


class PromptSource:
    """Hands out the trained tasks, epoch after epoch."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool, num_epochs: int | None) -> None:
        """`num_epochs` None: without end. Raises DataError when there is no task."""
        if not tasks:
            raise DataError("no task is left to train on")
        self._tasks = tuple(tasks)
        self._by_id = {task.task_id: task for task in tasks}
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._issued = 0
        self._orders: dict[int, Sequence[int]] = {}
        self._fingerprint = _fingerprint(tasks)

    @property
    def cursor(self) -> PromptCursor:
        return PromptCursor(issued=self._issued, fingerprint=self._fingerprint)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def task(self, task_id: str) -> Task | None:
        """The task of that name, if it is one of those that are trained."""
        return self._by_id.get(task_id)

    @property
    def remaining(self) -> int | None:
        """Tasks that may still be issued; None: without end."""
        if self._num_epochs is None:
            return None
        return max(0, self._num_epochs * len(self._tasks) - self._issued)

    def restore(self, cursor: PromptCursor) -> None:
        """Go on behind `cursor`. Raises DataError when the data is not the one it was taken over."""
        if cursor.fingerprint != self._fingerprint:
            raise DataError(
                f"data changed: got tasks with fingerprint {self._fingerprint}, expected {cursor.fingerprint}, over which "
                f"{cursor.issued} tasks were issued"
            )
        self._issued = cursor.issued

    def skip(self, count: int) -> None:
        """Count `count` tasks as issued: an earlier process issued them."""
        if count < 0:
            raise ValueError(f"skip: got {count}, expected >= 0")
        self._issued += count

    def next(self) -> Issue | None:
        """Issue the next task; None once `num_epochs` are over."""
        issue = self.peek()
        if issue is not None:
            self._issued += 1
        return issue

    def peek(self, ahead: int = 0) -> Issue | None:
        """The issue that comes after `ahead` others; None if `num_epochs` are over by then."""
        remaining = self.remaining
        if remaining is not None and remaining <= ahead:
            return None
        number = self._issued + ahead
        epoch, position = divmod(number, len(self._tasks))
        return Issue(number=number, epoch=epoch, task=self._tasks[self._epoch_order(epoch)[position]])

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if epoch not in self._orders:
            count = len(self._tasks)
            order = np.random.default_rng([self._seed, epoch]).permutation(count).tolist() if self._shuffle else range(count)
            self._orders = {known: self._orders[known] for known in (epoch - 1, epoch + 1) if known in self._orders}
            self._orders[epoch] = order
        return self._orders[epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The data of a run, split."""

    source: PromptSource
    held_out: tuple[Task, ...]
    """In an order drawn by the seed, so that the first n are a fair selection."""


def prepare(rows: Sequence[Row], data: DataSettings, codec: Codec, *, seed: int, max_prompt_tokens: int) -> Prompts:
    """Encode `rows`, leave out prompts beyond `max_prompt_tokens` (counted and logged) and split off the held-out share.

    Raises DataError when nothing is left.
    """
    tasks = encode(rows, codec, max_prompt_tokens=max_prompt_tokens)
    trained, held_out = split(tasks, fraction=data.held_out_fraction, seed=seed)
    log.info("tasks loaded", source=data.source, trained=len(trained), held_out=len(held_out), refused=len(rows) - len(tasks))
    source = PromptSource(trained, seed=seed, shuffle=data.shuffle, num_epochs=data.num_epochs)
    return Prompts(source=source, held_out=tuple(held_out))


def encode(rows: Sequence[Row], codec: Codec, *, max_prompt_tokens: int) -> list[Task]:
    """Tasks of the rows whose prompt has 1 to `max_prompt_tokens` tokens. Raises DataError when none has."""
    tasks: list[Task] = []
    ids: set[str] = set()
    longest = 0
    for number, row in enumerate(rows, 1):
        try:
            text, prompt_ids = codec.encode_prompt(row.prompt)
        except DataError as error:
            raise DataError(f"data row {number}: {error}") from error
        longest = max(longest, prompt_ids.size)
        if not 1 <= prompt_ids.size <= max_prompt_tokens:
            continue
        task_id = _unique(row.task_id or _content_id(row, text), ids)
        ids.add(task_id)
        tasks.append(
            Task(
                task_id=task_id,
                prompt_ids=prompt_ids,
                prompt_text=text,
                ground_truth=row.ground_truth,
                data_source=row.data_source,
                extra_info=row.extra_info,
            )
        )
    if len(tasks) < len(rows):
        log.warning("prompts refused", refused=len(rows) - len(tasks), of=len(rows), max_prompt_tokens=max_prompt_tokens)
    if not tasks:
        raise DataError(
            f"data: {len(rows)} rows, 0 left after refusing prompts beyond {max_prompt_tokens} tokens (the longest has "
            f"{longest}): raise data.max_prompt_tokens and engine.max_model_len"
        )
    return tasks


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


def _content_id(row: Row, text: str) -> str:
    content = f"{text}\0{_canonical(row.ground_truth)}"
    return f"{row.data_source}/{xxhash.xxh3_64_hexdigest(content.encode())}"


def _unique(task_id: str, taken: set[str]) -> str:
    if task_id not in taken:
        return task_id
    number = 2
    while f"{task_id}~{number}" in taken:
        number += 1
    return f"{task_id}~{number}"


def _canonical(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_canonical(value[key])}" for key in sorted(value, key=str)) + "}"
    return repr(value)


def _fingerprint(tasks: Sequence[Task]) -> str:
    digest = xxhash.xxh3_64()
    for task in tasks:
        digest.update(task.task_id.encode())
        digest.update(task.prompt_ids.tobytes())
        digest.update(_canonical(task.ground_truth).encode())
    return digest.hexdigest()
