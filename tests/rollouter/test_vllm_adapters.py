"""A pool over a real vLLM server that is given adapters: what it samples has the version that it says, cached prompt or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from agent_loop.engine import Generation, SamplingParams
from configs.paths import adapter_dir
from configs.schema import EngineSettings, Settings, TrainerSettings, WeightSyncSettings
from rollouter.adapter_engine import adapter_scale, with_adapter
from rollouter.engine_pool import EnginePool
from tests.fakes.samples import make_sample
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds
from tests.rollouter.served_engine import CLOSE, prompt_of
from trainer.fsdp import FsdpPolicy

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
DEADLINE_S = 240.0


@dataclass
class Adapted:
    """A pool, and a policy whose adapters change with each version."""

    pool: EnginePool
    rounds: WeightRounds
    policy: FsdpPolicy
    version: int = 0

    async def sync(self) -> None:
        """Other adapters, brought to the engine."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for layer in self.policy._adapted:
                layer.b.copy_(torch.randn(layer.b.shape, generator=generator) * 0.3)
        announced = self.rounds.publish(dict(self.policy.export_weights()), self.version)
        for result in await self.pool.sync(announced, self.rounds.wait_staged):
            assert result.committed, result.message

    async def generate(self, prompt: npt.NDArray[np.int32], *, seed: int) -> Generation:
        sampling = SamplingParams(temperature=1.0, max_tokens=8, seed=seed)
        return await self.pool.generate(prompt, sampling, request_id=f"{self.version}-{seed}")

    def expected(self, prompt: npt.NDArray[np.int32], got: Generation) -> npt.NDArray[np.float32]:
        """Of the sampled tokens, by the trainer's forward pass with the adapters of now."""
        (scores,) = self.policy.logprobs([make_sample(prompt=prompt.tolist(), reply=got.token_ids.tolist())])
        return scores[prompt.size :]


@asynccontextmanager
async def adapted_engine(directory: Path, sockets: Path) -> AsyncIterator[Adapted]:
    model = make_tiny_model(directory / "model", TinyModel.TIED, seed=0)
    settings = Settings(
        run_dir=directory / "run",
        trainer=TrainerSettings(lora_rank=4, lora_alpha=12.0),
        weight_sync=WeightSyncSettings(lora="adapter"),
        engine=EngineSettings(max_model_len=256, kv_cache_bytes=64 << 20),
    )
    policy = FsdpPolicy(model, settings.trainer, dtype=torch.float32, exports_adapters=True)
    policy.write_first_adapter(adapter_dir(settings))
    pool = EnginePool(
        with_adapter(settings), settings.weight_sync, socket_dir=sockets, log_dir=directory, partial_rollout=lambda: "keep",
        adapter_scale=adapter_scale(settings),
    )  # fmt: skip
    try:
        await pool.start(str(model), "float32")
        supervision = asyncio.create_task(pool.supervise())
        with WeightRounds(sockets) as rounds:
            yield Adapted(pool=pool, rounds=rounds, policy=policy)
        supervision.cancel()
    finally:
        await pool.close()


async def test_neither_the_prefix_cache_nor_a_restart_brings_older_adapters_back(tmp_path: Path, sockets: Path) -> None:
    """B69, B26, B141: the same long prompt before and after a sync, and after the engine has died."""
    prompt = prompt_of(120)
    async with adapted_engine(tmp_path, sockets) as adapted:
        for _ in range(2):
            await adapted.sync()
            for seed in range(2):  # the second one finds the first one's prompt in the cache
                got = await adapted.generate(prompt, seed=seed)
                assert set(got.versions.tolist()) == {adapted.version}
                np.testing.assert_allclose(got.logprobs, adapted.expected(prompt, got), atol=CLOSE)
        (answer,) = await adapted.pool.check_weights(effective=True)
        (worker,) = answer.workers
        assert (worker.policy_version, worker.different, worker.unread) == (2, (), ())
        assert worker.num_equal == len(worker.checksums) == 28
        (member,) = adapted.pool._members
        assert member.server is not None
        member.server.kill()
        async with asyncio.timeout(DEADLINE_S):
            got = await adapted.generate(prompt, seed=7)
        np.testing.assert_allclose(got.logprobs, adapted.expected(prompt, got), atol=CLOSE)
