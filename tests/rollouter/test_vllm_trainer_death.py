"""A real engine whose weights' server is killed while it stages: the old weights serve on, and the next round completes."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from agent_loop.engine import SamplingParams
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_pool import EnginePool
from sample_bus.messages import WeightRound
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.fakes.weight_rounds import WeightRounds
from weight_sync import WeightServer
from weight_sync.channel import BucketKind
from weight_sync.tcp import TcpSender

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = np.arange(3, 27, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=16, seed=5)


def serve_half(pipe: Connection, directory: str, model: str) -> None:
    """A trainer's process that sends two buckets of version 1 and stops there."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    send = TcpSender.send_bucket
    num_sent = 0

    def send_two(self: TcpSender, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        nonlocal num_sent
        if num_sent == 2:
            pipe.send("half is sent")
            time.sleep(600)
        num_sent += 1
        send(self, kind, sequence, payload_bytes=payload_bytes, header=header)

    setattr(TcpSender, "send_bucket", send_two)  # noqa: B010
    settings = WeightSyncSettings(transport="tcp", bucket_bytes=1 << 14)
    with WeightServer(
        settings, socket_dir=Path(directory), dtype=torch.float32, on_staged=lambda report: None, on_failed=lambda failure: None
    ) as server:
        published = server.publish(checkpoint_tensors(Path(model)).items(), policy_version=1)
        pipe.send((server.address, published.manifest_digest, published.num_tensors, published.total_bytes))
        time.sleep(600)


async def test_old_weights_serve_when_the_trainer_dies_while_an_engine_stages(tmp_path: Path, sockets: Path) -> None:
    """B02, B03: killed with -9 between the second and the third bucket."""
    models = [make_tiny_model(tmp_path / f"m{seed}", TinyModel.TIED, seed=seed) for seed in range(2)]
    pool = EnginePool(
        EngineSettings(max_model_len=256, kv_cache_bytes=64 << 20),
        WeightSyncSettings(stage_timeout_s=10.0),
        socket_dir=sockets,
        log_dir=tmp_path,
        partial_rollout=lambda: "recompute",
    )
    here, there = multiprocessing.get_context("spawn").Pipe()
    dying = multiprocessing.get_context("spawn").Process(
        target=serve_half, args=(there, str(tmp_path / "dying"), str(models[1])), daemon=True
    )
    try:
        await pool.start(str(models[0]), "float32")
        supervision = asyncio.create_task(pool.supervise())
        with WeightRounds(tmp_path) as rounds:
            (result,) = await pool.sync(rounds.publish(checkpoint_tensors(models[0]), 0), rounds.wait_staged)
            assert result.committed, result.message
            before = await pool.generate(PROMPT, SAMPLING, request_id="before")
            dying.start()
            assert await asyncio.to_thread(here.poll, 120)
            address, digest, num_tensors, total_bytes = here.recv()
            announced = WeightRound(
                policy_version=1,
                incarnation="b",
                address=address,
                manifest_digest=digest,
                num_tensors=num_tensors,
                total_bytes=total_bytes,
                announced_at=0.0,
            )

            async def nobody_says(announced: WeightRound, engine: str, nonce: str) -> None:
                await asyncio.Event().wait()

            syncing = asyncio.create_task(pool.sync(announced, nobody_says))
            assert await asyncio.to_thread(here.poll, 120)
            assert here.recv() == "half is sent"
            dying.kill()
            (result,) = await syncing
            assert not result.committed
            again = await pool.generate(PROMPT, SAMPLING, request_id="again")
            assert set(again.versions.tolist()) == {0}
            assert np.array_equal(again.token_ids, before.token_ids)
            assert np.allclose(again.logprobs, before.logprobs, atol=1e-4)
            (result,) = await pool.sync(rounds.publish(checkpoint_tensors(models[1]), 2), rounds.wait_staged)
            assert result.committed, result.message
            after = await pool.generate(PROMPT, SAMPLING, request_id="after")
            assert set(after.versions.tolist()) == {2}
            assert not np.allclose(after.logprobs[:1], before.logprobs[:1], atol=1e-4)
        supervision.cancel()
    finally:
        if dying.pid is not None:
            dying.kill()
        await pool.close()
