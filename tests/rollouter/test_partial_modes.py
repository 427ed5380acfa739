"""Partial rollout on a real vLLM: what each token is sampled with, whatever happens to the weights while a rollout goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from agent_loop.engine import NO_VERSION, Engine, Generation, SamplingParams
from agent_loop.session import Session, Trajectory
from agent_loop.slices import Slices
from rollouter.engine_member import PartialRollout
from tests.agent_loop.scripted import Letters
from tests.rollouter.served_engine import CLOSE, MAX_MODEL_LEN, Served, prompt_of, served_engines

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

MODES: tuple[PartialRollout, ...] = ("keep", "recompute", "finish")
MAX_TOKENS = 200
HANG_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Three models: neighbouring versions differ, and so do those two apart."""
    async with served_engines(tmp_path_factory.mktemp("e"), num_models=3) as served:
        yield served


class Recorded:
    """The engine, and what it was asked and answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: list[SamplingParams] = []
        self.answers: list[Generation] = []

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        self.asked.append(sampling)
        self.answers.append(await self._engine.generate(prompt_ids, sampling, request_id=request_id))
        return self.answers[-1]


def session_of(engine: Engine, name: str, *, seed: int, max_tokens: int = MAX_TOKENS, slices: Slices | None = None) -> Session:
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
    return Session(engine, sampling, rollout_id=name, max_model_len=MAX_MODEL_LEN, codec=Letters(), slices=slices)


def sampled(got: Trajectory) -> tuple[list[int], list[int]]:
    """Versions and `kept_cache` of the runs that a policy sampled."""
    runs: list[tuple[int, int]] = list(zip(got.versions.tolist(), got.kept_cache.tolist(), strict=True))
    return [version for version, _ in runs if version != NO_VERSION], [kept for version, kept in runs if version != NO_VERSION]


def assert_explained(served: Served, got: Trajectory, *, unsure: bool = False) -> None:
    """The trainer's forward at each version, on the cache that the sample tells of, gives what the engine reported. `unsure`:
    the sample may leave open whose cache a request began on."""
    expected = served.explained(got)
    known = ~np.isnan(expected)
    assert unsure or known.all()
    assert known.any()
    assert np.abs(got.behavior_logprobs - expected)[known].max() < CLOSE


async def across_syncs(served: Served, mode: PartialRollout, *, num_syncs: int) -> tuple[Trajectory, Recorded]:
    """One turn whose request is met by so many syncs, as far as it lasts; tries until two of them did."""
    for seed in range(30):
        engine = Recorded(served.pool)
        session = session_of(engine, f"{mode}-{served.version}-{seed}", seed=seed)
        session.append(prompt_of(24, seed))
        async with asyncio.timeout(HANG_S):
            turn = asyncio.create_task(session.generate())
            for _ in range(num_syncs):
                await asyncio.sleep(0.03)
                await served.sync(mode=mode)
            await turn
        got = session.trajectory()
        if mode == "finish" or len(set(got.versions.tolist())) > 3:
            return got, engine
    raise AssertionError("no rollout lasted over three versions")


async def test_keep_names_each_version_and_the_cache_that_it_went_on_with(served: Served) -> None:
    """B36: one request, several versions; each of the later ones read keys and values of those before it."""
    await served.sync(mode="keep")
    got, engine = await across_syncs(served, "keep", num_syncs=4)
    versions, kept = sampled(got)
    assert len(engine.asked) == 1
    assert versions == list(range(versions[0], versions[0] + len(versions)))
    assert kept == [0] + [1] * (len(versions) - 1)
    assert_explained(served, got)


async def test_a_kept_cache_is_no_forward_of_one_version(served: Served) -> None:
    """What `kept_cache` is recorded for: without it the sample would claim logprobs that no version gives."""
    await served.sync(mode="keep")
    got, _ = await across_syncs(served, "keep", num_syncs=4)
    claimed = Trajectory(
        tokens=got.tokens,
        loss_mask=got.loss_mask,
        behavior_logprobs=got.behavior_logprobs,
        version_starts=got.version_starts,
        versions=got.versions,
        kept_cache=np.zeros_like(got.kept_cache),
        num_turns=got.num_turns,
        num_prompt_tokens=got.num_prompt_tokens,
        stop_reason=got.stop_reason,
    )
    assert np.abs(got.behavior_logprobs - served.explained(claimed)).max() > 0.1


async def test_recompute_goes_on_as_if_each_version_had_read_everything(served: Served) -> None:
    await served.sync(mode="recompute")
    got, engine = await across_syncs(served, "recompute", num_syncs=4)
    versions, kept = sampled(got)
    assert [answer.stop_reason for answer in engine.answers[:-1]] == ["abort"] * (len(engine.answers) - 1)
    assert all(answer.versions.size <= 1 for answer in engine.answers)
    assert versions == sorted(set(versions))
    assert not any(kept)
    assert_explained(served, got)


async def test_recompute_asks_for_no_more_than_was_left(served: Served) -> None:
    """B68: the budgets of the requests of one turn, and what came back in all."""
    await served.sync(mode="recompute")
    got, engine = await across_syncs(served, "recompute", num_syncs=4)
    left = MAX_TOKENS
    for sampling, answer in zip(engine.asked, engine.answers, strict=True):
        assert sampling.max_tokens == left
        left -= answer.token_ids.size
        assert left >= 0
    assert got.num_turns == 1
    assert int(got.loss_mask.sum()) == MAX_TOKENS - left
    assert len({sampling.seed for sampling in engine.asked}) == len(engine.asked)


async def test_finish_gives_a_turn_one_version(served: Served) -> None:
    """B36"""
    await served.sync(mode="finish")
    got, engine = await across_syncs(served, "finish", num_syncs=2)
    assert len(engine.asked) == 1
    assert len(sampled(got)[0]) == 1
    assert_explained(served, got)


@pytest.mark.parametrize("mode", MODES)
async def test_a_turn_that_is_asked_for_in_pieces_is_treated_as_one(served: Served, mode: PartialRollout) -> None:
    """`keep` goes on with the cache that the first piece began, `finish` lets all pieces end first."""
    await served.sync(mode=mode)
    for seed in range(30):
        engine = Recorded(served.pool)
        session = session_of(engine, f"pieces-{mode}-{served.version}.{seed}", seed=seed, slices=Slices(lambda: 0.05))
        session.append(prompt_of(24, 100 + seed))
        async with asyncio.timeout(HANG_S):
            turn = asyncio.create_task(session.generate())
            for _ in range(2):
                await asyncio.sleep(0.05)
                await served.sync(mode=mode)
            await turn
        got = session.trajectory()
        versions, kept = sampled(got)
        assert_explained(served, got)
        if mode == "finish":
            assert len(versions) == 1
        else:
            assert kept == [0] + [int(mode == "keep")] * (len(kept) - 1)
        if len(engine.asked) > 2 and (mode == "finish" or (len(versions) > 2 and engine.answers[-1].versions.size == 1)):
            return
    raise AssertionError("no turn took three pieces over three versions")


@pytest.mark.parametrize("mode", MODES)
async def test_weights_that_change_while_a_tool_runs_are_used_from_the_next_turn_on(
    served: Served, mode: PartialRollout
) -> None:
    """Each turn has the version of its own time; the tool runs once a turn, and what was read before is read again."""
    await served.sync(mode=mode)
    first = served.version
    session = session_of(served.pool, f"tool-{mode}-{first}", seed=3, max_tokens=12)
    num_calls = 0

    async def tool() -> list[int]:
        nonlocal num_calls
        num_calls += 1
        await served.sync(mode=mode)
        return [int(token) for token in prompt_of(40, seed=num_calls)]

    session.append(prompt_of(60, seed=9))
    await session.generate()
    for _ in range(2):
        session.append(await tool())
        await session.generate()
    got = session.trajectory()
    assert num_calls == 2
    assert sampled(got) == ([first, first + 1, first + 2], [0, 0, 0])
    assert_explained(served, got)


@pytest.mark.parametrize("mode", ["recompute", "finish"])
async def test_the_prefix_cache_does_not_outlive_a_version(served: Served, mode: PartialRollout) -> None:
    """B69: asked past the pool, with one cache salt for all versions, so that only the emptied cache keeps them apart."""
    prompt = prompt_of(150, seed=11)
    client = served.pool._members[0].client
    for _ in range(3):
        await served.sync(mode=mode)
        for turn in range(2):
            sampling = SamplingParams(temperature=1.0, max_tokens=8, seed=0)
            got = await client.generate(prompt, sampling, request_id=f"{served.version}-{turn}", cache_salt="one")
            assert np.abs(got.logprobs - served.expected(prompt, got, version=served.version)).max() < CLOSE


async def test_the_mode_changes_between_rounds_while_rollouts_go_on(served: Served) -> None:
    """Eight rollouts of two turns over syncs whose mode changes each time: every token is explained, no budget exceeded."""
    await served.sync(mode="keep")
    engines = [Recorded(served.pool) for _ in range(8)]
    first = served.version

    async def play(index: int) -> Trajectory:
        session = session_of(engines[index], f"mixed-{first}-{index}", seed=index, max_tokens=100)
        session.append(prompt_of(16, seed=index % 4))
        await session.generate()
        session.append(prompt_of(8, seed=index))
        await session.generate()
        return session.trajectory()

    async with asyncio.timeout(HANG_S):
        rollouts = [asyncio.create_task(play(index)) for index in range(8)]
        number = 0
        while not all(rollout.done() for rollout in rollouts):
            await served.sync(mode=MODES[number % 3])
            number += 1
    trajectories = await asyncio.gather(*rollouts)
    assert len({version for got in trajectories for version in sampled(got)[0]}) > 3
    for got in trajectories:
        assert int(got.loss_mask.sum()) <= 200
        assert_explained(served, got, unsure=True)


async def test_two_engines_in_recompute_hand_their_rollouts_to_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rollout that one engine ended may go on with the other one, at whichever version is in force."""
    async with served_engines(tmp_path_factory.mktemp("e"), num_models=3, num_engines=2) as served:
        await served.sync(mode="recompute")
        done: list[Trajectory] = []

        async def play(index: int) -> None:
            session = session_of(served.pool, f"two-{index}", seed=index)
            session.append(prompt_of(20, seed=index))
            await session.generate()
            done.append(session.trajectory())

        async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as rollouts:
            tasks = [rollouts.create_task(play(index)) for index in range(8)]
            while any_left(tasks):
                await asyncio.sleep(0.03)
                await served.sync()
        assert any(len(set(got.versions.tolist())) > 2 for got in done)
        for got in done:
            assert not any(sampled(got)[1])
            assert_explained(served, got)


def any_left(tasks: list[asyncio.Task[None]]) -> bool:
    return not all(task.done() for task in tasks)
