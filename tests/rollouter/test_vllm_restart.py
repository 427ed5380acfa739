"""A real engine that is killed: its successor makes its requests again, with the newest weights; nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from agent_loop.engine import SamplingParams
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_errors import EnginesLost
from rollouter.engine_pool import EnginePool
from tests.fakes.living import living_children
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = np.arange(3, 27, dtype=np.int32)


async def test_a_killed_engine_is_replaced_catches_up_and_makes_its_requests_again(tmp_path: Path, sockets: Path) -> None:
    """B26: kill -9 in the middle of 8 generations; a second death is one too many here."""
    model = make_tiny_model(tmp_path / "m", TinyModel.TIED, seed=0)
    settings = EngineSettings(max_model_len=256, kv_cache_bytes=64 << 20, max_restarts=1)
    pool = EnginePool(settings, WeightSyncSettings(), socket_dir=sockets, log_dir=tmp_path, partial_rollout=lambda: "keep")
    sampling = SamplingParams(temperature=1.0, max_tokens=200, stop_token_ids=())
    try:
        await pool.start(str(model), "float32")
        supervision = asyncio.create_task(pool.supervise())
        with WeightRounds(tmp_path) as rounds:
            for version in (0, 1):
                (result,) = await pool.sync(rounds.publish(checkpoint_tensors(model), version), rounds.wait_staged)
                assert result.committed, result.message
            tasks = [asyncio.create_task(pool.generate(PROMPT, sampling, request_id=str(i))) for i in range(8)]
            await asyncio.sleep(0.1)
            first = pid_of(pool)
            os.kill(first, signal.SIGKILL)
            generations = await asyncio.gather(*tasks)
            assert all(generation.versions.tolist() == [1] for generation in generations)
            assert pid_of(pool) != first
            assert pool.statuses()[0].policy_version == 1

            waiting = asyncio.create_task(pool.generate(PROMPT, sampling, request_id="last"))
            os.kill(pid_of(pool), signal.SIGKILL)
            with pytest.raises(EnginesLost, match=r"no engine is left; engine-0: .*engine\.max_restarts=1"):
                await supervision
            with pytest.raises(EnginesLost):
                await waiting
    finally:
        await pool.close()
    assert not living_children("vllm")
    assert not (sockets / "engine-0").exists()


def pid_of(pool: EnginePool) -> int:
    server = pool._members[0].server
    assert server is not None
    assert server.pid is not None
    return server.pid
