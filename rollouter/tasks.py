"""Rows: where tasks come from, before any tokenizer has seen them.

Invariant: a `Row` holds plain Python values only, its prompt is not empty and its ground truth is there. A source with one bad
row is refused as a whole, at load, naming file, row, columns found and what is needed.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.errors import USER_CODE_FAILURES, words_of
from rollouter.errors import DataError

Message = Mapping[str, Any]
"""One chat message: `role`, `content` and whatever the model's chat template takes."""

NUM_SORT_ROWS = 4096
NUM_SORT_DIGITS = 5
ADDITION_SHOTS = "2+3=5\n4+1=5\n6+2=8\n"
NEEDED = "prompt (text or messages) and ground_truth; data_source and extra_info are optional"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task as its source gives it."""

    prompt: str | tuple[Message, ...]
    """Text, or chat messages for the model's template."""
    ground_truth: Any
    """Handed to the reward; plain Python, never None."""
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    task_id: str | None = None
    """Given where the source has a natural one; else derived from the content."""


def load_rows(source: str) -> list[Row]:
    """All rows of `source`: `addition`, `sort`, a JSON-lines file, or `module:function`.

    Raises DataError.
    """
    if source in BUILT_IN:
        return list(BUILT_IN[source]())
    path = Path(source)
    if path.is_file():
        return _checked(_json_lines(path), where=str(path), default_source=path.stem)
    module_name, colon, function_name = source.partition(":")
    if colon and function_name.isidentifier() and all(part.isidentifier() for part in module_name.split(".")):
        rows = _call(module_name, function_name)
        return _checked(((number, row) for number, row in enumerate(rows, 1)), where=source, default_source=function_name)
    raise DataError(
        f"data.source: got {source!r}, expected one of {', '.join(sorted(BUILT_IN))}, an existing JSON-lines file, "
        "or a dotted path `module:function`"
    )


def addition() -> Iterator[Row]:
    """The 81 sums of two digits from 1 to 9, each after three solved ones."""
    for a in range(1, 10):
        for b in range(1, 10):
            yield Row(
                prompt=f"{ADDITION_SHOTS}{a}+{b}=",
                ground_truth=str(a + b),
                data_source="addition",
                extra_info={"a": a, "b": b},
                task_id=f"addition/{a}+{b}",
            )


def sort() -> Iterator[Row]:
    """Distinct strings of digits to be sorted, `s52713=` → `12357`; the same ones for every run."""
    random_digits = random.Random("headrace sort")
    seen: set[str] = set()
    while len(seen) < NUM_SORT_ROWS:
        digits = "".join(random_digits.choices("0123456789", k=NUM_SORT_DIGITS))
        if digits in seen:
            continue
        seen.add(digits)
        yield Row(
            prompt=f"s{digits}=",
            ground_truth="".join(sorted(digits)),
            data_source="sort",
            extra_info={"digits": digits},
            task_id=f"sort/{digits}",
        )


BUILT_IN: Mapping[str, Callable[[], Iterator[Row]]] = {"addition": addition, "sort": sort}


def plain(value: Any) -> Any:
    """`value` as plain Python (None, bool, int, float, str, list, dict with text keys), NumPy taken apart recursively.

    Raises TypeError naming the type that has no plain form.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path} row {number}: is not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _call(module_name: str, function_name: str) -> Iterable[Any]:
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except USER_CODE_FAILURES as error:
        raise DataError(f"data.source: got {module_name}:{function_name}, which does not import: {words_of(error)}") from error
    try:
        rows = function()
    except USER_CODE_FAILURES as error:
        raise DataError(f"data.source: {module_name}:{function_name} raised {words_of(error)}") from error
    if not isinstance(rows, Iterable):
        raise DataError(f"data.source: {module_name}:{function_name} returned {type(rows).__name__}, expected rows")
    return rows


def _checked(rows: Iterable[tuple[int, Any]], *, where: str, default_source: str) -> list[Row]:
    good: list[Row] = []
    problems: list[str] = []
    for number, row in rows:
        try:
            good.append(_row(row, default_source))
        except DataError as error:
            columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            problems.append(f"{where} row {number}: {error}; columns found: {columns or 'none'}; needed: {NEEDED}")
    if problems:
        more = f" (and {len(problems) - 1} more bad rows of {len(problems) + len(good)})" if len(problems) > 1 else ""
        raise DataError(problems[0] + more)
    if not good:
        raise DataError(f"{where}: no row found; needed: {NEEDED}")
    return good


def _row(raw: Any, default_source: str) -> Row:
    if not isinstance(raw, Mapping):
        raise DataError(f"got {type(raw).__name__}, expected a mapping of columns")
    try:
        row = plain(raw)
    except TypeError as error:
        raise DataError(str(error)) from None
    prompt = row.get("prompt")
    source = row.get("data_source", default_source)
    if not isinstance(source, str) or not source:
        raise DataError(f"data_source: got {source!r}, expected text")
    extra = row.get("extra_info", {})
    if not isinstance(extra, dict):
        raise DataError(f"extra_info: got {type(extra).__name__}, expected a mapping")
    task_id = row.get("task_id")
    if task_id is not None and (not isinstance(task_id, str) or not task_id):
        raise DataError(f"task_id: got {task_id!r}, expected text")
    return Row(
        prompt=_prompt(prompt, "prompt" in row),
        ground_truth=_ground_truth(row),
        data_source=source,
        extra_info=extra,
        task_id=task_id,
    )


def _prompt(prompt: Any, present: bool) -> str | tuple[Message, ...]:
    if not present:
        raise DataError("prompt: the column is missing")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"prompt: got message {message!r}, expected a mapping with role and content")
        return tuple(prompt)
    raise DataError(f"prompt: got {prompt!r}, expected text or a list of messages, not empty")


def _ground_truth(row: Mapping[str, Any]) -> Any:
    """`ground_truth`, or verl's `reward_model.ground_truth`."""
    if "ground_truth" in row:
        name, truth = "ground_truth", row["ground_truth"]
    elif isinstance(row.get("reward_model"), dict) and "ground_truth" in row["reward_model"]:
        name, truth = "reward_model.ground_truth", row["reward_model"]["ground_truth"]
    elif "reward_model" in row:
        raise DataError(f"reward_model: got {row['reward_model']!r}, expected a mapping with ground_truth")
    else:
        raise DataError("ground_truth: the column is missing")
    if truth is None or truth == "":
        raise DataError(f"{name}: got {truth!r}, expected a value")
    return truth
