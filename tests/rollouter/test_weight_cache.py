"""The host's weight cache from its rollouter: engines are served by it, and nobody hangs when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_pool import EnginePool
from rollouter.errors import WeightCacheLost
from rollouter.weight_cache import WeightCache
from sample_bus.messages import RoundResult, WeightRound
from tests.fakes.fake_vllm import FakeVllm
from tests.weight_sync.peers import open_transfer, weights
from weight_sync import WeightServer, WeightSyncError, receive_weights

WAIT_S = 60.0
SETTINGS = WeightSyncSettings(bucket_bytes=1 << 16, round_timeout_s=30.0, announce_timeout_s=5.0)


class Trainer:
    """A weight server, what it announces, and who staged from it."""

    def __init__(self, directory: Path, *, incarnation: str = "a") -> None:
        directory.mkdir(exist_ok=True)
        self.incarnation = incarnation
        self.staged_by: list[str] = []
        self.server = WeightServer(
            SETTINGS,
            socket_dir=directory,
            dtype=torch.float32,
            on_staged=lambda report: self.staged_by.append(report.engine),
            on_failed=lambda failure: None,
        )
        self._announced = 0

    def publish(self, version: int) -> WeightRound:
        published = self.server.publish(weights(version).items(), policy_version=version)
        self._announced += 1
        return WeightRound(
            policy_version=version,
            incarnation=self.incarnation,
            address=self.server.address,
            manifest_digest=published.manifest_digest,
            num_tensors=published.num_tensors,
            total_bytes=published.total_bytes,
            announced_at=float(self._announced),
        )


@asynccontextmanager
async def cached(tmp_path: Path) -> AsyncIterator[WeightCache]:
    cache = WeightCache(SETTINGS, socket_dir=tmp_path / "cache", log_file=tmp_path / "logs" / "cache.log")
    running = asyncio.create_task(cache.run("float32"))
    try:
        async with asyncio.timeout(WAIT_S):
            yield cache
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await cache.close()
    assert not (tmp_path / "cache").exists()


def take(address: str, version: int, nonce: str, engine: str = "engine-0") -> None:
    """What an engine's worker does."""
    with open_transfer(address, version, receiver=engine, nonce=nonce) as channel:
        assert {name for name, _ in receive_weights(channel)} == set(weights(version))


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - tests look from outside
        await asyncio.sleep(0.01)


async def test_a_version_is_staged_once_for_all_engines(tmp_path: Path) -> None:
    """The trainer sends it once a host; who asks meanwhile waits for the same staging."""
    trainer = Trainer(tmp_path / "t")
    async with cached(tmp_path) as cache:
        with trainer.server:
            announced = trainer.publish(1)
            (address,) = set(await asyncio.gather(*(cache.hold(announced) for _ in range(4))))
            for index in range(4):
                staged = asyncio.create_task(cache.wait_staged(announced, f"engine-{index}", f"n{index}"))
                await asyncio.to_thread(take, address, 1, f"n{index}", f"engine-{index}")
                await staged
            assert trainer.staged_by == ["host-cache"]
        assert await cache.hold(announced) == address
        await asyncio.to_thread(take, address, 1, "late")


async def test_a_cache_that_dies_is_started_again_with_the_newest_version(tmp_path: Path) -> None:
    """Those who wait for it hear of its end at once."""
    trainer = Trainer(tmp_path / "t")
    async with cached(tmp_path) as cache:
        with trainer.server:
            announced = trainer.publish(1)
            await cache.hold(announced)
            waiting = asyncio.create_task(cache.wait_staged(announced, "engine-0", "never"))
            await asyncio.sleep(0)
            assert cache.pid is not None
            os.kill(cache.pid, signal.SIGKILL)
            with pytest.raises(WeightCacheLost, match="the weight cache ended: status -9"):
                await waiting
            with pytest.raises(WeightCacheLost):
                await cache.hold(announced)
            await eventually(lambda: trainer.staged_by == ["host-cache"] * 2)
        await eventually(lambda: cache.num_restarts == 1 and cache.pid is not None)
        address = await cache.hold(announced)
        await asyncio.to_thread(take, address, 1, "after")


async def test_a_version_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "t")
    async with cached(tmp_path) as cache:
        with trainer.server:
            announced = trainer.publish(1)
        with pytest.raises(WeightCacheLost, match="PeerLost"):
            await cache.hold(announced)
        again = Trainer(tmp_path / "t", incarnation="b")
        with again.server:
            await cache.hold(again.publish(1))


