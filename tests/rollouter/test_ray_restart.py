"""An engine whose Ray actor, and then whose Ray, is killed: both times it is placed again and makes its requests again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from agent_loop.engine import SamplingParams
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_pool import EnginePool
from tests.fakes.living import is_alive, living_children
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = np.arange(3, 27, dtype=np.int32)


async def test_an_engine_is_placed_again_when_its_actor_or_all_of_ray_dies(tmp_path: Path, sockets: Path) -> None:
    """B26 under Ray: kill -9 of the actor, later of Ray's driver; the requests that come then are answered."""
    model = make_tiny_model(tmp_path / "m", TinyModel.TIED, seed=0)
    settings = EngineSettings(max_model_len=256, kv_cache_bytes=64 << 20, max_restarts=2, placement="ray")
    pool = EnginePool(settings, WeightSyncSettings(), socket_dir=sockets, log_dir=tmp_path, partial_rollout=lambda: "keep")
    sampling = SamplingParams(temperature=1.0, max_tokens=20, stop_token_ids=())
    server, driver = pool._members[0].server, pool._ray
    assert server is not None
    assert driver is not None
    try:
        await pool.start(str(model), "float32")
        supervision = asyncio.create_task(pool.supervise())
        with WeightRounds(sockets) as rounds:
            (result,) = await pool.sync(rounds.publish(checkpoint_tensors(model), 0), rounds.wait_staged)
            assert result.committed, result.message
            for level in ("actor", "driver"):
                assert server.pid is not None
                assert driver.pid is not None
                engine = psutil.Process(server.pid)
                actor = engine.parent()
                assert actor is not None
                os.kill(actor.pid if level == "actor" else driver.pid, signal.SIGKILL)
                await asyncio.to_thread(psutil.wait_procs, [engine], 60)
                assert not is_alive(engine)
                generation = await pool.generate(PROMPT, sampling, request_id=level)
                assert generation.versions.tolist() == [0]
                assert server.pid != engine.pid
        supervision.cancel()
    finally:
        await pool.close()
    assert not living_children("vllm")
    assert list_of(sockets, "engine-") == list_of(Path("/tmp"), "hr-ray-") == []


def list_of(directory: Path, prefix: str) -> list[Path]:
    return list(directory.glob(f"{prefix}*"))
