"""A fake engine that takes its time for each token, and leaves a tally of what it generated that outlives its process.

Its replies are a function of the rollout and of the place in the reply alone: whoever has a reply can tell whether tokens of it
are missing, doubled or out of place, however often it was cut off.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation, SamplingParams
from tests.fakes.fake_engine import ALPHABET, EOS, Call, FakeEngine, generation_of

_END_OF_PROMPT = ALPHABET.index("=") + 1
_DIGITS = [ALPHABET.index(digit) + 1 for digit in "0123456789"]


def reply_of(rollout_id: str, *, shortest: int, longest: int) -> list[int]:
    """The whole reply to the rollout's prompt."""
    length = shortest + crc32(rollout_id.encode()) % (longest - shortest + 1)
    return [*(_DIGITS[crc32(f"{rollout_id}:{at}".encode()) % 10] for at in range(length - 1)), EOS]


@dataclass(slots=True, eq=False, kw_only=True)
class SlowEngine(FakeEngine):
    tokens_per_s: float = 100.0
    shortest: int = 20
    longest: int = 120
    tally: Path | None = None
    """One byte a token that was generated, whatever became of it."""

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        await self._serving.wait()
        assert self.version is not None, "a request was served before any weights were loaded"
        prompt = prompt_ids.tolist()
        done = prompt[::-1].index(_END_OF_PROMPT)
        reply = reply_of(request_id.rpartition(".")[0], shortest=self.shortest, longest=self.longest)
        assert prompt[len(prompt) - done :] == reply[:done], f"{request_id}: the tokens so far are not those of its reply"
        self.calls.append(Call(request_id=request_id, sampling=sampling, prompt_ids=prompt_ids, version=self.version))
        self.num_running += 1
        tokens: list[int] = []
        tally = None if self.tally is None else os.open(self.tally, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            for token in reply[done : done + sampling.max_tokens]:
                await asyncio.sleep(1 / self.tokens_per_s)
                tokens.append(token)
                if tally is not None:
                    os.write(tally, b".")
        finally:
            self.num_running -= 1
            if tally is not None:
                os.close(tally)
        self._generated += len(tokens)
        return generation_of(tokens, self.version, sampling)
