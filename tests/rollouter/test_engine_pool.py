"""The pool over stand-in servers: rounds and their failures, dead engines, catching up, no token in between."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import NO_VERSION, Generation, SamplingParams
from agent_loop.errors import BadGeneration, EngineUnavailable, RequestRefused
from agent_loop.session import Session
from agent_loop.slices import Slices
from configs.schema import EngineSettings, Settings, WeightSyncSettings
from rollouter.daemon import open_pool
from rollouter.engine_errors import EngineStartError
from rollouter.engine_member import PartialRollout
from rollouter.engine_pool import EnginePool
from sample_bus.messages import RoundPhase, RoundResult
from tests.agent_loop.scripted import Letters
from tests.fakes.fake_vllm import FakeVllm
from tests.fakes.fake_weights import FakeRounds

PROMPT = np.array([1, 2, 3], np.int32)
WAIT_S = 60.0


class Setting:
    """Servers, a pool over them, and the trainer's side."""

    def __init__(self, servers: list[FakeVllm], pool: EnginePool, rounds: FakeRounds, results: list[RoundResult]) -> None:
        self.servers = servers
        self.pool = pool
        self.rounds = rounds
        self.caught_up = results
        self.mode: PartialRollout = "keep"
        self.on_change: Callable[[], None] = lambda: None

    async def sync(self, version: int) -> list[RoundResult]:
        return await self.pool.sync(self.rounds.round(version), self.rounds.wait_staged)

    async def generate(self, *, max_tokens: int = 4, request_id: str = "r") -> Generation:
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
        return await self.pool.generate(PROMPT, sampling, request_id=request_id)

    def states(self) -> list[str]:
        return [status.state for status in self.pool.statuses()]


def processed(token: int, temperature: float) -> float:
    return -token / 100 / temperature


@asynccontextmanager
async def opened(
    tmp_path: Path,
    *,
    num_engines: int = 1,
    mode: Any = "keep",
    start: bool = True,
    weight_sync: WeightSyncSettings = WeightSyncSettings(round_timeout_s=5.0),  # noqa: B008 - frozen
    **changes: Any,
) -> AsyncIterator[Setting]:
    rounds = FakeRounds()
    results: list[RoundResult] = []
    made: list[Setting] = []
    async with AsyncExitStack() as stack:
        servers = [FakeVllm(socket=tmp_path / f"e{index}", on_stage=rounds.report) for index in range(num_engines)]
        for server in servers:
            server.logprob_of = processed
            await stack.enter_async_context(server)
        settings = EngineSettings(
            urls=tuple(server.address for server in servers), **{"max_num_seqs": 64, "start_timeout_s": 30.0, **changes}
        )
        pool = EnginePool(
            settings, weight_sync, socket_dir=tmp_path, log_dir=tmp_path,
            partial_rollout=lambda: made[0].mode,
            on_change=lambda: made[0].on_change(),
            on_round_result=results.append,
        )  # fmt: skip
        stack.push_async_callback(pool.close)
        made.append(Setting(servers, pool, rounds, results))
        made[0].mode = mode
        if start:
            await pool.start("/model", "float32")
            supervision = asyncio.create_task(pool.supervise())
            stack.callback(supervision.cancel)
        async with asyncio.timeout(WAIT_S):
            yield made[0]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - tests look from outside
            await asyncio.sleep(0.005)


async def test_nothing_is_generated_before_the_first_weights(tmp_path: Path) -> None:
    """B18"""
    async with opened(tmp_path) as s:
        probes = len(s.servers[0].bodies)
        waiting = asyncio.create_task(s.generate())
        await asyncio.sleep(0.05)
        assert len(s.servers[0].bodies) == probes
        assert s.states() == ["waiting for weights"]
        assert s.pool.policy_version is None
        await s.sync(0)
        assert (await waiting).versions.tolist() == [0]
        assert s.pool.generated_tokens == 4


