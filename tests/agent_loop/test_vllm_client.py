"""The client's three kinds of failure, its deadlines and its connections, against a server that misbehaves on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import SamplingParams
from agent_loop.errors import BadGeneration, EngineUnavailable, RequestRefused
from agent_loop.vllm_client import VllmClient, logprobs_follow_temperature
from tests.fakes.fake_vllm import FakeVllm

GENERATE = "/inference/v1/generate"
PROMPT = np.array([1, 2, 3], np.int32)
FOUR = SamplingParams(temperature=1.0, max_tokens=4)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeVllm]:
    async with FakeVllm(socket=tmp_path / "e") as server:
        yield server


@pytest.fixture
async def client(server: FakeVllm) -> AsyncIterator[VllmClient]:
    async with VllmClient(server.address, request_timeout_s=60, control_timeout_s=60) as client:
        yield client


async def test_tokens_logprobs_and_versions_come_back(server: FakeVllm, client: VllmClient) -> None:
    server.label = "5"
    got = await client.generate(PROMPT, FOUR, request_id="a", cache_salt="s")
    assert got.token_ids.size == 4
    assert got.versions.tolist() == [5]
    assert got.stop_reason == "length"
    assert server.bodies[0]["cache_salt"] == "s"


async def test_the_stop_token_is_part_of_the_generation(server: FakeVllm, client: VllmClient) -> None:
    """B62: with its own log-probability."""
    first = int((await client.generate(PROMPT, FOUR, request_id="a")).token_ids[0])
    stop = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(first,))
    got = await client.generate(PROMPT, stop, request_id="b")
    assert (got.token_ids.tolist(), got.stop_reason) == ([first], "stop")
    assert got.logprobs.tolist() == [-0.5]


async def test_as_many_requests_run_at_once_as_there_are(server: FakeVllm, client: VllmClient) -> None:
    """B137: 512 at once; a pool of 100 connections would show 100."""
    server.token_s = 0.5
    one = SamplingParams(temperature=1.0, max_tokens=1)
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.generate(PROMPT, one, request_id=str(i)) for i in range(512)))
    assert server.peak_active == 512


@pytest.mark.parametrize("fault", ["500", "503", "close"])
async def test_a_server_that_fails_is_unavailable(server: FakeVllm, client: VllmClient, fault: Any) -> None:
    server.fail(GENERATE, fault)
    with pytest.raises(EngineUnavailable, match="a-7"):
        await client.generate(PROMPT, FOUR, request_id="a-7")
    assert (await client.generate(PROMPT, FOUR, request_id="b")).token_ids.size == 4


async def test_a_refusal_carries_the_servers_words_and_is_not_tried_again(server: FakeVllm, client: VllmClient) -> None:
    """B68: a deterministic 400."""
    server.fail(GENERATE, "400")
    with pytest.raises(RequestRefused, match=r"a-7.*400.*told to answer 400"):
        await client.generate(PROMPT, FOUR, request_id="a-7")
    assert server.calls == [GENERATE]


async def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    async with VllmClient(f"unix:{tmp_path}/none", request_timeout_s=60, control_timeout_s=60) as client:
        with pytest.raises(EngineUnavailable, match="none"):
            await client.generate(PROMPT, FOUR, request_id="a")
        assert not await client.is_healthy(timeout_s=5)


async def test_silence_ends_at_the_deadline(server: FakeVllm) -> None:
    server.fail(GENERATE, "hang")
    server.fail("/pause", "hang")
    async with VllmClient(server.address, request_timeout_s=0.1, control_timeout_s=0.2) as client:
        with pytest.raises(EngineUnavailable, match=r"no answer .* within 0\.1 s"):
            await client.generate(PROMPT, FOUR, request_id="a")
        with pytest.raises(EngineUnavailable, match=r"/pause.* within 0\.2 s"):
            await client.pause("keep", clear_cache=False)


async def test_a_cancelled_call_drops_the_request_at_the_server(server: FakeVllm, client: VllmClient) -> None:
    server.token_s = 600
    task = asyncio.create_task(client.generate(PROMPT, FOUR, request_id="a"))
    async with asyncio.timeout(30):
        await server.until(lambda: server.active == 1)
        task.cancel()
        await server.until(lambda: server.active == 0)
    assert server.dropped == 1


async def test_an_aborted_request_answers_with_what_it_has(server: FakeVllm, client: VllmClient) -> None:
    server.token_s = 0.01
    many = SamplingParams(temperature=1.0, max_tokens=100_000)
    task = asyncio.create_task(client.generate(PROMPT, many, request_id="a"))
    async with asyncio.timeout(30):
        await server.until(lambda: server.active == 1)
        await asyncio.sleep(0.05)
        await client.abort(["a"])
        got = await task
    assert got.stop_reason == "abort"
    assert got.token_ids.size == got.logprobs.size


async def test_a_broken_answer_is_no_generation(server: FakeVllm, client: VllmClient) -> None:
    server.shape_response = lambda response: '{"choices": [{"token_ids": [1'
    with pytest.raises(BadGeneration, match="request a"):
        await client.generate(PROMPT, FOUR, request_id="a")


async def test_raw_logprobs_are_told_from_processed_ones(server: FakeVllm, client: VllmClient) -> None:
    """B50: at temperature 0.5 differences must double."""
    server.logprob_of = lambda token, temperature: -token / 100 / temperature
    assert await logprobs_follow_temperature(client) is True
    server.logprob_of = lambda token, temperature: -token / 100
    assert await logprobs_follow_temperature(client) is False
    server.logprob_of = lambda token, temperature: -1.0
    assert await logprobs_follow_temperature(client) is None


def test_an_address_is_a_socket_or_a_url() -> None:
    with pytest.raises(RequestRefused, match="ftp://x"):
        VllmClient("ftp://x", request_timeout_s=1, control_timeout_s=1)
