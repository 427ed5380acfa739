"""Rows made into tasks with the model's tokenizer, and what becomes of prompts that are too long.

Invariant: no task's prompt has more tokens than its limit, counted on the ids that go to the engine, those of the tools that
its agent loop tells included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from agent_loop.task import Task
from rollouter.data.framing import Framing, PromptCodec
from rollouter.data.rows import Message, Row, canonical
from rollouter.errors import DataError


class OnOverlong(StrEnum):
    DROP = "drop"
    LEFT = "left"
    """Cut the beginning."""
    RIGHT = "right"
    """Cut the end."""
    ERROR = "error"


class Refusal(StrEnum):
    """Why a row is no task that is trained."""

    OVERLONG = "prompt too long"
    EMPTY = "prompt without a token"
    BAD_ROW = "bad row"
    HELD_OUT = "held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a prompt may be."""

    max_prompt_tokens: int
    on_overlong: OnOverlong = OnOverlong.DROP
    framing: Framing = field(default_factory=Framing)
    """What counts besides a row's own prompt."""

    def refusal_of(self, length: int) -> Refusal | None:
        """Why a prompt of `length` tokens is left out; None: it is taken, cut if need be."""
        if length == 0:
            return Refusal.EMPTY
        if length > self.max_prompt_tokens and self.on_overlong is OnOverlong.DROP:
            return Refusal.OVERLONG
        return None

    def check(self, length: int) -> None:
        """Raises DataError for a prompt that is too long where that is an error."""
        if self.on_overlong is OnOverlong.ERROR and length > self.max_prompt_tokens:
            raise DataError(
                f"prompt: got {length} tokens, expected at most {self.max_prompt_tokens} (data.max_prompt_tokens, and "
                f"engine.max_model_len less sampling.max_tokens{self.tools_words}); data.on_overlong=drop would leave it out"
            )

    @property
    def tools_words(self) -> str:
        """For messages about lengths."""
        return "; the schemas of tools count" if self.framing.has_tools else ""

    def keep(self, ids: Sequence[int], count: int) -> Sequence[int]:
        """`count` of the ids, from the end that is kept."""
        return ids[len(ids) - count :] if self.on_overlong is OnOverlong.LEFT else ids[:count]


def task_of(row: Row, codec: PromptCodec, limits: Limits, *, task_id: str | None = None) -> Task | Refusal:
    """The row as a task, or why it is none. `task_id` None: the row's own, or one derived from its content.

    Raises DataError when the model's chat template refuses the messages, or a prompt is too long where that is an error.
    """
    text, ids = codec.encode_prompt(row.prompt)
    framed = limits.framing.messages_of(row)
    length = ids.size if framed is None or not ids.size else limits.framing.length_of(row, codec)
    refusal = limits.refusal_of(length)
    if refusal is not None:
        return refusal
    limits.check(length)
    prompt = row.prompt
    if length > limits.max_prompt_tokens:
        cut = _cut(row, ids, codec, limits)
        if cut is None:
            return Refusal.OVERLONG
        text, ids, prompt = cut
    return Task(
        task_id=task_id or row.task_id or _content_id(row, text),
        prompt_ids=ids,
        prompt_text=text,
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra_info=row.extra_info,
        messages=() if isinstance(prompt, str) else prompt,
        agent_name=row.agent_name,
        tools_kwargs=row.tools_kwargs,
    )


_Cut = tuple[str, npt.NDArray[np.int32], str | tuple[Message, ...]]
"""(text, ids, prompt)"""
_MAX_CUTS = 8


def _cut(row: Row, ids: npt.NDArray[np.int32], codec: PromptCodec, limits: Limits) -> _Cut | None:
    """`ids` are those of the row's prompt as it stands."""
    framed = limits.framing.messages_of(row)
    if framed is None and isinstance(row.prompt, str):
        return _cut_text(ids, codec, limits)
    messages = framed or row.prompt
    assert not isinstance(messages, str), "text that no loop frames was cut above"
    shorter = _cut_messages(messages, codec, limits, limits.framing.tools_of(row))
    if shorter is None:
        return None
    prompt = shorter[0]["content"] if isinstance(row.prompt, str) else shorter
    return (*codec.encode_prompt(prompt), prompt)


def _cut_text(ids: npt.NDArray[np.int32], codec: PromptCodec, limits: Limits) -> _Cut:
    kept = np.array(limits.keep(ids.tolist(), limits.max_prompt_tokens), np.int32)
    text = codec.decode(kept.tolist())
    return text, kept, text


def _cut_messages(
    messages: tuple[Message, ...], codec: PromptCodec, limits: Limits, tools: Sequence[Mapping[str, Any]]
) -> tuple[Message, ...] | None:
    """The longest message shortened until all fit, what the template puts around them untouched; None: it is not enough."""
    for _ in range(_MAX_CUTS):
        beyond = codec.encode_prompt(messages, tools=tools)[1].size - limits.max_prompt_tokens
        if beyond <= 0:
            return messages
        lengths = [len(content) if isinstance(content := message["content"], str) else 0 for message in messages]
        at = max(range(len(messages)), key=lengths.__getitem__)
        content = codec.encode(messages[at]["content"]) if lengths[at] else []
        if len(content) <= beyond:
            return None
        shorter = codec.decode(list(limits.keep(content, len(content) - beyond)))
        messages = (*messages[:at], {**messages[at], "content": shorter}, *messages[at + 1 :])
    return None


def nothing_left(num_rows: int, refused: Counter[Refusal], limits: Limits, longest: int) -> DataError:
    """What to say when no task is left."""
    why = ", ".join(f"{count} {reason.value}" for reason, count in refused.most_common())
    return DataError(
        f"data: {num_rows} rows, 0 left after refusing prompts beyond {limits.max_prompt_tokens} tokens (the longest has "
        f"{longest}{limits.tools_words}): raise data.max_prompt_tokens and engine.max_model_len, or cut prompts with "
        "data.on_overlong=left" + (f" ({why})" if why else "")
    )


def _content_id(row: Row, text: str) -> str:
    content = f"{text}\0{canonical(row.ground_truth)}"
    return f"{row.data_source}/{xxhash.xxh3_64_hexdigest(content.encode())}"