async def test_a_round_stages_then_pauses_loads_confirms_and_resumes(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        s.servers[0].calls.clear()
        (result,) = await s.sync(3)
        assert [path.removeprefix("/") for path in s.servers[0].calls] == [
            "collective_rpc",
            "pause",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "collective_rpc",
            "resume",
        ]
        assert (result.committed, result.policy_version, result.manifest_digest) == (True, 3, "digest-3")
        assert s.pool.statuses()[0].policy_version == 3
        assert s.pool.statuses()[0].last_pause_ms is not None


async def test_requests_across_syncs_see_no_update_and_versions_never_fall(tmp_path: Path) -> None:
    """B10: 200 requests during 5 updates."""
    async with opened(tmp_path, num_engines=2) as s:
        for server in s.servers:
            server.token_s = 0.002
        await s.sync(0)
        tasks = [asyncio.create_task(s.generate(max_tokens=20, request_id=str(i))) for i in range(200)]
        for version in range(1, 6):
            await asyncio.sleep(0.01)
            assert all(result.committed for result in await s.sync(version))
        for generation in await asyncio.gather(*tasks):
            assert generation.token_ids.size == 20
            assert (np.diff(generation.versions) > 0).all()
        assert [server.violations for server in s.servers] == [[], []]


async def test_a_request_frozen_in_a_pause_goes_on_with_both_versions(tmp_path: Path) -> None:
    """B36, the way of `keep`: segments, each with its version."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].token_s = 0.005
        task = asyncio.create_task(s.generate(max_tokens=40))
        await eventually(lambda: s.servers[0].active == 1)
        await asyncio.sleep(0.02)
        await s.sync(1)
        assert (await task).versions.tolist() == [0, 1]


async def test_finish_lets_requests_end_with_the_weights_they_began_with(tmp_path: Path) -> None:
    async with opened(tmp_path, mode="finish") as s:
        await s.sync(0)
        s.servers[0].token_s = 0.005
        tasks = [asyncio.create_task(s.generate(max_tokens=20, request_id=str(i))) for i in range(8)]
        await eventually(lambda: s.servers[0].active == 8)
        syncing = asyncio.create_task(s.sync(1))
        late = asyncio.create_task(s.generate(max_tokens=2, request_id="late"))
        assert [(await task).versions.tolist() for task in tasks] == [[0]] * 8
        await syncing
        assert (await late).versions.tolist() in ([0], [1])


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("fault", ["500", "close"])
async def test_whatever_fails_in_a_round_generation_resumes(tmp_path: Path, path: str, fault: Any) -> None:
    """B05: the second of three rounds fails half way; the engine serves again, at a version that it holds whole."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].fail(path, fault)
        (result,) = await s.sync(1)
        assert not result.committed
        assert path in result.message
        assert (await s.generate()).versions.tolist() in ([0], [1])
        assert not s.servers[0].paused
        await s.sync(2)
        assert (await s.generate()).versions.tolist() == [2]


async def test_a_refused_commit_leaves_the_old_weights_serving(tmp_path: Path) -> None:
    """B03, at the engine's end"""
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.rounds.refuses.add("engine-0")
        (result,) = await s.sync(1)
        assert not result.committed
        assert "told that its staging failed" in result.message
        assert s.states() == ["serving"]
        assert (await s.generate()).versions.tolist() == [0]


async def test_a_staging_that_nobody_confirms_ends_at_its_deadline(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.rounds.silent = True
        (result,) = await s.sync(1)
        assert "was not staged on engine-0 within weight_sync.round_timeout_s=5 s" in result.message
        assert (await s.generate()).versions.tolist() == [0]


async def test_tokens_of_an_update_that_lost_its_label_are_thrown_away(tmp_path: Path) -> None:
    """New weights under the old label: the request that went through it is made again, and no other one gets there."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        task = asyncio.create_task(s.generate(max_tokens=40, request_id="across"))
        await eventually(lambda: server.active == 1)
        server.fail("/finish_weight_update", "500")
        (result,) = await s.sync(1)
        assert not result.committed
        assert (await task).versions.tolist() == [1]
        assert server.bodies[-1]["request_id"] == "across-again"
        assert "a request arrived while weights were being replaced" not in server.violations


async def test_an_engine_that_lags_behind_gets_no_request_until_it_caught_up(tmp_path: Path) -> None:
    """B26"""
    async with opened(tmp_path, num_engines=2) as s:
        await s.sync(0)
        s.rounds.refuses.add("engine-1")
        results = await s.sync(1)
        assert [result.committed for result in results] == [True, False]
        before = len(s.servers[1].bodies)
        generations = await asyncio.gather(*(s.generate(request_id=str(i)) for i in range(20)))
        assert {version for generation in generations for version in generation.versions.tolist()} == {1}
        assert len(s.servers[1].bodies) == before
        s.rounds.refuses.clear()
        await eventually(lambda: s.servers[1].label == "1")
        await eventually(lambda: any(result.committed and result.engine == "engine-1" for result in s.caught_up))


async def test_requests_of_a_dying_engine_are_tried_once_elsewhere_and_it_gets_no_more(tmp_path: Path) -> None:
    """B26"""
    async with opened(tmp_path, num_engines=2) as s:
        await s.sync(0)
        for server in s.servers:
            server.token_s = 0.005
        tasks = [asyncio.create_task(s.generate(max_tokens=30, request_id=str(i))) for i in range(20)]
        await eventually(lambda: all(server.active == 10 for server in s.servers))
        await s.servers[0].stop()
        generations = await asyncio.gather(*tasks)
        assert all(generation.token_ids.size == 30 for generation in generations)
        await eventually(lambda: s.states()[0] in ("dead", "starting"))
        assert s.states()[1] == "serving"
        before = len(s.servers[0].bodies)
        await s.generate()
        assert len(s.servers[0].bodies) == before
        s.servers[0].forget()
        await s.servers[0].start()
        await eventually(lambda: s.states()[0] == "serving")
        assert s.servers[0].label == "0"
        assert s.pool.statuses()[0].policy_version == 0


async def test_with_one_engine_requests_wait_for_it_to_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].token_s = 0.005
        task = asyncio.create_task(s.generate(max_tokens=30))
        await eventually(lambda: s.servers[0].active == 1)
        await s.servers[0].stop()
        await eventually(lambda: s.states() == ["starting"])
        syncing = asyncio.create_task(s.sync(1))
        s.servers[0].forget()
        await s.servers[0].start()
        assert (await task).versions.tolist() in ([0], [0, 1], [1])
        (result,) = await syncing
        assert result.committed
        assert (await s.generate()).versions.tolist() == [1]


async def test_an_engine_that_died_inside_is_noticed_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B26: the server still listens, and a call that waits for the engine would wait for ever."""
    monkeypatch.setattr("rollouter.engine_pool._LOOK_EVERY_S", 0.02)
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].fail("/health", "503")
        await eventually(lambda: s.pool._members[0].restarts == 1)
        await eventually(lambda: s.states() == ["serving"])
        assert s.pool.statuses()[0].policy_version == 0


async def test_a_request_that_fails_twice_is_given_up(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].fail("/inference/v1/generate", "500", "500")
        with pytest.raises(EngineUnavailable, match="told to answer 500"):
            await s.generate()
        assert (await s.generate()).versions.tolist() == [0]


async def test_a_refused_request_is_not_tried_again(tmp_path: Path) -> None:
    """B68"""
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].fail("/inference/v1/generate", "400")
        before = s.servers[0].calls.count("/inference/v1/generate")
        with pytest.raises(RequestRefused):
            await s.generate()
        assert s.servers[0].calls.count("/inference/v1/generate") == before + 1