async def test_an_older_version_does_not_take_the_place_of_the_newest(tmp_path: Path) -> None:
    """An engine that still tries to catch up with it would end the staging that all others wait for."""
    trainer = Trainer(tmp_path / "t")
    async with cached(tmp_path) as cache:
        with trainer.server:
            older, newest = trainer.publish(1), trainer.publish(2)
            waiting = asyncio.create_task(cache.hold(newest))
            await asyncio.sleep(0)
            with pytest.raises(WeightCacheLost, match="stages version 2 by now"):
                await cache.hold(older)
            await waiting
            assert trainer.staged_by == ["host-cache"]


@asynccontextmanager
async def fleet(tmp_path: Path, cache: WeightCache | None, *, num_engines: int = 2) -> AsyncIterator[EnginePool]:
    """A pool over stand-ins that really stage from the address that they are told."""
    async with AsyncExitStack() as stack:
        servers: list[FakeVllm] = []

        def stage(engine: str, version: int, nonce: str) -> None:
            def run() -> None:
                with suppress(WeightSyncError):
                    take(servers[int(engine[-1])].addresses[-1], version, nonce, engine)

            threading.Thread(target=run).start()

        servers += [FakeVllm(socket=tmp_path / f"e{index}", on_stage=stage) for index in range(num_engines)]
        for server in servers:
            await stack.enter_async_context(server)
            server.logprob_of = lambda token, temperature: -token / 100 / temperature
        pool = EnginePool(
            EngineSettings(urls=tuple(server.address for server in servers), max_num_seqs=8, start_timeout_s=30.0),
            SETTINGS,
            socket_dir=tmp_path,
            log_dir=tmp_path,
            partial_rollout=lambda: "keep",
            cache=cache,
        )
        await pool.launch()
        await pool.start("/model", "float32")
        supervision = asyncio.create_task(pool.supervise())
        try:
            async with asyncio.timeout(WAIT_S):
                yield pool
        finally:
            supervision.cancel()
            await asyncio.wait((supervision,))
            await pool.close()


async def _not_asked(announced: WeightRound, engine: str, nonce: str) -> None:
    raise AssertionError(f"{engine} staged from the trainer")


