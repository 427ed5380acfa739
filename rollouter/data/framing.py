"""What the agent loops of a run put around a row's prompt before the model sees it: the chat template, and the tools it tells.

Invariant: plain data, so that processes that measure can be told it, and what was measured under it is found by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from rollouter.data.rows import Message, Row, canonical


class PromptCodec(Protocol):
    def encode_prompt(
        self, prompt: str | tuple[Message, ...], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, npt.NDArray[np.int32]]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Of all rows."""

    tools: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Agent name to the JSON schemas of the tools that its loop tells the model; `""`: of rows that name no loop. A name that
    is not in it has a loop that shows the prompt as it stands, or nobody knows how."""

    @property
    def has_tools(self) -> bool:
        return any(self.tools.values())

    def length_of(self, row: Row, codec: PromptCodec) -> int:
        """Tokens that go to the engine first. Raises DataError when the template refuses the messages."""
        messages = self.messages_of(row)
        return codec.encode_prompt(row.prompt if messages is None else messages, tools=self.tools_of(row))[1].size

    def messages_of(self, row: Row) -> tuple[Message, ...] | None:
        """What the template is given by the row's loop; None: the row's prompt as it stands, if it is asked."""
        if row.agent_name not in self.tools:
            return None
        if isinstance(row.prompt, str):
            return ({"role": "user", "content": row.prompt},)
        return row.prompt if self.tools[row.agent_name] else None

    def tools_of(self, row: Row) -> Sequence[Mapping[str, Any]]:
        return self.tools.get(row.agent_name, ())

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(canonical({name: list(tools) for name, tools in self.tools.items()}).encode())
