"""Programs that take rollouts from the gateway, with the real `openai` client: each rollout is played once, and ends."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from agent_loop.deadline import Deadline
from agent_loop.errors import EngineUnavailable, LoopError, Unscored
from agent_loop.external import External
from agent_loop.gateway.client import GatewayLost, Rollout, serve_rollouts
from agent_loop.loop import LoopSetup, load_agent_loop
from configs.schema import GatewaySettings, ToolSettings
from tests.agent_loop.test_tool_calling import TASK, said, session_of
from tests.fakes.living import is_alive, living_children

AGENT = """
import asyncio, os
import httpx, openai
URL, HEADERS = os.environ["HEADRACE_GATEWAY_URL"], {"Authorization": "Bearer " + os.environ["HEADRACE_GATEWAY_TOKEN"]}

async def main():
    async with httpx.AsyncClient(timeout=60) as http:
        while True:
            claim = await http.post(URL + "/sessions", headers=HEADERS)
            if claim.status_code == 429:
                continue
            rollout = claim.raise_for_status().json()
            client = openai.AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0)
            answer = await client.chat.completions.create(model="policy", messages=rollout["task"]["messages"])
            right = answer.choices[0].message.content == rollout["task"]["ground_truth"]
            key = {"Authorization": "Bearer " + rollout["api_key"]}
            await http.post(rollout["reward_url"], headers=key, json={"reward": float(right)})
