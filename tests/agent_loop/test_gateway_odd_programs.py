"""Programs that do what no example does: what is trained is still what was sampled and told, and no rollout harms another."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import LoopError, ProgramUnavailable
from agent_loop.gateway.client import Rollout, serve_rollouts
from agent_loop.gateway.program_process import run_program
from rollouter.failures import TASK_FAULT, reason_of
from tests.agent_loop.scripted import generation
from tests.agent_loop.test_external import AGENT, finished, offering
from tests.agent_loop.test_gateway import CODEC, END, Served, said, serve, user
from tests.agent_loop.test_tool_calling import TASK, session_of
from tests.agent_loop.test_tool_calling import said as said_there
from tests.fakes.living import is_alive


class Numbered:
    """Answers `a1`, `a2`, …, each a while after it was asked."""

    def __init__(self) -> None:
        self.count = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
        self.count += 1
        text = f"a{self.count}"
        await asyncio.sleep(0.3)
        return said(text)


class FirstHangs:
    """The first call is never answered; `begins_with` is what the engine had of it when it aborted it."""

    def __init__(self, begins_with: Generation | None = None) -> None:
        self.begins_with, self.count, self.hangs = begins_with, 0, asyncio.Event()

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
        self.count += 1
        if self.count == 1 and self.begins_with is not None:
            return self.begins_with
        if not self.hangs.is_set():
            self.hangs.set()
            await asyncio.Event().wait()
        return said("four")


async def complete(served: Served, prompt: Any) -> Any:
    return await served.client.completions.create(model="policy", prompt=prompt)


async def test_calls_that_are_told_to_come_again_are_calls_of_their_own() -> None:
    """Best of six: the `openai` client repeats by itself what was refused with 429."""
    async with serve(engine=Numbered(), max_calls_per_session=2) as served:
        ask = served.client.with_options(max_retries=8).chat.completions.create
        answers = await asyncio.gather(*(ask(model="policy", messages=[user("x")]) for _ in range(6)))
        assert len({answer.choices[0].message.content for answer in answers}) == 6


async def test_a_repeated_call_gets_its_own_answer_and_not_a_siblings() -> None:
    async with serve(engine=Numbered()) as served, aiohttp.ClientSession() as http:

        async def ask(**more: str) -> str:
            headers = {"Authorization": f"Bearer {served.found.token}", **more}
            url = f"{served.url}/v1/chat/completions"
            async with http.post(url, json={"messages": [user("x")]}, headers=headers) as response:
                return str((await response.json())["choices"][0]["message"]["content"])

        first = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        second = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.05)
        again = await ask(**{"x-stainless-retry-count": "1"})
        assert {again, await second} == {"a1", "a2"}


@pytest.mark.parametrize("begins_with", [None, generation(CODEC.encode("half"), end="abort")])
async def test_a_rollout_whose_first_call_is_in_flight_at_its_end_has_its_other_turns(begins_with: Any) -> None:
    """Two calls at once, and the program takes the faster answer."""
    engine = FirstHangs(begins_with)
    async with serve(engine=engine) as served:
        slow = asyncio.create_task(served.ask([user("a")]))
        await engine.hangs.wait()
        await served.ask([user("b")])
        await served.gateway.close(served.found)
        await asyncio.gather(slow, return_exceptions=True)
        got = served.session.trajectory()
        assert (served.trained, got.num_turns, got.num_own_segments) == (f"four{END}", 1, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [5]),
        ("min_tokens", 5),
        ("ignore_eos", True),
        ("guided_choice", ["a", "b"]),
        ("structured_outputs", {"choice": ["a"]}),
        ("allowed_token_ids", [1]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("function_call", {"name": "multiply"}),
    ],
)
async def test_what_vllm_would_sample_otherwise_for_is_refused_by_name(name: str, value: Any) -> None:
    async with serve() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.ask([user("x")], extra_body={name: value})
        assert caught.value.param == name


async def test_a_cut_text_goes_on_as_it_is() -> None:
    async with serve(said(" four", end=False), said(" six", end=False)) as served:
        await complete(served, "2+2 is")
        await complete(served, "2+2 is four")
        assert served.session.trajectory().segment_starts.tolist() == [0]


async def test_a_text_that_went_on_with_token_ids_is_not_the_text_that_it_was() -> None:
    async with serve(said(" four", end=False), said(" six", end=False), said("x")) as served:
        await complete(served, "2+2 is")
        await complete(served, [*CODEC.encode("2+2 is four"), *CODEC.encode(" SECRET")])
        await complete(served, "2+2 is four six more")
        assert CODEC.decode_whole(served.engine.prompts[2]) == "2+2 is four six more"


async def test_what_cannot_be_encoded_is_refused_and_the_rollout_goes_on() -> None:
    async with serve(said("a")) as served, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {served.found.token}"}
        body = json.dumps({"messages": [user("\ud800")]})
        async with http.post(f"{served.url}/v1/chat/completions", data=body, headers=headers) as response:
            assert response.status == 400
        headers["Content-Encoding"] = "gzip"
        async with http.post(f"{served.url}/v1/completions", data=b"garbage", headers=headers) as response:
            assert response.status == 400
        await served.ask([user("x")])
        assert served.found.failure is None


@pytest.mark.parametrize("odd", [{"previous_response_id": ["a"]}, {"include": 5}, {"tools": 5}, {"text": {"format": 5}}])
async def test_odd_values_are_refused(odd: dict[str, Any]) -> None:
    async with serve() as served:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            await served.client.responses.create(model="policy", input="x", extra_body=odd)


async def test_requests_that_were_refused_leave_nothing_behind() -> None:
    async with serve(said("a")) as served:
        await served.ask([user("x")])
        for _ in range(5):
            with pytest.raises(openai.BadRequestError):
                await served.ask([user("x " * 4000)])
        assert not list(served.session.forks())


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ({"reward": np.float32(1.0), "parts": {"x": np.float32(1)}}, None),
        ({"reward": "high"}, "ValueError"),
        (float("nan"), "its program gave up"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_what_one_rollout_brings_fails_no_other(tmp_path: Path, brought: Any, words: str | None) -> None:
    async with offering(tmp_path) as (loop, _):

        async def play(rollout: Rollout) -> Any:
            async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0) as client:
                await client.chat.completions.create(model="policy", messages=rollout.task["messages"])
            if rollout.task["task_id"] != "odd":
                return 1.0
            if isinstance(brought, BaseException):
                raise brought
            return brought

        serving = asyncio.create_task(serve_rollouts(play, concurrency=2, address_file=loop.address_file))
        odd = asyncio.create_task(loop.run(replace(TASK, task_id="odd"), session_of(said_there("6"))))
        await asyncio.wait((odd,), timeout=60)
        good = session_of(said_there("6"))
        await finished(asyncio.create_task(loop.run(TASK, good)))
        assert good.reward == 1.0
        if words is None:
            assert odd.exception() is None
        else:
            assert words in str(odd.exception())
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_rollouter_that_comes_again_after_an_orderly_end_is_found(tmp_path: Path) -> None:
    async def play(rollout: Rollout) -> float:
        return 1.0

    async with offering(tmp_path) as (loop, _):
        serving = asyncio.create_task(serve_rollouts(play, concurrency=1, address_file=loop.address_file))
        await asyncio.sleep(0.3)
    async with offering(tmp_path) as (loop, _):
        session = session_of()
        await finished(asyncio.create_task(loop.run(TASK, session)))
        assert session.reward == 1.0
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_one_copy_that_never_starts_does_not_stop_the_other(tmp_path: Path) -> None:
    marker = tmp_path / "first"
    code = f"import os\nos.close(os.open({str(marker)!r}, os.O_CREAT | os.O_EXCL))\n{AGENT}\nasyncio.run(main())"
    async with offering(tmp_path, command=("python", "-c", code), num_programs=2) as (loop, _):
        for _ in range(3):
            await finished(asyncio.create_task(loop.run(TASK, session_of(said_there("6")))))


async def test_a_program_that_works_again_takes_rollouts_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    code = f"import os, sys\nif os.path.exists({str(broken)!r}): sys.exit('not yet')\n{AGENT}\nasyncio.run(main())"
    async with offering(tmp_path, command=("python", "-c", code)) as (loop, _):
        with pytest.raises(ProgramUnavailable, match="not yet") as caught:
            await finished(asyncio.create_task(loop.run(TASK, session_of())))
        assert reason_of(caught.value) not in TASK_FAULT
        broken.unlink()
        async with asyncio.timeout(120):
            while True:
                try:
                    return await loop.run(TASK, session_of(said_there("6")))
                except ProgramUnavailable:
                    await asyncio.sleep(0.5)


async def test_a_log_that_cannot_be_written_does_not_leave_rollouts_waiting(tmp_path: Path) -> None:
    (tmp_path / "logs" / "program-0.log").mkdir(parents=True)
    async with offering(tmp_path, command=("python", "-c", "pass")) as (loop, _):
        with pytest.raises(ProgramUnavailable, match=r"program-0\.log"):
            await finished(asyncio.create_task(loop.run(TASK, session_of())))


async def test_an_end_that_comes_as_the_rollout_is_given_up_is_noticed(tmp_path: Path) -> None:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context["message"]))
    async with offering(tmp_path) as (loop, outside):
        playing = asyncio.create_task(loop.run(TASK, session_of(said_there("6"))))
        _, rollout = await outside.claim()
        ending = asyncio.create_task(outside.post(rollout, "end", {"error": "boom"}))
        await asyncio.sleep(0)
        playing.cancel()
        results = await asyncio.gather(playing, return_exceptions=True)
        assert await ending in (200, 410)
        assert isinstance(results[0], (LoopError, asyncio.CancelledError))
    assert unheard == []


async def test_a_program_is_killed_also_where_nobody_waits_for_its_grace(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"import os, signal, time; {ignore}; print(os.getpid(), flush=True); time.sleep(300)"
    log = tmp_path / "log"
    with log.open("ab") as file:
        running = asyncio.create_task(run_program(("python", "-c", code), {}, into=file, grace_s=30.0))
        async with asyncio.timeout(60):
            while not log.read_text().strip():  # noqa: ASYNC110 - it tells by its output
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(60):
        while is_alive(int(log.read_text())):  # noqa: ASYNC110 - nobody tells of the end of a process that is not ours
            await asyncio.sleep(0.05)


async def test_a_hung_up_stream_costs_nothing() -> None:
    async with serve(said("x" * 90, end=False), said("y")) as served:
        port = int(served.url.rsplit(":", 1)[1].split("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"messages": [user("x")], "stream": True}).encode()
        head = f"POST /{served.url.split('/', 3)[3]}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        writer.write(f"{head}Authorization: Bearer {served.found.token}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.transport.abort()
        await asyncio.sleep(0.3)
        await served.ask([user("y")])
        assert served.found.failure is None
