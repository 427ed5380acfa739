"""Each engine's number of requests: changed live, found by looking, never wedged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.engine import SamplingParams
from configs.live import with_live
from configs.loader import load
from configs.schema import Settings, WeightSyncSettings
from rollouter.engine_command import server_arguments
from rollouter.engine_pool import EnginePool
from tests.fakes.fake_vllm import FakeVllm
from tests.fakes.fake_weights import FakeRounds

WAIT_S = 60.0
QUICK: dict[str, Any] = {"engine.pressure_interval_s": 0.01}


@dataclass(kw_only=True)
class Engines:
    """A pool over stand-in servers that hold version 0, and the settings in force."""

    settings: Settings
    servers: list[FakeVllm]
    pool: EnginePool
    asked: list[asyncio.Task[Any]] = field(default_factory=list)

    def set(self, **values: object) -> None:
        self.settings = with_live(self.settings, {key.replace("__", "."): value for key, value in values.items()})

    def ask(self, count: int, *, max_tokens: int = 4) -> None:
        """So many more requests, all at once."""
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
        for number in range(count):
            prompt = np.array([1, 2, 3 + number], np.int32)
            request_id = f"r{len(self.asked)}"
            self.asked.append(asyncio.create_task(self.pool.generate(prompt, sampling, request_id=request_id)))

    async def ask_until(self, holds: Callable[[], bool], *, max_tokens: int = 4) -> None:
        """Keep a hundred requests under way until `holds`."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self.ask(100 - sum(not one.done() for one in self.asked), max_tokens=max_tokens)
                await asyncio.sleep(0.002)

    async def all_answered(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.asked)

    @property
    def limits(self) -> list[int | None]:
        return [status.max_requests for status in self.pool.statuses()]


@asynccontextmanager
async def opened(directory: Path, *, num_engines: int = 1, **values: Any) -> AsyncIterator[Engines]:
    rounds = FakeRounds()
    async with AsyncExitStack() as stack:
        servers = [FakeVllm(socket=directory / f"e{index}", on_stage=rounds.report) for index in range(num_engines)]
        for server in servers:
            server.logprob_of = lambda token, temperature: -token / 100 / temperature
            await stack.enter_async_context(server)
        urls = "[" + ", ".join(server.address for server in servers) + "]"
        given = {"engine.urls": urls, "engine.max_num_seqs": 64, **values}
        settings = load(None, [f"{key}={value}" for key, value in given.items()], environment={})
        pool = EnginePool(
            settings.engine,
            WeightSyncSettings(round_timeout_s=5.0),
            socket_dir=directory,
            log_dir=directory,
            partial_rollout=lambda: "keep",
            live=lambda: engines.settings,
        )
        engines = Engines(settings=settings, servers=servers, pool=pool)
        stack.push_async_callback(pool.close)
        await pool.start("/model", "float32")
        supervision = asyncio.create_task(pool.supervise())
        stack.callback(supervision.cancel)
        await pool.sync(rounds.round(0), rounds.wait_staged)
        for server in servers:
            server.peak_active = 0
        yield engines


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - tests look from outside
            await asyncio.sleep(0.002)


async def test_without_a_setting_an_engine_gets_as_many_as_it_decodes_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as engines:
        engines.ask(100)
        await engines.all_answered()
        assert engines.limits == [64]
        assert engines.servers[0].peak_active == 64


async def test_a_limit_lowered_live_holds_for_the_next_request_and_raised_wakes_those_that_wait(tmp_path: Path) -> None:
    """B28: from 16 to 4 while 8 wait, and back."""
    async with opened(tmp_path, **{"engine.max_requests": 16}) as engines:
        (server,) = engines.servers
        server.token_s = 0.005
        engines.ask(24, max_tokens=8)
        await eventually(lambda: server.active == 16)
        engines.set(engine__max_requests=4)
        await eventually(lambda: sum(one.done() for one in engines.asked) >= 16)
        server.peak_active = 0
        engines.ask(8, max_tokens=8)
        await eventually(lambda: sum(one.done() for one in engines.asked) >= 24)
        assert server.peak_active == 4
        engines.ask(40, max_tokens=8)
        engines.set(engine__max_requests=16)
        await eventually(lambda: server.active > 4)
        await engines.all_answered()
        assert server.peak_active <= 16