"""


class Outside:
    """A program that runs elsewhere."""

    def __init__(self, loop: External, http: aiohttp.ClientSession) -> None:
        found = json.loads(loop.address_file.read_bytes())
        self.url, self.token, self.http = found["url"], found["token"], http

    async def claim(self, wait_s: float = 20.0, token: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        async with self.http.post(f"{self.url}/sessions", json={"wait_s": wait_s}, headers=headers) as response:
            return response.status, await response.json()

    async def post(self, rollout: Any, what: str, body: Any) -> int:
        headers = {"Authorization": f"Bearer {rollout['api_key']}"}
        async with self.http.post(rollout[f"{what}_url"], json=body, headers=headers) as response:
            return response.status

    async def ask(self, rollout: Any) -> str:
        async with openai.AsyncOpenAI(base_url=rollout["base_url"], api_key=rollout["api_key"], max_retries=0) as client:
            ask = client.chat.completions.create
            answer = await ask(model="policy", messages=rollout["task"]["messages"])
        return str(answer.choices[0].message.content)


@asynccontextmanager
async def offering(directory: Path, **settings: Any) -> AsyncIterator[tuple[External, Outside]]:
    gateway = GatewaySettings(**settings)
    setup = LoopSetup(tools=ToolSettings(), environment=None, gateway=gateway, run_dir=directory)
    loop: Any = load_agent_loop("external", setup)
    await loop.open()
    try:
        async with aiohttp.ClientSession() as http:
            yield loop, Outside(loop, http)
    finally:
        await loop.close()


async def finished(playing: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        await playing


async def test_a_program_takes_a_rollout_and_its_reward_ends_it(tmp_path: Path) -> None:
    session = session_of(said("6"))
    async with offering(tmp_path) as (loop, outside):
        assert stat.S_IMODE(loop.address_file.stat().st_mode) == 0o600
        playing = asyncio.create_task(loop.run(TASK, session))
        status, rollout = await outside.claim()
        assert (status, rollout["task"]["ground_truth"]) == (200, TASK.ground_truth)
        assert await outside.ask(rollout) == "6"
        assert await outside.post(rollout, "reward", {"reward": 0.5, "parts": {"style": 1.0}}) == 200
        await finished(playing)
        assert await outside.post(rollout, "reward", {"reward": 1.0}) == 410
    got = session.trajectory()
    assert (got.reward, dict(got.reward_parts), got.num_turns) == (0.5, {"style": 1.0}, 1)
    assert not loop.address_file.exists()


async def test_a_rollout_is_given_to_one_program_and_the_others_are_told_to_come_again(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        claims = await asyncio.gather(*(outside.claim(1.0) for _ in range(4)))
        assert sorted(status for status, _ in claims) == [200, 429, 429, 429]
        status, refusal = await outside.claim(0)
        assert (status, refusal["error"]["code"]) == (429, "no_rollout")
        playing.cancel()


async def test_a_program_that_waits_gets_the_next_rollout(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        claim = asyncio.create_task(outside.claim(60.0))
        await asyncio.sleep(0.1)
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        status, rollout = await claim
        assert status == 200
        await outside.post(rollout, "end", {"reward": 1.0})
        await finished(playing)


async def test_a_program_that_hung_up_does_not_take_a_rollout_with_it(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        hung_up = asyncio.create_task(outside.claim(60.0))
        await asyncio.sleep(0.2)
        hung_up.cancel()
        await asyncio.gather(hung_up, return_exceptions=True)
        await asyncio.sleep(0.2)
        session = session_of(said("6"))
        playing = asyncio.create_task(loop.run(TASK, session))
        status, rollout = await outside.claim()
        assert status == 200
        await outside.ask(rollout)
        await outside.post(rollout, "end", {})
        await finished(playing)
        assert session.trajectory().reward is None


async def test_a_stranger_takes_nothing(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        for token in ("x", "é", "Bearer x"):
            assert (await outside.claim(0, token))[0] == 401
        assert (await outside.claim(-1.0))[0] == 400
        playing.cancel()


async def test_a_program_that_gives_up_fails_its_rollout_with_its_words(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        _, rollout = await outside.claim()
        await outside.post(rollout, "end", {"error": "the browser crashed"})
        with pytest.raises(LoopError, match="the browser crashed"):
            await finished(playing)


async def test_a_program_that_falls_silent_fails_its_rollout(tmp_path: Path) -> None:
    async with offering(tmp_path, idle_timeout_s=0.3) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        _, rollout = await outside.claim()
        with pytest.raises(LoopError, match="idle_timeout_s"):
            await finished(playing)
        assert await outside.post(rollout, "reward", 1.0) == 410


async def test_without_a_reward_that_was_to_be_posted_it_is_unscored(tmp_path: Path) -> None:
    async with offering(tmp_path, reward="posted") as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        _, rollout = await outside.claim()
        await outside.ask(rollout)
        await outside.post(rollout, "end", {})
        with pytest.raises(Unscored):
            await finished(playing)


async def test_an_engine_that_fails_is_what_the_rollout_fails_of(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(EngineUnavailable("gone"))))
        _, rollout = await outside.claim()
        with pytest.raises(openai.InternalServerError):
            await outside.ask(rollout)
        with pytest.raises(EngineUnavailable):
            await finished(playing)


async def test_a_rollouts_time_begins_when_it_is_taken(tmp_path: Path) -> None:
    async with offering(tmp_path) as (loop, outside):
        session = session_of(said("6"))
        session.deadline = Deadline(2.0)

        async def play() -> None:
            assert session.deadline is not None
            async with session.deadline.limit():
                await loop.run(TASK, session)

        playing = asyncio.create_task(play())
        await asyncio.sleep(2.5)
        assert session.deadline.left_s is None
        status, _ = await outside.claim()
        assert status == 200
        with pytest.raises(TimeoutError):
            await finished(playing)


async def test_a_program_of_ours_plays_many_rollouts_and_ends_with_the_loop(tmp_path: Path) -> None:
    command = (sys.executable, "-c", textwrap.dedent(AGENT) + "\nasyncio.run(main())")
    sessions = [session_of(said("6")) for _ in range(5)]
    async with offering(tmp_path, command=command, num_programs=2) as (loop, _):
        async with asyncio.timeout(120):
            await asyncio.gather(*(loop.run(replace(TASK, task_id=f"t{at}"), one) for at, one in enumerate(sessions)))
        children = living_children("HEADRACE_GATEWAY_URL")
        assert len(children) == 2
    assert [one.trajectory().reward for one in sessions] == [1.0] * 5
    assert not any(is_alive(child) for child in children)


async def test_a_program_of_ours_that_dies_fails_what_it_took_and_comes_again(tmp_path: Path) -> None:
    dying = AGENT.replace("right = answer", "os._exit(7) if rollout['task']['task_id'] == 'bad' else None; right = answer")
    command = (sys.executable, "-c", textwrap.dedent(dying) + "\nasyncio.run(main())")
    async with offering(tmp_path, command=command) as (loop, _):
        async with asyncio.timeout(120):
            with pytest.raises(LoopError, match="status 7"):
                await loop.run(replace(TASK, task_id="bad"), session_of(said("6")))
            session = session_of(said("6"))
            await loop.run(TASK, session)
        assert session.trajectory().reward == 1.0


async def test_a_program_of_ours_that_never_works_fails_rollouts_instead_of_hanging(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such module')")
    async with offering(tmp_path, command=command) as (loop, _):
        async with asyncio.timeout(120):
            with pytest.raises(LoopError, match="no such module"):
                await loop.run(TASK, session_of(said("6")))
            with pytest.raises(LoopError, match="no such module"):
                await loop.run(TASK, session_of(said("6")))
        assert "no such module" in (tmp_path / "logs" / "program-0.log").read_text()


def test_the_loop_needs_a_directory() -> None:
    with pytest.raises(LoopError, match="run_dir"):
        load_agent_loop("external")


async def test_a_program_of_python_serves_rollouts_in_a_few_lines(tmp_path: Path) -> None:
    sessions = [session_of(said("6")), session_of(said("7")), session_of(said("x"))]
    tasks = [replace(TASK, task_id=f"t{at}", extra_info={"at": at}) for at in range(3)]
    async with offering(tmp_path) as (loop, _):

        async def play(rollout: Rollout) -> Any:
            async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0) as client:
                await client.chat.completions.create(model="policy", messages=rollout.task["messages"])
            match rollout.task["extra_info"]["at"]:
                case 0:
                    return {"reward": 1.0, "parts": {"style": 0.5}}
                case 1:
                    return None
            raise RuntimeError("the browser crashed")

        serving = asyncio.create_task(serve_rollouts(play, concurrency=3, address_file=loop.address_file))
        played = [asyncio.create_task(loop.run(task, session)) for task, session in zip(tasks, sessions, strict=True)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*played, return_exceptions=True)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert results[:2] == [None, None]
    assert "RuntimeError: the browser crashed" in str(results[2])
    assert (sessions[0].reward, sessions[0].reward_parts, sessions[1].reward) == (1.0, {"style": 0.5}, None)


async def test_a_program_that_is_refused_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(rollout: Rollout) -> float:
        return 0.0

    async with offering(tmp_path) as (_, outside):
        monkeypatch.setenv("HEADRACE_GATEWAY_URL", outside.url)
        with pytest.raises(GatewayLost, match="HEADRACE_GATEWAY_TOKEN"):
            await serve_rollouts(play)
        monkeypatch.setenv("HEADRACE_GATEWAY_TOKEN", "wrong")
        with pytest.raises(GatewayLost, match="401"):
            await serve_rollouts(play)


async def test_a_gateway_that_listens_everywhere_names_itself_as_it_was_reached(tmp_path: Path) -> None:
    """B176."""
    async with offering(tmp_path, host="0.0.0.0") as (loop, outside):
        assert outside.url.startswith("http://127.0.0.1:")
        playing = asyncio.create_task(loop.run(TASK, session_of(said("6"))))
        outside.url = outside.url.replace("127.0.0.1", "127.0.0.2")
        _, rollout = await outside.claim()
        assert rollout["base_url"].startswith(f"{outside.url}/sessions/")
        assert await outside.ask(rollout) == "6"
        playing.cancel()
