"""Rows made into tasks with the model's tokenizer, and what becomes of prompts that are too long.

Invariant: no task's prompt has more tokens than its limit, counted on the ids that go to the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from agent_loop.task import Task
from rollouter.data.rows import Message, Row, canonical
from rollouter.errors import DataError


class PromptCodec(Protocol):
    def encode_prompt(self, prompt: str | tuple[Message, ...]) -> tuple[str, npt.NDArray[np.int32]]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


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

    def refusal_of(self, length: int) -> Refusal | None:
        """Why a prompt of `length` tokens is left out; None: it is taken, cut if need be."""
        if length == 0:
            return Refusal.EMPTY
        if length > self.max_prompt_tokens and self.on_overlong is OnOverlong.DROP:
            return Refusal.OVERLONG
        return None

    def cut(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The ids that are kept. Raises DataError where too long is an error."""
        if ids.size <= self.max_prompt_tokens:
            return ids
        if self.on_overlong is OnOverlong.ERROR:
            raise DataError(
                f"prompt: got {ids.size} tokens, expected at most {self.max_prompt_tokens} (data.max_prompt_tokens, and "
                "engine.max_model_len less sampling.max_tokens); data.on_overlong=drop would leave it out"
            )
        return ids[-self.max_prompt_tokens :] if self.on_overlong is OnOverlong.LEFT else ids[: self.max_prompt_tokens]


def task_of(row: Row, codec: PromptCodec, limits: Limits, *, task_id: str | None = None) -> Task | Refusal:
    """The row as a task, or why it is none. `task_id` None: the row's own, or one derived from its content.

    Raises DataError when the model's chat template refuses the messages, or a prompt is too long where that is an error.
    """
    text, ids = codec.encode_prompt(row.prompt)
    refusal = limits.refusal_of(ids.size)
    if refusal is not None:
        return refusal
    kept = limits.cut(ids)
    if kept is not ids:
        text = codec.decode(kept.tolist())
    return Task(
        task_id=task_id or row.task_id or _content_id(row, text),
        prompt_ids=kept,
        prompt_text=text,
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra_info=row.extra_info,
        messages=() if isinstance(row.prompt, str) else row.prompt,
        agent_name=row.agent_name,
        tools_kwargs=row.tools_kwargs,
    )


def nothing_left(num_rows: int, refused: Counter[Refusal], limits: Limits, longest: int) -> DataError:
    """What to say when no task is left."""
    why = ", ".join(f"{count} {reason.value}" for reason, count in refused.most_common())
    return DataError(
        f"data: {num_rows} rows, 0 left after refusing prompts beyond {limits.max_prompt_tokens} tokens (the longest has "
        f"{longest}): raise data.max_prompt_tokens and engine.max_model_len, or cut prompts with data.on_overlong=left"
        + (f" ({why})" if why else "")
    )


def _content_id(row: Row, text: str) -> str:
    content = f"{text}\0{canonical(row.ground_truth)}"
    return f"{row.data_source}/{xxhash.xxh3_64_hexdigest(content.encode())}"
