"""The pool over one real vLLM server: what it samples, under which weights, and what a sync does to requests in flight.

The reference is a transformers forward over the same weights, in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import RequestRefused
from rollouter.engine_member import PartialRollout
from tests.rollouter.served_engine import CLOSE, MAX_MODEL_LEN, Served, prompt_of, served_engines

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_engines(tmp_path_factory.mktemp("e")) as served:
        yield served


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_weights_at_the_temperature(served: Served, temperature: float) -> None:
    """B50: compared with log-softmax of the logits over the temperature."""
    await served.sync()
    prompt = prompt_of(24)
    got = await served.generate(prompt, temperature=temperature)
    assert got.versions.tolist() == [served.version]
    expected = served.expected(prompt, got, version=served.version, temperature=temperature)
    assert np.abs(got.logprobs - expected).max() < CLOSE


async def test_new_weights_are_used_from_the_first_token_on_whatever_was_cached(served: Served) -> None:
    """B69: a prompt of several cache blocks, before and after a sync."""
    prompt = prompt_of(150, seed=1)
    for _ in range(2):
        await served.sync()
        for _ in range(2):
            got = await served.generate(prompt)
            assert np.abs(got.logprobs - served.expected(prompt, got, version=served.version)).max() < CLOSE


async def in_flight(served: Served, prompt: npt.NDArray[np.int32], *, mode: PartialRollout) -> Generation:
    """A generation that a sync meets half way."""
    for seed in range(20):
        task = asyncio.create_task(served.generate(prompt, max_tokens=200, seed=seed))
        await asyncio.sleep(0.05)
        await served.sync(mode=mode)
        got = await task
        if mode == "finish" or got.versions.size == 2:
            return got
    raise AssertionError("no sync met a request in flight")


async def test_keep_goes_on_with_the_old_cache_and_says_where_the_versions_change(served: Served) -> None:
    await served.sync()
    prompt = prompt_of(24, seed=2)
    got = await in_flight(served, prompt, mode="keep")
    boundary, old, new = int(got.version_starts[1]), int(got.versions[0]), int(got.versions[1])
    assert new == old + 1
    assert got.kept_cache.tolist() == [0, 1]
    before = served.expected(prompt, got, version=old)
    after = served.expected(prompt, got, version=new)
    assert np.abs(got.logprobs - before)[:boundary].max() < CLOSE
    assert np.abs(got.logprobs - before)[boundary:].max() > 0.1
    assert np.abs(got.logprobs - after)[boundary:].max() > 0.1


async def test_finish_leaves_no_request_with_two_versions(served: Served) -> None:
    await served.sync()
    prompt = prompt_of(24, seed=4)
    got = await in_flight(served, prompt, mode="finish")
    assert (got.versions.tolist(), got.kept_cache.tolist()) == ([served.version - 1], [0])
    assert np.abs(got.logprobs - served.expected(prompt, got, version=served.version - 1)).max() < CLOSE


async def test_requests_given_up_around_a_pause_harm_nobody(served: Served) -> None:
    """B08: cancelled before, during and after the pause of a sync; the others go on and the engine stays."""
    await served.sync()
    for wave in range(4):
        tasks = [
            asyncio.create_task(served.generate(prompt_of(24, seed=50 + i), max_tokens=200, seed=10 * wave + i))
            for i in range(12)
        ]
        await asyncio.sleep(0.1)
        syncing = asyncio.create_task(served.sync())
        for task in tasks[::2]:
            task.cancel()
            await asyncio.sleep(0.01 * wave)
        await syncing
        assert all(generation.token_ids.size for generation in await asyncio.gather(*tasks[1::2]))
    assert served.pool._members[0].restarts == 0


async def test_a_stop_token_ends_the_turn_and_is_kept_with_its_logprob(served: Served) -> None:
    """B62"""
    await served.sync()
    prompt = prompt_of(24, seed=5)
    free = await served.generate(prompt, max_tokens=8)
    stop = int(free.token_ids[3])
    sampling = SamplingParams(temperature=1.0, max_tokens=8, stop_token_ids=(stop,), seed=0)
    got = await served.pool.generate(prompt, sampling, request_id="stop")
    assert got.stop_reason == "stop"
    assert got.token_ids.tolist() == free.token_ids[: got.token_ids.size].tolist()
    assert int(got.token_ids[-1]) == stop
    assert got.logprobs.tolist() == pytest.approx(free.logprobs[: got.token_ids.size].tolist(), abs=CLOSE)


async def test_the_same_seed_gives_the_same_tokens(served: Served) -> None:
    await served.sync()
    prompt = prompt_of(24, seed=6)
    first, again, other = [(await served.generate(prompt, seed=seed)).token_ids.tolist() for seed in (1, 1, 2)]
    assert first == again
    assert first != other


async def test_a_prompt_beyond_the_models_length_is_refused(served: Served) -> None:
    """B68, B164: a deterministic refusal, not an unavailable engine."""
    await served.sync()
    with pytest.raises(RequestRefused, match="400"):
        await served.generate(prompt_of(MAX_MODEL_LEN + 1))
    assert served.pool.statuses()[0].state == "serving"


async def test_many_requests_at_once_are_all_answered(served: Served) -> None:
    await served.sync()
    generations = await asyncio.gather(*(served.generate(prompt_of(24, seed), max_tokens=4, seed=seed) for seed in range(200)))
    assert all(1 <= generation.token_ids.size <= 4 for generation in generations)
    assert served.pool.statuses()[0].num_running == 0
