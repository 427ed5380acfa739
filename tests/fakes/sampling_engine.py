"""An engine with a real model and no server: it samples from the weights that the trainer publishes, token after token.

What it samples depends on weights, prompt, sampling parameters and seed, and on nothing else: not on what else is asked for,
nor on when. So two programs that ask the same of the same weights get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agent_loop.engine import Generation, SamplingParams
from sample_bus.messages import RoundResult, WeightRound
from tests.fakes.fake_engine import Call, FakeEngine, generation_of
from trainer.models import load_causal_model
from weight_sync.staging import StagingArea

HANG_S = 60.0


class Sampler:
    """A causal model in float32 that continues one sequence at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = load_causal_model(model_dir)
        self.policy_version = -1
        """Of the weights that were loaded last."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, policy_version: int) -> None:
        """Take a whole version over; what is tied is there once."""
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
        assert not parameters, f"version {policy_version} came without {sorted(parameters)}"
        self.policy_version = policy_version

    @torch.no_grad()
    def sample(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams) -> tuple[list[int], list[float]]:
        """Up to `max_tokens` tokens, the stop token included, and the logprob of each after temperature."""
        assert sampling.seed is not None, "an unseeded request cannot be repeated"
        draw = torch.Generator().manual_seed(sampling.seed)
        context = torch.from_numpy(prompt_ids.astype(np.int64))[None]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < sampling.max_tokens and not (tokens and tokens[-1] in sampling.stop_token_ids):
            logits = self._model(input_ids=context).logits[0, -1] / sampling.temperature
            scores = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(scores.exp(), 1, generator=draw))
            tokens.append(token)
            logprobs.append(float(scores[token]))
            context = torch.cat([context, torch.tensor([[token]])], dim=1)
        return tokens, logprobs


class SamplingEngine(FakeEngine):
    """A fleet of one engine that stages and loads what the trainer's weight server holds."""

    def __init__(self) -> None:
        super().__init__(reply=self._nothing, make_generation=self._sample, on_stage=self._stage)
        self._area = StagingArea(check_manifest=lambda manifest: None)
        self._sampler: Sampler | None = None

    async def start(self, model_dir: str, dtype: str) -> None:
        await super().start(model_dir, dtype)
        self._sampler = Sampler(Path(model_dir))

    async def sync(self, round: WeightRound, wait_staged: Any) -> list[RoundResult]:
        """Weights and the version that tokens bear change in one move, between two requests."""

        async def wait_and_load(announced: WeightRound, engine: str, nonce: str) -> None:
            await wait_staged(announced, engine, nonce)
            assert self._sampler is not None, "a round came before the start"
            staged = self._area.get(announced.policy_version, announced.manifest_digest)
            self._sampler.load(staged.tensors.items(), policy_version=announced.policy_version)
            self._area.mark_loaded(staged)

        return await super().sync(round, wait_and_load)

    async def close(self) -> None:
        self._area.close()
        await super().close()

    async def _stage(self, announced: WeightRound, engine: str, nonce: str) -> None:
        self._area.stage(announced.address, announced.policy_version, engine=engine, nonce=nonce, timeout_s=HANG_S)

    @staticmethod
    def _nothing(prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, version: int) -> list[int]:
        return []

    def _sample(self, call: Call, tokens: Sequence[int]) -> Generation:
        assert self._sampler is not None, "a request came before the start"
        sampled, logprobs = self._sampler.sample(call.prompt_ids, call.sampling)
        generation = generation_of(sampled, self._sampler.policy_version, call.sampling)
        return replace(generation, logprobs=np.array(logprobs, np.float32))
