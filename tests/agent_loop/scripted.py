"""An engine that plays back prepared generations and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation, SamplingParams, TurnEnd


def generation(tokens: Sequence[int], *, end: TurnEnd = "stop", runs: Sequence[tuple[int, int]] = ((0, 0),)) -> Generation:
    """Tokens with logprobs -0.01, -0.02, …; `runs` are (start, version)."""
    return Generation(
        token_ids=np.array(tokens, np.int32),
        logprobs=-0.01 * np.arange(1, len(tokens) + 1, dtype=np.float32),
        version_starts=np.array([start for start, _ in runs] if tokens else [], np.int32),
        versions=np.array([version for _, version in runs] if tokens else [], np.int32),
        kept_cache=(np.arange(len(runs) if tokens else 0) > 0).astype(np.uint8),
        stop_reason=end,
    )


class ScriptedEngine:
    """Implements `Engine`."""

    def __init__(self, *script: Generation | Exception) -> None:
        self._script = list(script)
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingParams] = []
        self.request_ids: list[str] = []

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        self.prompts.append(prompt_ids.tolist())
        self.samplings.append(sampling)
        self.request_ids.append(request_id)
        part = self._script.pop(0)
        if isinstance(part, Exception):
            raise part
        return part


class Letters:
    """A codec of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids)