async def test_no_more_requests_reach_an_engine_than_it_decodes_together(tmp_path: Path) -> None:
    async with opened(tmp_path, max_num_seqs=4) as s:
        await s.sync(0)
        s.servers[0].token_s = 0.001
        s.servers[0].peak_active = 0
        await asyncio.gather(*(s.generate(request_id=str(i)) for i in range(40)))
        assert s.servers[0].peak_active == 4


async def test_each_version_has_its_own_kv_cache(tmp_path: Path) -> None:
    """B69"""
    async with opened(tmp_path) as s:
        for version in (0, 1):
            await s.sync(version)
            await s.generate()
        salts = [body["cache_salt"] for body in s.servers[0].bodies if "cache_salt" in body]
        assert len(set(salts)) == 2


async def test_another_trainer_with_the_same_number_is_another_version(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(3)
        s.rounds.incarnation = "b"
        (result,) = await s.sync(3)
        assert result.committed
        assert s.rounds.asked == [("engine-0", 3), ("engine-0", 3)]


async def test_a_round_that_is_held_already_is_not_repeated(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(3)
        (result,) = await s.sync(3)
        assert result.committed
        assert s.rounds.asked == [("engine-0", 3)]


async def test_an_engine_that_counts_adapters_otherwise_than_the_trainer_is_refused_at_the_start(tmp_path: Path) -> None:
    """B141: one of `engine.urls` brings the alpha that somebody started it with."""
    async with opened(tmp_path, start=False) as s:
        s.servers[0].lora_scale = 4.0
        with pytest.raises(EngineStartError, match=r"engine-0 .* was started to be given adapters .* gives it whole weights"):
            await s.pool.start("/model", "float32")


async def test_an_engine_with_raw_logprobs_is_refused_at_the_start(tmp_path: Path) -> None:
    """B50"""
    async with opened(tmp_path, start=False) as s:
        s.servers[0].logprob_of = lambda token, temperature: -token / 100
        with pytest.raises(EngineStartError, match="processed_logprobs"):
            await s.pool.start("/model", "float32")


async def test_an_engine_that_never_answers_fails_the_start_at_its_deadline(tmp_path: Path) -> None:
    async with opened(tmp_path, start=False, start_timeout_s=0.1) as s:
        await s.servers[0].stop()
        with pytest.raises(EngineStartError, match=r"e0 did not answer within engine.start_timeout_s=0\.1 s"):
            await s.pool.start("/model", "float32")


async def test_tokens_of_weights_that_no_round_brought_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(0)
        s.servers[0].label = "default"
        with pytest.raises(BadGeneration, match="no round brought"):
            await s.generate()


async def test_more_requests_than_open_files_allow_are_refused_at_the_start(tmp_path: Path) -> None:
    """B137"""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 30
    async with opened(tmp_path, start=False, max_num_seqs=hard) as s:
        with pytest.raises(EngineStartError, match=rf"need {hard + 256} open files; no more than {hard} are allowed"):
            await s.pool.start("/model", "float32")


async def test_a_closed_pool_answers_whoever_waits(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        waiting = asyncio.create_task(s.generate())
        await asyncio.sleep(0)
        await s.pool.close()
        with pytest.raises(EngineUnavailable, match="being closed"):
            await waiting


# ── partial rollout ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["recompute", "finish"])
async def test_the_prefix_cache_is_emptied_after_the_load_and_before_the_stamp(tmp_path: Path, mode: PartialRollout) -> None:
    """B06, B10: one pause, one resume, in this order."""
    async with opened(tmp_path, mode=mode) as s:
        s.servers[0].calls.clear()
        await s.sync(3)
        assert [path.removeprefix("/") for path in s.servers[0].calls] == [
            "collective_rpc",
            "pause",
            "start_weight_update",
            "update_weights",
            "reset_prefix_cache",
            "finish_weight_update",
            "collective_rpc",
            "resume",
        ]


async def test_no_request_reaches_an_engine_before_its_one_resume_was_answered(tmp_path: Path) -> None:
    """B06: 50 requests wait for it."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        server = s.servers[0]
        server.before_resume = asyncio.Event()
        server.calls.clear()
        syncing = asyncio.create_task(s.sync(1))
        await eventually(lambda: "/resume" in server.calls)
        num_requests = len(server.bodies)
        tasks = [asyncio.create_task(s.generate(request_id=str(i))) for i in range(50)]
        await asyncio.sleep(0.05)
        assert len(server.bodies) == num_requests
        server.before_resume.set()
        await syncing
        assert all(generation.versions.tolist() == [1] for generation in await asyncio.gather(*tasks))
        assert server.calls.count("/resume") == 1


async def test_recompute_ends_the_requests_in_flight_and_a_session_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """B68, B36: three syncs inside one turn; 40 tokens in all, each run on a cache of its own version."""
    async with opened(tmp_path, mode="recompute") as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=1)
        session = Session(s.pool, sampling, rollout_id="r", max_model_len=512, codec=Letters())
        session.append(PROMPT)
        turn = asyncio.create_task(session.generate())
        for version in (1, 2, 3):
            num_requests = len(server.bodies)
            await eventually(lambda: server.active == 1)
            await asyncio.sleep(0.02)
            await s.sync(version)
            await eventually(lambda n=num_requests: turn.done() or len(server.bodies) > n)  # type: ignore[misc]
        await turn
        got = session.trajectory()
        assert got.tokens.size == PROMPT.size + 40
        assert got.versions.tolist() == [NO_VERSION, 0, 1, 2, 3]
        assert not got.kept_cache.any()
        asked = [body["sampling_params"]["max_tokens"] for body in server.bodies if body["request_id"].startswith("r-")]
        assert asked == [40 + PROMPT.size - int(start) for start in got.version_starts[1:]]
        assert not server.stale_reads
        assert not server.violations


async def test_a_reset_that_reports_failure_is_tried_again(tmp_path: Path) -> None:
    """B69"""
    async with opened(tmp_path, mode="recompute") as s:
        await s.sync(0)
        s.servers[0].fails_resets = 2
        (result,) = await s.sync(1)
        assert result.committed
        assert (await s.generate()).versions.tolist() == [1]


async def test_a_reset_that_never_works_fails_the_round(tmp_path: Path) -> None:
    """B69: new weights over an old cache are never served."""
    async with opened(tmp_path, mode="recompute") as s:
        await s.sync(0)
        s.servers[0].fails_resets = 5
        (result,) = await s.sync(1)
        assert not result.committed
        assert "the prefix cache was not emptied for version 1 in 5 tries" in result.message
        assert (await s.generate()).versions.tolist() == [1]  # once it had caught up
        assert not s.servers[0].paused
        assert not s.servers[0].stale_reads


async def test_a_request_on_its_way_at_a_pause_that_keeps_caches_says_so(tmp_path: Path) -> None:
    """It begins under the new weights with the cache salt of the old ones, and reads what a sibling left there."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        await s.generate(request_id="sibling")
        server = s.servers[0]
        server.token_s = 0.2
        task = asyncio.create_task(s.generate(request_id="late"))
        await eventually(lambda: server.active == 1)
        await s.sync(1)
        got = await task
        assert server.stale_reads == ["late"]
        assert (got.versions.tolist(), got.kept_cache.tolist()) == ([1], [1])
        assert (await s.generate(request_id="next")).kept_cache.tolist() == [0]
        assert server.stale_reads == ["late"]


async def test_the_mode_is_read_at_each_round(tmp_path: Path) -> None:
    async with opened(tmp_path) as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        got = {}
        modes: tuple[PartialRollout, ...] = ("keep", "recompute", "finish", "keep")
        for version, mode in enumerate(modes, start=1):
            s.mode = mode
            task = asyncio.create_task(s.generate(max_tokens=30, request_id=mode))
            await eventually(lambda: server.active == 1)
            await asyncio.sleep(0.02)
            await s.sync(version)
            got[version] = await task
        assert [generation.versions.tolist() for generation in got.values()] == [[0, 1], [1], [2], [3, 4]]
        assert [generation.kept_cache.tolist() for generation in got.values()] == [[0, 1], [0], [0], [0, 1]]
        assert [generation.stop_reason for generation in got.values()] == ["length", "abort", "length", "length"]
        assert got[2].token_ids.size < 30


class Pieces(Slices):
    """Asks for so many tokens at a time."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(lambda: 1.0)
        self.num_tokens = num_tokens

    def next_size(self, *context: int) -> int:
        return self.num_tokens


def in_pieces(s: Setting, name: str, *, max_tokens: int, of: int) -> Session:
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    session = Session(s.pool, sampling, rollout_id=name, max_model_len=512, codec=Letters(), slices=Pieces(of))
    session.append(PROMPT)
    return session


async def test_a_drain_waits_for_turns_that_are_asked_for_in_pieces(tmp_path: Path) -> None:
    """B36: with `finish` a turn has one version, however many requests it takes; newcomers wait for the new one."""
    async with opened(tmp_path, mode="finish", max_num_seqs=8) as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        sessions = [in_pieces(s, f"r{i}.0", max_tokens=32, of=4) for i in range(4)]
        turns = [asyncio.create_task(session.generate()) for session in sessions]
        await eventually(lambda: server.active == 4)
        syncing = asyncio.create_task(s.sync(1))
        await eventually(lambda: s.states() == ["updating"])
        late = asyncio.create_task(in_pieces(s, "late.0", max_tokens=4, of=4).generate())
        assert {version for turn in await asyncio.gather(*turns) for version in turn.versions.tolist()} == {0}
        await syncing
        assert (await late).versions.tolist() == [1]
        assert s.pool.statuses()[0].num_running == 0
        assert not server.stale_reads


async def test_keep_goes_on_with_the_cache_of_a_turn_that_is_asked_for_in_pieces(tmp_path: Path) -> None:
    """Every piece bears the salt of the first, and those behind the change say that the cache was kept."""
    async with opened(tmp_path) as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        turn = asyncio.create_task(in_pieces(s, "r.0", max_tokens=40, of=4).generate())
        await eventually(lambda: server.active == 1)
        await asyncio.sleep(0.05)
        await s.sync(1)
        got = await turn
        assert (got.versions[0], got.versions[-1]) == (0, 1)
        assert got.kept_cache.tolist() == got.versions.tolist()
        salts = [body["cache_salt"] for body in server.bodies if body["request_id"].startswith("r.0-")]
        assert len(salts) == 10
        assert len(set(salts)) == 1
        assert (await s.generate(request_id="next")).kept_cache.tolist() == [0]


async def test_recompute_gives_every_piece_behind_it_the_salt_of_the_new_version(tmp_path: Path) -> None:
    async with opened(tmp_path, mode="recompute") as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        turn = asyncio.create_task(in_pieces(s, "r.0", max_tokens=40, of=4).generate())
        await eventually(lambda: server.active == 1)
        await asyncio.sleep(0.05)
        await s.sync(1)
        got = await turn
        assert not got.kept_cache.any()
        assert len({body["cache_salt"] for body in server.bodies if body["request_id"].startswith("r.0-")}) == 2
        assert not server.stale_reads


async def test_a_turn_whose_rollout_does_not_come_back_gives_its_seat_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouter.open_turns._COMES_BACK_S", 0.05)
    async with opened(tmp_path, max_num_seqs=1) as s:
        await s.sync(0)
        sampling = SamplingParams(temperature=1.0, max_tokens=4, turn_goes_on=True)
        await s.pool.generate(PROMPT, sampling, request_id="gone.0-0")
        assert s.pool.statuses()[0].num_running == 1
        await s.generate(request_id="other.0-0")
        assert s.pool.statuses()[0].num_running == 0


async def test_a_drain_that_takes_too_long_fails_the_round_and_harms_nobody(tmp_path: Path) -> None:
    """The engine is not at fault: it serves on, is not killed, and takes the version once the request is gone."""
    async with opened(tmp_path, mode="finish", request_timeout_s=0.3) as s:
        await s.sync(0)
        server = s.servers[0]
        member = s.pool._members[0]
        member.enter()  # a request that never ends
        (result,) = await s.sync(1)
        assert "still has 1 requests 0.3 s after its door was closed" in result.message
        assert member.failed_commits == 0
        assert not server.paused
        assert server.calls.count("/pause") == 1
        member.leave()
        await eventually(lambda: s.pool.policy_version == 1)
        assert (await s.generate()).versions.tolist() == [1]


async def test_rollouts_given_up_before_a_round_are_gone_before_the_pause(tmp_path: Path) -> None:
    """B08: cancelled as hopeless when the version is announced; no abort reaches a paused engine."""
    async with opened(tmp_path, mode="recompute") as s:
        await s.sync(0)
        server = s.servers[0]
        server.token_s = 0.005
        tasks = [asyncio.create_task(s.generate(max_tokens=400, request_id=str(i))) for i in range(20)]
        await eventually(lambda: server.active == 20)
        for task in tasks[::2]:
            task.cancel()
        await s.sync(1)
        assert server.dropped == 10
        ended = await asyncio.gather(*tasks[1::2])
        assert [generation.stop_reason for generation in ended] == ["abort"] * 10
        assert not server.violations


def test_the_daemons_pool_takes_the_mode_from_the_settings_in_force(tmp_path: Path) -> None:
    start = Settings.model_validate({"run_dir": tmp_path, "partial_rollout": "keep"})
    changed = start.model_copy(update={"partial_rollout": "finish"})
    pool = open_pool(start, live=lambda: changed, on_change=lambda: None, on_round_result=lambda result: None)
    assert isinstance(pool, EnginePool)
    assert pool._partial_rollout() == "finish"


async def test_rolling_engines_switch_one_after_another_and_the_others_serve(tmp_path: Path) -> None:
    """Generation never stops everywhere, no sample's versions fall, and the spread is one round."""
    async with opened(tmp_path, num_engines=3, weight_sync=WeightSyncSettings(switch="rolling")) as s:
        for server in s.servers:
            server.token_s = 0.001
        await s.sync(0)
        updating: list[int] = []
        spreads: set[int] = set()
        serving: list[int] = []

        def look() -> None:
            states = s.states()
            updating.append(states.count("updating"))
            serving.append(states.count("serving"))
            held = [status.policy_version for status in s.pool.statuses() if status.policy_version is not None]
            spreads.add(max(held) - min(held))

        s.on_change = look
        tasks = [asyncio.create_task(s.generate(max_tokens=20, request_id=str(i))) for i in range(120)]
        for version in range(1, 5):
            results = await s.sync(version)
            assert all(result.committed for result in results)
        versions = [(await task).versions for task in tasks]
        assert max(updating) == 1
        assert min(serving) >= 2
        assert spreads == {0, 1}
        assert all((np.diff(each) >= 0).all() for each in versions)
        assert [server.violations for server in s.servers] == [[], [], []]


async def test_an_engine_that_misses_its_turn_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    """B26: it is dropped at its deadline, gets nothing meanwhile, and serves again once it has caught up."""
    settings = WeightSyncSettings(switch="rolling", round_timeout_s=5.0, stage_timeout_s=0.2)
    async with opened(tmp_path, num_engines=2, weight_sync=settings) as s:
        await s.sync(0)
        s.rounds.refuses.add("engine-0")
        first, second = await s.sync(1)
        assert (first.committed, first.phase, first.attempt) == (False, RoundPhase.STAGE, 1)
        assert second.committed
        assert set((await s.generate()).versions.tolist()) == {1}
        s.rounds.refuses.clear()
        await eventually(lambda: any(result.committed for result in s.caught_up))
        assert [status.policy_version for status in s.pool.statuses()] == [1, 1]
        assert max(result.attempt for result in s.caught_up) >= 2


async def test_an_engine_that_tries_again_waits_for_its_turn_too(tmp_path: Path) -> None:
    """Rolling: a failed engine that catches up while others switch does not stop a second one at the same time."""
    async with opened(tmp_path, num_engines=3, weight_sync=WeightSyncSettings(switch="rolling")) as s:
        await s.sync(0)
        updating: list[int] = []
        s.on_change = lambda: updating.append(s.states().count("updating"))
        for version in range(1, 4):
            s.servers[0].fail("/update_weights", "500")
            results = await s.sync(version)
            assert [result.committed for result in results] == [False, True, True]
            assert results[0].phase is RoundPhase.COMMIT
            await eventually(lambda: {status.policy_version for status in s.pool.statuses()} == {s.pool.policy_version})
        assert max(updating) == 1


def test_the_daemons_pool_takes_the_switch_from_the_settings_in_force(tmp_path: Path) -> None:
    start = Settings(run_dir=tmp_path, engine=EngineSettings(urls=("http://127.0.0.1:1",)))
    changed = start.model_copy(update={"weight_sync": WeightSyncSettings(switch="rolling")})
    pool = open_pool(start, live=lambda: changed, on_change=lambda: None, on_round_result=lambda result: None)
    assert isinstance(pool, EnginePool)
    assert pool._switch() == "rolling"


@pytest.mark.parametrize(
    ("path", "phase"),
    [
        ("/collective_rpc", RoundPhase.STAGE),
        ("/update_weights", RoundPhase.COMMIT),
        ("/finish_weight_update", RoundPhase.CONFIRM),
    ],
)
async def test_each_phase_of_a_round_has_its_deadline(tmp_path: Path, path: str, phase: RoundPhase) -> None:
    """B02: an engine that never answers is out of the round, which names the phase; the other one serves the new version."""
    settings = WeightSyncSettings(
        round_timeout_s=5.0, stage_timeout_s=0.3, commit_timeout_s=0.3, confirm_timeout_s=0.3, connect_timeout_s=5.0
    )
    async with opened(tmp_path, num_engines=2, weight_sync=settings) as s:
        await s.sync(0)
        s.servers[0].fail(path, "hang")
        first, second = await s.sync(1)
        assert (first.committed, first.phase, first.incarnation) == (False, phase, "a")
        assert second.committed
        assert s.pool.policy_version == 1
        assert set((await s.generate()).versions.tolist()) == {1}
        await eventually(lambda: any(result.committed for result in s.caught_up))
        assert [status.policy_version for status in s.pool.statuses()] == [1, 1]


@pytest.mark.parametrize("switch", ["together", "rolling"])
async def test_a_frozen_engine_is_out_of_the_round_and_does_not_keep_the_others_from_the_next(
    tmp_path: Path, switch: str
) -> None:
    """B26: from its switch on it answers nothing, not even what is asked after a failure; it serves again once it caught up."""
    settings = WeightSyncSettings.model_validate(
        {"switch": switch, "commit_timeout_s": 0.3, "confirm_timeout_s": 0.3, "connect_timeout_s": 0.3}
    )
    async with opened(tmp_path, num_engines=2, weight_sync=settings) as s:
        await s.sync(0)
        frozen, healthy = s.servers
        for path in ("/pause", "/resume", "/weight_info", "/health"):
            frozen.fail(path, "hang", "hang", "hang")
        for version in (1, 2):
            results = {result.engine: result.committed for result in await s.sync(version)}
            assert not results.get("engine-0")
            assert results["engine-1"]
            assert healthy.loaded == version
            assert set((await s.generate()).versions.tolist()) == {version}
        for faults in frozen.faults.values():
            faults.clear()
        await eventually(lambda: [status.policy_version for status in s.pool.statuses()] == [2, 2])
        assert not frozen.paused
        assert not frozen.violations


async def test_a_switch_that_takes_too_long_is_named_with_its_deadline(tmp_path: Path) -> None:
    settings = WeightSyncSettings(commit_timeout_s=0.3)
    async with opened(tmp_path, weight_sync=settings) as s:
        await s.sync(0)
        s.servers[0].fail("/pause", "hang")
        (result,) = await s.sync(1)
        assert result.message == "engine-0 did not switch to version 1 within weight_sync.commit_timeout_s=0.3 s"


async def test_an_engine_that_is_lost_while_it_stages_ends_the_round_at_once(tmp_path: Path) -> None:
    """The deadline of the staging, which is far away, is not waited for."""
    settings = WeightSyncSettings(connect_timeout_s=0.3, round_timeout_s=3600.0, stage_timeout_s=3600.0)
    async with opened(tmp_path, num_engines=2, weight_sync=settings) as s:
        await s.sync(0)
        s.servers[0].fail("/collective_rpc", "hang")
        s.servers[0].fail("/health", "hang")
        syncing = asyncio.create_task(s.sync(1))
        await eventually(lambda: not s.servers[0].faults["/collective_rpc"])
        s.pool._members[0].trouble.set()
        first, second = await syncing
        assert (first.committed, first.phase, first.message) == (False, RoundPhase.STAGE, "engine-0 was lost meanwhile")
        assert second.committed
        await eventually(lambda: s.servers[0].loaded == 1)


async def test_an_engine_that_was_left_paused_is_resumed_when_it_is_reached(tmp_path: Path) -> None:
    """The rollouter before was killed in mid-commit; a paused engine does not answer the check at the start."""
    async with opened(tmp_path, start=False) as s:
        server = s.servers[0]
        server.paused = True
        server._unpaused.clear()
        await s.pool.start("/model", "float32")
        assert not server.paused
