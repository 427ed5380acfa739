"""The seam to an inference engine: token ids in, token ids with log-probabilities and policy versions out.

Invariant: a `Generation` is consistent. Each token has one finite log-probability under the weights that sampled it, after
temperature, and belongs to one run of equal policy version and cache provenance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_loop.errors import BadGeneration

NO_VERSION = -1
"""Policy version of tokens that no policy sampled, and of an engine that still holds the weights it was started with."""

TurnEnd = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one turn is sampled. No other filter is applied: top-p 1, top-k off, no penalties."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    """New tokens at most, >= 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which the turn ends, besides the model's own end-of-sequence token; the stop token itself is kept."""
    seed: int | None = None
    """Seed of this request; None: the engine's own randomness."""
    turn_goes_on: bool = False
    """`max_tokens` is a part of the turn: when they are used up, the rollout comes back at once for the next part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What an engine sampled for one request: n tokens in R runs of equal version and cache provenance."""

    token_ids: npt.NDArray[np.int32]
    """[n] sampled tokens, the stop token included; n may be 0 only if `stop_reason` is `abort`."""
    logprobs: npt.NDArray[np.float32]
    """[n] log-probability (nats) of each sampled token after temperature, at most 0."""
    version_starts: npt.NDArray[np.int32]
    """[R] first token of each run; begins with 0, rising; R = 0 only if n = 0."""
    versions: npt.NDArray[np.int32]
    """[R] policy version of each run; rising, except across a restart of the trainer that rolled back."""
    kept_cache: npt.NDArray[np.uint8]
    """[R] 1 where keys and values that other weights computed may stand before the run's tokens, 0 where its own version
    computed them all. A trainer's forward at the run's version gives the logprobs only where it is 0."""
    stop_reason: TurnEnd
    """`stop`: a stop token; `length`: max_tokens or the model's length; `abort`: cut off, may be continued."""

    def validate(self, request_id: str) -> None:
        """Raise BadGeneration naming what is inconsistent."""
        n = self.token_ids.size
        if n == 0 and self.stop_reason != "abort":
            raise BadGeneration(f"request {request_id}: got no token, expected at least 1 for stop reason {self.stop_reason}")
        if self.logprobs.size != n:
            raise BadGeneration(f"request {request_id}: got {self.logprobs.size} logprobs, expected {n}, one for each token")
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            raise BadGeneration(
                f"request {request_id}: got logprob {self.logprobs[at]} at token {at}, expected a finite number"
            )
        if n and float(self.logprobs.max()) > 1e-3:
            raise BadGeneration(f"request {request_id}: got logprob {float(self.logprobs.max())}, expected at most 0")
        if n and int(self.token_ids.min()) < 0:
            raise BadGeneration(f"request {request_id}: got token id {int(self.token_ids.min())}, expected >= 0")
        starts, versions = self.version_starts, self.versions
        if starts.size != versions.size or bool(starts.size) != bool(n):
            raise BadGeneration(
                f"request {request_id}: got {starts.size} version runs with {versions.size} versions for {n} tokens"
            )
        if n and (starts[0] != 0 or starts[-1] >= n or (np.diff(starts) <= 0).any()):
            raise BadGeneration(
                f"request {request_id}: got version runs from {starts.tolist()}, expected rising from 0 below {n}"
            )
        if self.kept_cache.size != starts.size or (n and int(self.kept_cache.max()) > 1):
            raise BadGeneration(
                f"request {request_id}: got kept_cache {self.kept_cache.tolist()}, expected {starts.size} of 0 or 1"
            )


class Engine(Protocol):
    """Something that continues token sequences."""

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        """Continue `prompt_ids` ([P] int32). Cancelling the call cancels the generation.

        Raises EngineUnavailable (may be tried again), RequestRefused (never), BadGeneration.
        """
        ...
