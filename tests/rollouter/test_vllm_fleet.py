"""Two real engines and the weight cache of their host: rolling rounds under load, and a restart without a trainer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_loop.engine import SamplingParams
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_pool import EnginePool
from rollouter.weight_cache import WeightCache
from sample_bus.messages import WeightRound
from tests.fakes.living import living_children
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds
from tests.rollouter.test_vllm_restart import pid_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = np.arange(3, 27, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=100, stop_token_ids=())


async def _not_asked(announced: WeightRound, engine: str, nonce: str) -> None:
    raise AssertionError(f"{engine} staged from the trainer")


async def test_a_fleet_rolls_from_version_to_version_and_outlives_its_trainer(tmp_path: Path, sockets: Path) -> None:
    """B10 and B26: no sample's versions fall while engines switch one after another; an engine that is killed when no trainer
    is there serves the newest version again."""
    model = make_tiny_model(tmp_path / "m", TinyModel.TIED, seed=0)
    weight_sync = WeightSyncSettings(switch="rolling")
    cache = WeightCache(weight_sync, socket_dir=sockets / "cache", log_file=tmp_path / "cache.log")
    pool = EnginePool(
        EngineSettings(num_engines=2, max_model_len=256, kv_cache_bytes=64 << 20, max_restarts=1),
        weight_sync,
        socket_dir=sockets,
        log_dir=tmp_path,
        partial_rollout=lambda: "keep",
        cache=cache,
    )
    try:
        await pool.launch()
        await pool.start(str(model), "float32")
        supervision = asyncio.create_task(pool.supervise())
        (tmp_path / "trainer").mkdir()
        with WeightRounds(tmp_path / "trainer") as rounds:
            tensors = checkpoint_tensors(model)
            await pool.sync(rounds.publish(tensors, 0), _not_asked)
            tasks = [asyncio.create_task(pool.generate(PROMPT, SAMPLING, request_id=str(i))) for i in range(32)]
            for version in range(1, 4):
                changed = {name: tensor + torch.randn_like(tensor) * 1e-3 for name, tensor in tensors.items()}
                results = await pool.sync(rounds.publish(changed, version), _not_asked)
                assert [result.committed for result in results] == [True, True], results
            generations = await asyncio.gather(*tasks)
            assert all((np.diff(generation.versions) >= 0).all() for generation in generations)
        os.kill(pid_of(pool), signal.SIGKILL)
        async with asyncio.timeout(120):
            while [status.policy_version for status in pool.statuses()] != [3, 3]:  # noqa: ASYNC110 - tests look from outside
                await asyncio.sleep(0.1)
        assert pool.statuses()[0].state == "serving"
        assert set((await pool.generate(PROMPT, SAMPLING, request_id="after")).versions.tolist()) == {3}
        supervision.cancel()
    finally:
        await pool.close()
    assert not living_children("vllm")
    assert not living_children("weight_sync.cache_process")
    assert os.listdir(sockets) == []  # noqa: PTH208