async def test_engines_of_this_host_are_brought_to_a_version_by_the_cache(tmp_path: Path) -> None:
    """A round reaches two engines through one staging, and a second round follows after the trainer died meanwhile."""
    trainer = Trainer(tmp_path / "t")
    cache = WeightCache(SETTINGS, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")
    async with fleet(tmp_path, cache) as pool:
        with trainer.server:
            await eventually(lambda: cache._is_ready)
            for version in (1, 2):
                results = await pool.sync(trainer.publish(version), _not_asked)
                assert [result.committed for result in results] == [True, True], results
        assert trainer.staged_by == ["host-cache"] * 2
        assert pool.policy_version == 2


async def test_engines_stage_from_the_trainer_where_the_cache_cannot(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "t")
    blocked = tmp_path / "cache"
    (blocked / "weights").mkdir(parents=True)
    (blocked / "weights" / "in the way").touch()
    cache = WeightCache(SETTINGS, socket_dir=blocked, log_file=tmp_path / "cache.log")

    async def staged(announced: WeightRound, engine: str, nonce: str) -> None:
        await eventually(lambda: engine in trainer.staged_by)

    try:
        async with fleet(tmp_path, cache) as pool:
            with trainer.server:
                results: list[RoundResult] = await pool.sync(trainer.publish(1), staged)
                assert [result.committed for result in results] == [True, True], results
            (blocked / "weights" / "in the way").unlink()
            (blocked / "weights").rmdir()
    finally:
        assert cache.pid is None


async def test_engines_of_other_hosts_stage_over_tcp_from_the_cache(tmp_path: Path) -> None:
    settings = WeightSyncSettings(bucket_bytes=1 << 16, listen_host="0.0.0.0")
    cache = WeightCache(settings, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")
    pool = EnginePool(
        EngineSettings(urls=("http://127.0.0.1:1", "http://192.0.2.7:8000")),
        settings,
        socket_dir=tmp_path,
        log_dir=tmp_path,
        partial_rollout=lambda: "keep",
        cache=cache,
    )
    assert [member.is_local for member in pool._members] == [True, False]
    assert cache.serves_others
    trainer = Trainer(tmp_path / "t")
    running = asyncio.create_task(cache.run("float32"))
    try:
        async with asyncio.timeout(WAIT_S):
            with trainer.server:
                announced = trainer.publish(1)
                here, elsewhere = await cache.hold(announced), await cache.hold(announced, is_local=False)
            assert here.startswith("shared_memory:")
            assert elsewhere.startswith("tcp://")
            await asyncio.to_thread(take, elsewhere, 1, "far")
            await cache.wait_staged(announced, "engine-1", "far")
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await pool.close()


IMPATIENT = SETTINGS.model_copy(update={"connect_timeout_s": 2.0})


def freeze(cache: WeightCache) -> None:
    assert cache.pid is not None
    os.kill(cache.pid, signal.SIGSTOP)


async def test_engines_stage_from_the_trainer_in_the_round_in_which_the_cache_freezes(tmp_path: Path) -> None:
    """It is killed and started again; once it has staged a version, engines stage from it as before."""
    trainer = Trainer(tmp_path / "t")
    cache = WeightCache(IMPATIENT, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")

    async def staged(announced: WeightRound, engine: str, nonce: str) -> None:
        await eventually(lambda: trainer.staged_by.count(engine) == 1)

    async with fleet(tmp_path, cache) as pool:
        with trainer.server:
            await eventually(lambda: cache._is_ready)
            assert all(result.committed for result in await pool.sync(trainer.publish(1), _not_asked))
            freeze(cache)
            results = await pool.sync(trainer.publish(2), staged)
            assert [result.committed for result in results] == [True, True], results
            await eventually(lambda: cache.num_restarts == 1 and trainer.staged_by.count("host-cache") == 2)
            await eventually(lambda: cache._is_trusted)
            assert all(result.committed for result in await pool.sync(trainer.publish(3), _not_asked))


async def test_whoever_waits_for_a_frozen_cache_hears_of_it(tmp_path: Path) -> None:
    """A version that it is asked for, and a staging of an engine that it is to tell of."""
    trainer = Trainer(tmp_path / "t")
    cache = WeightCache(IMPATIENT, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")
    running = asyncio.create_task(cache.run("float32"))
    try:
        with trainer.server:
            announced = trainer.publish(1)
            async with asyncio.timeout(WAIT_S):
                await eventually(lambda: cache._is_ready)
                await cache.hold(announced)
                freeze(cache)
                with pytest.raises(WeightCacheLost, match="no answer within 2 s"):
                    await cache.wait_staged(announced, "engine-0", "never")
                with pytest.raises(WeightCacheLost, match="has not staged a version since"):
                    await cache.hold(trainer.publish(2))
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await cache.close()


async def test_a_cache_that_hangs_before_it_is_ready_does_not_hold_up_a_round(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "t")
    settings = SETTINGS.model_copy(update={"stage_timeout_s": 4.0})
    cache = WeightCache(settings, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")

    async def staged(announced: WeightRound, engine: str, nonce: str) -> None:
        await eventually(lambda: engine in trainer.staged_by)

    await cache.launch()
    freeze(cache)
    async with fleet(tmp_path, cache) as pool:
        with trainer.server:
            results = await pool.sync(trainer.publish(1), staged)
            assert [result.committed for result in results] == [True, True], results
    assert cache.pid is None


async def test_a_cache_that_froze_before_any_version_is_used_again_once_it_has_staged_one(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "t")
    async with cached(tmp_path) as cache:
        cache._miss("it was not ready in time")
        with trainer.server:
            await eventually(lambda: cache._is_ready)
            announced = trainer.publish(1)
            with pytest.raises(WeightCacheLost, match="has not staged a version since"):
                await cache.hold(announced)
            await eventually(lambda: cache._is_trusted)
            await cache.hold(announced)
            assert trainer.staged_by == ["host-cache"]


async def test_a_cache_that_dies_before_it_is_asked_to_serve_is_started_again(tmp_path: Path) -> None:
    """Whoever asks for a version meanwhile is not kept waiting."""
    trainer = Trainer(tmp_path / "t")
    cache = WeightCache(SETTINGS, socket_dir=tmp_path / "cache", log_file=tmp_path / "cache.log")
    await cache.launch()
    assert cache.pid is not None
    os.kill(cache.pid, signal.SIGKILL)
    running = asyncio.create_task(cache.run("float32"))
    try:
        async with asyncio.timeout(WAIT_S):
            await eventually(lambda: running.done() or cache.num_restarts == 1)
            assert not running.done()
            with trainer.server:
                announced = trainer.publish(1)
                with pytest.raises(WeightCacheLost):
                    await cache.hold(announced)
                await eventually(lambda: trainer.staged_by == ["host-cache"])
                await cache.hold(announced)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await cache.close()
