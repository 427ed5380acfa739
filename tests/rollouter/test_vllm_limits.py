"""Adaptive concurrency with a real vLLM server whose KV cache is small."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from agent_loop.engine import SamplingParams
from configs.loader import load
from rollouter.concurrency import read_pressure
from rollouter.engine_pool import EnginePool
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds
from tests.rollouter.served_engine import MAX_MODEL_LEN, prompt_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_REQUESTS = 40


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: sockets lie in it."""
    return tmp_path_factory.mktemp("e")


async def test_requests_are_limited_to_what_the_cache_holds(directory: Path) -> None:
    """The cache has room for eight sequences of full length; 40 are asked for, and the server would decode 64 together."""
    model = make_tiny_model(directory / "m", TinyModel.TIED, seed=0)
    values = {
        "engine.max_model_len": MAX_MODEL_LEN,
        "engine.max_num_seqs": 64,
        "engine.kv_cache_bytes": 1 << 20,
        "engine.adaptive_requests": True,
        "engine.pressure_interval_s": 0.05,
        "sampling.max_tokens": 16,
    }
    settings = load(None, [f"{key}={value}" for key, value in values.items()], environment={})
    limits: list[int] = []

    def note() -> None:
        limits.extend(status.max_requests or 0 for status in pool.statuses())

    pool = EnginePool(
        settings.engine,
        settings.weight_sync,
        socket_dir=directory,
        log_dir=directory,
        partial_rollout=lambda: "keep",
        live=lambda: settings,
        on_change=lambda: note(),
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.start(str(model), "float32")
        supervision = asyncio.create_task(pool.supervise())
        stack.callback(supervision.cancel)
        rounds = stack.enter_context(WeightRounds(directory))
        (result,) = await pool.sync(rounds.publish(checkpoint_tensors(model), 0), rounds.wait_staged)
        assert result.committed, result.message
        (member,) = pool._members
        idle = read_pressure(await member.client.metrics(timeout_s=30))
        assert idle is not None, "the server keeps no statistics"
        assert (idle.num_running, idle.num_waiting) == (0, 0)
        sampling = SamplingParams(temperature=1.0, max_tokens=180, seed=1)
        asked = [pool.generate(prompt_of(60, seed), sampling, request_id=f"r{seed}") for seed in range(NUM_REQUESTS)]
        got = await asyncio.gather(*asked)
    assert len(got) == NUM_REQUESTS
    assert any(later < earlier for earlier, later in pairwise(limits)), "it never gave way"
    assert min(limits) >= 1
    assert max(limits) < NUM_REQUESTS / 2
