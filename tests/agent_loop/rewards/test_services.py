"""Judges and reward models: their verdict is the score; whatever keeps them from one is infrastructure, never a score."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agent_loop.errors import RewardError, RewardUnavailable
from agent_loop.rewards import judge, reward_model

INFO = {"prompt_text": "What is 3+4? {solution}"}


class Service:
    """An HTTP service that keeps what it was asked and answers as it was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, str | None]] = []
        self.answer: Callable[[], web.Response] = lambda: web.json_response({})
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json(), request.headers.get("Authorization")))
        return self.answer()


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    app = web.Application()
    app.router.add_post("/{tail:.*}", service.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield service
    finally:
        await runner.cleanup()


def says(text: str) -> Callable[[], web.Response]:
    return lambda: web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


async def test_a_judges_last_verdict_is_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    async with serving() as service:
        service.answer = says("Score: 3 at first. **Score:** 7.5")
        got = await judge("d", "7 {ground_truth}", "seven", INFO, url=f"{service.url}/v1", model="m", api_key_env="JUDGE_KEY")
        assert got == 0.75
        ((path, body, key),) = service.asked
    assert (path, body["model"], key) == ("/v1/chat/completions", "m", "Bearer k")
    content = body["messages"][0]["content"]
    assert "What is 3+4? {solution}" in content
    assert "7 {ground_truth}" in content
    assert content.count("seven") == 1


@pytest.mark.parametrize("text", ["no verdict", "Score: 11", ""])
async def test_a_judge_without_a_usable_verdict_gave_none(text: str) -> None:
    """B105"""
    async with serving() as service:
        service.answer = says(text)
        with pytest.raises(RewardUnavailable, match="judge http"):
            await judge("d", "7", "7", INFO, url=service.url, model="m")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, RewardUnavailable), (500, RewardUnavailable), (429, RewardUnavailable), (404, RewardError), (400, RewardError)],
)
async def test_a_service_that_is_down_is_told_from_one_that_refuses(status: int, kind: type[RewardError]) -> None:
    """B105: judge 503."""
    async with serving() as service:
        service.answer = lambda: web.Response(status=status, text="why")
        for call in (judge, reward_model):
            with pytest.raises(RewardError, match=f"got status {status}, expected 200: why") as caught:
                await call("d", "7", "7", INFO, url=service.url, model="m")
            assert type(caught.value) is kind


async def test_nobody_at_the_address_and_answers_that_are_none_are_infrastructure() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(RewardUnavailable, match="ClientConnectorError"):
            await judge("d", "7", "7", INFO, url=f"http://127.0.0.1:{held.getsockname()[1]}", model="m")
    async with serving() as service:
        service.answer = lambda: web.Response(text="<html>")
        with pytest.raises(RewardUnavailable):
            await judge("d", "7", "7", INFO, url=service.url, model="m")
        service.answer = lambda: web.json_response({"data": []})
        with pytest.raises(RewardUnavailable, match="expected data of one classify result"):
            await reward_model("d", "7", "7", INFO, url=service.url, model="m")


async def test_a_missing_key_is_said_by_its_name() -> None:
    with pytest.raises(RewardError, match="the environment has no NO_SUCH_KEY"):
        await judge("d", "7", "7", INFO, url="http://127.0.0.1:1", model="m", api_key_env="NO_SUCH_KEY")


CLASSES = {"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}


@pytest.mark.parametrize(
    ("arguments", "data", "expected", "asked"),
    [
        ({}, CLASSES, 0.75, {"model": "m", "input": "What is 3+4? {solution}7"}),
        ({"label": 0}, CLASSES, 0.25, None),
        ({"label": "good"}, CLASSES, 0.75, None),
        ({"label": "bad"}, CLASSES, 0.25, None),
        ({"kind": "pooling", "text": "{solution}"}, {"index": 0, "data": [[0.5], [1.5]]}, 1.5, {"model": "m", "input": "7"}),
        ({"kind": "pooling"}, {"index": 0, "data": [-2.5]}, -2.5, None),
        (
            {"kind": "score"},
            {"index": 0, "score": 0.125},
            0.125,
            {"model": "m", "text_1": "What is 3+4? {solution}", "text_2": "7"},
        ),
    ],
)
async def test_a_reward_models_output_is_the_score(
    arguments: dict[str, Any], data: dict[str, Any], expected: float, asked: dict[str, Any] | None
) -> None:
    async with serving() as service:
        service.answer = lambda: web.json_response({"data": [data]})
        assert await reward_model("d", "7", "7", INFO, url=service.url, model="m", **arguments) == expected
        ((path, body, _),) = service.asked
    assert path == f"/{arguments.get('kind', 'classify')}"
    assert asked is None or body == asked
