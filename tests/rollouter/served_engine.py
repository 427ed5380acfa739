"""A pool over real vLLM servers of a tiny model, weights that change with each version, and what explains its logprobs.

Version v has the weights of model v modulo the number of models. `explained` is the trainer's side: the same tokens through
transformers in float32, run by run, on a cache that the run's own version computed, or that was kept, as the sample says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from agent_loop.engine import NO_VERSION, Generation, SamplingParams
from agent_loop.session import Trajectory
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_member import PartialRollout
from rollouter.engine_pool import EnginePool
from sample_bus.messages import RoundResult
from tests.fakes.tiny_models import VOCAB_SIZE, TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds

MAX_MODEL_LEN = 256
CLOSE = 2e-4
"""Largest difference of log-probabilities in nats; observed: below 6e-5."""


@dataclass
class Served:
    """A pool and the models whose weights it is sent."""

    pool: EnginePool
    rounds: WeightRounds
    models: tuple[Path, ...]
    mode: PartialRollout = "keep"
    version: int = -1
    results: list[RoundResult] = field(default_factory=list)

    async def sync(self, *, mode: PartialRollout | None = None) -> list[RoundResult]:
        """Bring the next version to all engines."""
        self.version += 1
        if mode is not None:
            self.mode = mode
        tensors = checkpoint_tensors(self.models[self.version % len(self.models)])
        results = await self.pool.sync(self.rounds.publish(tensors, self.version), self.rounds.wait_staged)
        for result in results:
            assert result.committed, result.message
        self.results += results
        return results

    async def generate(
        self, prompt: npt.NDArray[np.int32], *, temperature: float = 1.0, max_tokens: int = 16, seed: int = 0
    ) -> Generation:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        return await self.pool.generate(prompt, sampling, request_id=f"{self.version}-{seed}-{prompt[0]}-{max_tokens}")

    def expected(
        self, prompt: npt.NDArray[np.int32], got: Generation, *, version: int, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Log-probability of each sampled token under `version`'s weights for the whole context."""
        tokens = np.concatenate([prompt, got.token_ids])
        logprobs, _ = self._forward(version, tokens[:-1], None, temperature)
        expected: npt.NDArray[np.float32] = logprobs[np.arange(len(prompt) - 1, len(tokens) - 1), got.token_ids]
        return expected

    def explained(self, got: Trajectory) -> npt.NDArray[np.float32]:
        """[T] what the log-probabilities of a trajectory ought to be by its versions and `kept_cache`; 0 for observations.

        NaN where a sample does not say whose cache was kept: a request that was on its way at a pause may have begun on what
        siblings had left in the prefix cache.
        """
        expected = np.zeros(got.tokens.size, np.float32)
        ends = [*got.version_starts[1:].tolist(), got.tokens.size]
        past: Any = None
        runs = zip(got.version_starts.tolist(), ends, got.versions.tolist(), got.kept_cache.tolist(), strict=True)
        for start, end, version, was_kept in runs:
            if version == NO_VERSION:
                past = None
                continue
            if not was_kept:
                past = None
            elif past is None:
                expected[start:end] = np.nan
                continue
            # the forward pass that samples a token reads the one before it
            first = 0 if past is None else start - 1
            logprobs, past = self._forward(version, got.tokens[first : end - 1], past, 1.0)
            expected[start:end] = logprobs[np.arange(start - 1, end - 1) - first, got.tokens[start:end]]
        return expected

    def _forward(
        self, version: int, tokens: npt.NDArray[np.int32], past: Any, temperature: float
    ) -> tuple[npt.NDArray[np.float32], Any]:
        """float32[len(tokens), VOCAB_SIZE] and the cache, which is `past` grown."""
        past = DynamicCache() if past is None else past
        with torch.no_grad():
            output = _model(self.models[version % len(self.models)])(
                torch.tensor(tokens[None].astype(np.int64)), past_key_values=past, use_cache=True
            )
        logprobs: npt.NDArray[np.float32] = torch.log_softmax(output.logits[0].float() / temperature, dim=-1).numpy()
        return logprobs, output.past_key_values


@cache
def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def prompt_of(length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).astype(np.int32)


@asynccontextmanager
async def served_engines(directory: Path, *, num_models: int = 2, **changes: Any) -> AsyncIterator[Served]:
    """Started engines without weights: sync first. `changes` are settings of section `engine`."""
    models = tuple(make_tiny_model(directory / f"m{seed}", TinyModel.TIED, seed=seed) for seed in range(num_models))
    settings = EngineSettings(**{"max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 64 << 20, **changes})
    made: list[Served] = []
    pool = EnginePool(
        settings, WeightSyncSettings(), socket_dir=directory, log_dir=directory, partial_rollout=lambda: made[0].mode
    )
    try:
        await pool.start(str(models[0]), "float32")
        supervision = asyncio.create_task(pool.supervise())
        with WeightRounds(directory) as rounds:
            made.append(Served(pool=pool, rounds=rounds, models=models))
            yield made[0]
        supervision.cancel()
    finally:
        await pool.close()