async def test_a_limit_of_one_and_any_change_while_requests_wait_never_wedge(tmp_path: Path) -> None:
    """B28"""
    async with opened(tmp_path, num_engines=2, **QUICK) as engines:
        for adaptive in (False, True):
            for limit in (1, 7, 1, 64, 2):
                engines.set(engine__max_requests=limit, engine__adaptive_requests=adaptive)
                engines.ask(20)
                await asyncio.sleep(0.01)
        await engines.all_answered()


async def test_an_engine_with_room_gets_more_as_long_as_requests_wait(tmp_path: Path) -> None:
    async with opened(tmp_path, **{**QUICK, "engine.adaptive_requests": True}) as engines:
        (server,) = engines.servers
        server.kv_requests, server.token_s = 1000, 0.002
        assert engines.limits == [8]
        await engines.ask_until(lambda: (engines.limits[0] or 0) >= 16)
        await engines.all_answered()
        assert server.peak_active <= 64
        reached = engines.limits
        await asyncio.sleep(0.05)
        assert engines.limits == reached, "without requests nothing is learned"


async def test_an_engine_whose_cache_is_full_gets_fewer(tmp_path: Path) -> None:
    async with opened(tmp_path, **{**QUICK, "engine.adaptive_requests": True}) as engines:
        (server,) = engines.servers
        server.kv_requests, server.token_s = 4, 0.005
        await engines.ask_until(lambda: (engines.limits[0] or 0) <= 4)
        await engines.all_answered()


async def test_each_engine_is_judged_by_itself(tmp_path: Path) -> None:
    async with opened(tmp_path, num_engines=2, **{**QUICK, "engine.adaptive_requests": True}) as engines:
        roomy, full = engines.servers
        roomy.kv_requests, full.kv_requests = 1000, 2
        roomy.token_s = full.token_s = 0.004
        await engines.ask_until(lambda: (engines.limits[0] or 0) > 8 and (engines.limits[1] or 99) <= 2)
        await engines.all_answered()


async def test_the_rollouts_allowed_in_all_bound_it(tmp_path: Path) -> None:
    values = {**QUICK, "engine.adaptive_requests": True, "rollouter.max_concurrent_rollouts": 9}
    async with opened(tmp_path, **values) as engines:
        (server,) = engines.servers
        server.kv_requests, server.token_s = 1000, 0.002
        await engines.ask_until(lambda: engines.limits == [9])
        await engines.all_answered()
        assert server.peak_active <= 9


async def test_without_statistics_it_goes_by_how_long_a_token_takes(tmp_path: Path) -> None:
    async with opened(tmp_path, **{**QUICK, "engine.adaptive_requests": True}) as engines:
        (server,) = engines.servers
        server.token_s = 0.002
        await engines.ask_until(lambda: (engines.limits[0] or 0) > 8)
        reached = engines.limits[0] or 0
        server.token_s = 0.1
        await engines.ask_until(lambda: (engines.limits[0] or 99) < reached)
        server.token_s = 0.0
        await engines.all_answered()


async def test_nobody_looks_unless_it_is_adaptive(tmp_path: Path) -> None:
    async with opened(tmp_path, **QUICK) as engines:
        await asyncio.sleep(0.1)
        assert "/metrics" not in engines.servers[0].calls
        engines.set(engine__adaptive_requests=True)
        await eventually(lambda: "/metrics" in engines.servers[0].calls)


def test_a_server_keeps_statistics_if_it_is_to_be_looked_at(tmp_path: Path) -> None:
    for adaptive in (False, True):
        settings = load(None, [f"engine.adaptive_requests={adaptive}"], environment={})
        arguments = server_arguments(settings.engine, model_dir="m", dtype="float32", socket=tmp_path, on_gpu=False)
        assert ("--disable-log-stats" in arguments) is not adaptive
