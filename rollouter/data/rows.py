"""Rows: one task as its source gives it, checked and in plain Python, before any tokenizer has seen it. Pure.

Invariant: a `Row` holds plain Python values only, its prompt is not empty, and its ground truth is there if one is needed. All
problems of a row are found in one pass, each by its column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.errors import words_of
from configs.schema import DataSettings
from rollouter.data.plain import half_a_pair, plain
from rollouter.errors import DataError

Message = Mapping[str, Any]
"""One chat message: `role`, `content` and whatever the model's chat template takes."""

PROMPT_KEYS = ("prompt", "messages", "question", "problem")
GROUND_TRUTH_KEYS = ("ground_truth", "reward_model.ground_truth", "answer", "solution")
NEEDED = "prompt (text or messages) and ground_truth; data_source and extra_info are optional"
MAX_NAME_BYTES = 1000
"""Of a task's id, a data source, an agent's name: they stand in every record of a rollout, which is bounded."""
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task as its source gives it."""

    prompt: str | tuple[Message, ...]
    """Text, or chat messages for the model's template."""
    ground_truth: Any
    """Handed to the reward; plain Python, None only where none is needed."""
    data_source: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    task_id: str | None = None
    """Given where the source has a natural one; else derived from the content."""
    agent_name: str = ""
    """The agent loop that plays it; empty: the run's own."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with one column of one row."""

    column: str
    message: str

    def __str__(self) -> str:
        return f"{self.column}: {self.message}" if self.column else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Which columns are read, and what is made of them."""

    prompt: str | None = None
    """None: the first of PROMPT_KEYS that is there."""
    ground_truth: str | None = None
    """None: the first of GROUND_TRUTH_KEYS that is there. Dots lead into mappings."""
    data_source: str = "data_source"
    needs_ground_truth: bool = True
    as_chat: bool = False
    system_prompt: str = ""

    @classmethod
    def of(cls, data: DataSettings) -> Keys:
        return cls(
            prompt=data.prompt_key,
            ground_truth=data.ground_truth_key,
            data_source=data.data_source_key,
            needs_ground_truth=data.needs_ground_truth,
            as_chat=data.as_chat,
            system_prompt=data.system_prompt,
        )

    def shape(self, prompt: str | tuple[Message, ...]) -> str | tuple[Message, ...]:
        """The prompt as it goes to the model: text as a user's message if asked for, messages behind the system's."""
        if isinstance(prompt, str):
            if not self.as_chat:
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if self.system_prompt and prompt[0].get("role") != "system":
            return ({"role": "system", "content": self.system_prompt}, *prompt)
        return prompt


def read_row(raw: Any, default_source: str, keys: Keys) -> Row | list[Problem]:
    """The row, or everything that is wrong with it. `default_source` names rows without a data source."""
    if not isinstance(raw, Mapping):
        return [Problem(column="", message=f"got {type(raw).__name__}, expected a mapping of columns")]
    try:
        row = plain(raw)
    except Exception as error:  # noqa: BLE001 - the values may be of somebody's own classes
        return [Problem(column="", message=str(error) if isinstance(error, TypeError) else words_of(error))]
    problems: list[Problem] = []

    def take(read: Any, *arguments: Any) -> Any:
        try:
            return read(row, *arguments)
        except _Bad as bad:
            problems.append(bad.problem)
            return None

    prompt = take(_prompt, keys.prompt)
    truth = take(_ground_truth, keys.ground_truth, keys.needs_ground_truth)
    source = take(_text, keys.data_source, default_source)
    extra = take(_mapping, "extra_info")
    task_id = take(_text, "task_id", None)
    agent_name = take(_text, "agent_name", "")
    tools = take(_tools_kwargs)
    if problems:
        return problems
    found = Row(
        prompt=keys.shape(prompt),
        ground_truth=truth,
        data_source=source,
        extra_info=extra,
        task_id=task_id,
        agent_name=agent_name,
        tools_kwargs=tools,
    )
    return unwritable(found) or found


def unwritable(row: Row) -> list[Problem]:
    """What of a row could not be written into the records of a run: text that is no Unicode, names that are too long."""
    problems = []
    for column in ("prompt", "ground_truth", "data_source", "extra_info", "task_id", "agent_name", "tools_kwargs"):
        text = half_a_pair(getattr(row, column))
        if text is not None:
            problems.append(
                Problem(column=column, message=f"got text with half a surrogate pair: {_shown(text)}, expected Unicode")
            )
    for column, name in (("data_source", row.data_source), ("task_id", row.task_id), ("agent_name", row.agent_name)):
        size = len((name or "").encode("utf-8", "surrogatepass"))
        if size > MAX_NAME_BYTES:
            problems.append(Problem(column=column, message=f"got a name of {size} bytes, expected at most {MAX_NAME_BYTES}"))
    return problems


def row_of(raw: Any, default_source: str, keys: Keys, *, where: str) -> Row:
    """The row. Raises DataError naming `where`, every problem, the columns found and what is needed."""
    found = read_row(raw, default_source, keys)
    if isinstance(found, Row):
        return found
    raise DataError(f"{where}: {'; '.join(map(str, found))}; columns found: {columns_of(raw)}; needed: {NEEDED}")


def columns_of(raw: Any) -> str:
    """Names of what a row has, in words."""
    names = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else type(raw).__name__
    return names or "none"


class _Bad(Exception):
    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(column=column, message=message)


def _prompt(row: Mapping[str, Any], key: str | None) -> str | tuple[Message, ...]:
    candidates = PROMPT_KEYS if key is None else (key,)
    name = next((name for name in candidates if name in row), None)
    if name is None:
        raise _Bad(candidates[0], "the column is missing")
    value = row[name]
    if isinstance(value, str) and value:
        if value.strip():
            return value
        raise _Bad(name, f"got {_shown(value)}, blank text")
    if isinstance(value, list) and value:
        if all(isinstance(message, list) for message in value):
            raise _Bad(name, "got a list of lists, expected one list of messages: a level of nesting is too much")
        for at, message in enumerate(value):
            _check_message(name, at, message)
        return tuple(value)
    if isinstance(value, dict):
        raise _Bad(name, f"got one mapping ({_shown(value)}), expected text or a list of messages")
    raise _Bad(name, f"got {_shown(value)}, expected text or a list of messages, not empty")


def _check_message(name: str, at: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise _Bad(name, f"got message {_shown(message)} at {at}, expected a mapping with role and content")
    content = message["content"]
    if content is None and not message.get("tool_calls"):
        raise _Bad(
            name, f"got no content in message {at} (role {message['role']}), expected text: only calls of tools go without"
        )
    if content is not None and not isinstance(content, (str, list)):
        raise _Bad(name, f"got content {_shown(content)} in message {at}, expected text")


def _ground_truth(row: Mapping[str, Any], key: str | None, is_needed: bool) -> Any:
    candidates = GROUND_TRUTH_KEYS if key is None else (key,)
    for name in candidates:
        present, value = _lookup(row, name)
        if not present:
            continue
        is_missing = value is None or (isinstance(value, float) and not math.isfinite(value))  # NaN: tables' missing value
        if is_needed and (is_missing or (isinstance(value, str) and not value.strip())):
            raise _Bad(name, f"got {value!r}, expected a value")
        return None if is_missing else value
    if not is_needed:
        return None
    if key is None and "reward_model" in row:
        raise _Bad("reward_model", f"got {_shown(row['reward_model'])}, expected a mapping with ground_truth")
    raise _Bad(candidates[0], "the column is missing")


def _lookup(row: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """(whether it is there, the value) of a column, or of what dots lead to."""
    if path in row:
        return True, row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _text(row: Mapping[str, Any], name: str, default: str | None) -> str | None:
    value = row.get(name, default)
    if value is None and default != "" and name != "task_id":
        raise _Bad(name, "got None, expected text")
    if value is None or value == default:
        return default
    if not isinstance(value, str) or not value:
        raise _Bad(name, f"got {_shown(value)}, expected text")
    return value


def _mapping(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Bad(name, f"got {type(value).__name__}, expected a mapping")
    return value


def _tools_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column, or verl's `extra_info.tools_kwargs`; a tool that the row does not mention is None there in columnar files."""
    extra = row.get("extra_info")
    place = extra if row.get("tools_kwargs") is None and isinstance(extra, dict) else row
    found = _mapping(place, "tools_kwargs")
    return {tool: value for tool, value in found.items() if value is not None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def canonical(value: object) -> str:
    """A text that is the same for equal plain values, whatever the order of a mapping's keys."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{canonical(value[key])}" for key in sorted(value, key=str)) + "}"
    return repr(value)


def first_problem(problems: Sequence[str], num_rows: int) -> DataError:
    """One error for all bad rows of a source: the first in full, the others counted."""
    more = f" (and {len(problems) - 1} more bad rows of {num_rows})" if len(problems) > 1 else ""
    return DataError(problems[0] + more)
