"""The gateway, asked by the real `openai` client: what is trained is what was sampled, whatever a program sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import EngineUnavailable
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.served import ServedSession
from agent_loop.gateway.server import Gateway
from agent_loop.session import Session
from agent_loop.tool_formats import ToolFormat
from configs.schema import GatewaySettings
from tests.agent_loop.chat_models import FAMILIES, make_codec
from tests.agent_loop.scripted import ScriptedEngine, generation

CODEC = make_codec(FAMILIES["qwen2.5"])
END = "<|im_end|>"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def said(text: str, *, end: bool = True) -> Generation:
    return generation(CODEC.encode(text + (END if end else "")), end="stop" if end else "length")


def user(text: str) -> Any:
    return {"role": "user", "content": text}


class Served:
    def __init__(self, gateway: Gateway, found: ServedSession, session: Session, engine: Any) -> None:
        self.gateway, self.found, self.session, self.engine = gateway, found, session, engine
        self.url = gateway.url(found)
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=found.token, max_retries=0, timeout=30)

    async def ask(self, messages: Any, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=messages, **more)

    @property
    def trained(self) -> str:
        got = self.session.trajectory()
        return CODEC.decode_whole(got.tokens[got.loss_mask == 1].tolist())


@asynccontextmanager
async def serve(*turns: Generation | Exception, engine: Any = None, **settings: Any) -> AsyncIterator[Served]:
    engine = engine or ScriptedEngine(*turns)
    session = Session(
        engine, SamplingParams(temperature=1.0, max_tokens=100), rollout_id="r.0", max_model_len=2048, codec=CODEC
    )
    gateway = Gateway(GatewaySettings(**settings))
    await gateway.start()
    found = gateway.open(session, Branches(session, tool_format=ToolFormat.HERMES, history="template"))
    served = Served(gateway, found, session, engine)
    try:
        yield served
    finally:
        await served.client.close()
        await gateway.close(found)
        await gateway.stop()


async def test_a_conversation_is_one_segment_of_the_tokens_sampled() -> None:
    async with serve(said("four"), said("six")) as served:
        messages = [user("2+2")]
        first = await served.ask(messages)
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("four", "stop")
        assert first.usage.completion_tokens == len(CODEC.encode("four" + END))
        messages += [first.choices[0].message.model_dump(exclude_none=True), user("3+3")]
        await served.ask(messages)
        got = served.session.trajectory()
        assert got.segment_starts.tolist() == [0]
        assert (got.num_turns, served.trained) == (2, f"four{END}six{END}")
        assert served.engine.prompts[1][: len(served.engine.prompts[0])] == served.engine.prompts[0]


async def test_another_history_begins_a_segment() -> None:
    async with serve(said("four"), said("five"), said("six")) as served:
        await served.ask([user("2+2")])
        await served.ask([{"role": "system", "content": "You sum up."}, user("x")])
        await served.ask([user("2+2"), {"role": "assistant", "content": "FOUR"}, user("3+3")])
        got = served.session.trajectory()
        assert (got.segment_starts.size, got.counts["branches"]) == (3, 2)
        assert served.trained == f"four{END}five{END}six{END}"


async def test_calls_at_once_are_branches() -> None:
    class Waiting:
        def __init__(self) -> None:
            self.both = asyncio.Barrier(2)

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
            await self.both.wait()
            return said(request_id)

    async with serve(engine=Waiting()) as served:
        answers = await asyncio.gather(served.ask([user("a")]), served.ask([user("a")]))
        assert len({answer.choices[0].message.content for answer in answers}) == 2
        assert served.session.trajectory().segment_starts.size == 2


async def test_tool_calls_go_back_and_forth_in_one_segment() -> None:
    text = 'so <tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
    async with serve(said(text), said("6")) as served:
        messages = [user("2*3")]
        first = (await served.ask(messages, tools=TOOLS)).choices[0]
        call = first.message.tool_calls[0]
        assert (first.finish_reason, first.message.content, call.function.name) == ("tool_calls", "so", "multiply")
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        messages.append(first.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "6"})
        await served.ask(messages, tools=TOOLS)
        assert served.trained == f"{text}{END}6{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]


async def test_a_call_that_the_token_limit_cut_is_text() -> None:
    """B66."""
    async with serve(said('<tool_call>{"name": "multiply"', end=False)) as served:
        choice = (await served.ask([user("x")], tools=TOOLS)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


async def test_a_stream_says_the_same() -> None:
    async with serve(said('<tool_call>{"name": "multiply", "arguments": {"a": 1}}</tool_call>'), said("fine")) as served:
        chunks = [chunk async for chunk in await served.ask([user("x")], tools=TOOLS, stream=True)]
        assert chunks[1].choices[0].delta.tool_calls[0].function.name == "multiply"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        stream = await served.ask([user("y")], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "fine"
        assert chunks[-1].usage.completion_tokens == len(CODEC.encode("fine" + END))


async def test_the_blocking_client_works() -> None:
    async with serve(said("four")) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.found.token, max_retries=0) as client:
            ask = client.chat.completions.create
            answer = await asyncio.to_thread(lambda: ask(model="m", messages=[user("2+2")], logprobs=True))
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].logprob == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("n", 2), ("presence_penalty", 1), ("logit_bias", {"5": 1}), ("stop", ["x"])]
)
async def test_what_would_sample_otherwise_is_refused_by_name(name: str, value: Any) -> None:
    async with serve() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.ask([user("x")], **{name: value})
        assert caught.value.param == name


async def test_another_temperature_is_refused_where_the_settings_say_so() -> None:
    async with serve(said("a"), temperature="refuse") as served:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await served.ask([user("x")], temperature=0.5)
        await served.ask([user("x")], temperature=1.0)


async def test_messages_beyond_the_model_are_refused_and_the_rollout_goes_on() -> None:
    async with serve(said("a")) as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.ask([user("x " * 4000)])
        assert caught.value.code == "context_length_exceeded"
        await served.ask([user("x")])
        assert served.trained == f"a{END}"


async def test_a_session_has_its_own_token_and_ends() -> None:
    async with serve(said("a")) as served:
        stranger = served.client.with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        assert [model.id async for model in served.client.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError):
            await served.client.embeddings.create(model="policy", input="x")
        await served.gateway.close(served.found)
        with pytest.raises(openai.APIStatusError) as caught:
            await served.ask([user("x")])
        assert caught.value.status_code == 410


async def test_too_many_calls_at_once_are_told_to_come_again() -> None:
    class Held:
        def __init__(self) -> None:
            self.asked, self.go = asyncio.Event(), asyncio.Event()

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
            self.asked.set()
            await self.go.wait()
            return said("a")

    engine = Held()
    async with serve(engine=engine, max_calls_per_session=1) as served:
        first = asyncio.create_task(served.ask([user("x")]))
        await engine.asked.wait()
        with pytest.raises(openai.RateLimitError) as caught:
            await served.ask([user("y")])
        assert caught.value.response.headers["Retry-After"] == "1"
        engine.go.set()
        await first


async def test_an_engine_that_fails_ends_the_session_with_its_error() -> None:
    async with serve(EngineUnavailable("gone")) as served:
        with pytest.raises(openai.InternalServerError):
            await served.ask([user("x")])
        assert isinstance(served.found.failure, EngineUnavailable)


async def test_a_reward_is_posted_with_its_parts() -> None:
    async with serve(said("a")) as served:
        post: Any = served.client.with_options(base_url=served.url).post
        await served.ask([user("x")])
        with pytest.raises(openai.BadRequestError):
            await post("/reward", body={"reward": "high"}, cast_to=object)
        await post("/reward", body={"reward": 0.5, "parts": {"style": 1}}, cast_to=object)
        got = served.session.trajectory()
        assert (got.reward, dict(got.reward_parts)) == (0.5, {"style": 1.0})
        assert np.count_nonzero(got.loss_mask) == len(CODEC.encode("a" + END))


async def test_a_call_that_the_client_repeats_is_sampled_once() -> None:
    """A client that lost patience asks again by itself."""

    class Slow:
        def __init__(self) -> None:
            self.asked, self.go, self.count = asyncio.Event(), asyncio.Event(), 0

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
            self.count += 1
            self.asked.set()
            await self.go.wait()
            return said("four")

    engine = Slow()
    async with serve(engine=engine) as served:
        impatient = asyncio.create_task(
            served.client.with_options(timeout=0.5, max_retries=5).chat.completions.create(
                model="policy", messages=[user("2+2")]
            )
        )
        await engine.asked.wait()
        while not served.session.counts.get("repeated_calls"):  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.05)
        engine.go.set()
        answer = await impatient
        assert answer.choices[0].message.content == "four"
        assert engine.count == 1
        assert served.session.trajectory().segment_starts.tolist() == [0]
        assert served.trained == f"four{END}"


async def test_a_key_of_odd_bytes_is_another_key() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        for key in (b"\xff\xfe", b"", b"Bearer " * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1].split("/")[0]))
            path = served.url.split("/", 3)[3].encode()
            writer.write(b"GET /" + path + b"/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
            assert (await reader.readline()).split()[1] in (b"401", b"400")
            writer.close()
        async with http.post(f"{served.url}/end", headers={"Authorization": f"Bearer {served.found.token}"}) as response:
            assert response.status == 409


async def test_an_answer_that_nobody_got_is_not_trained() -> None:
    class SlowOnce:
        def __init__(self) -> None:
            self.count, self.go = 0, asyncio.Event()

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
            self.count += 1
            if self.count == 1:
                await self.go.wait()
            return said(f"answer {self.count}")

    engine = SlowOnce()
    async with serve(engine=engine, max_calls_per_session=1) as served:
        with pytest.raises(openai.APITimeoutError):
            await served.client.with_options(timeout=0.3).chat.completions.create(model="policy", messages=[user("x")])
        await asyncio.sleep(0.2)
        answer = await served.ask([user("y")])  # nor does it hold a place
        assert answer.choices[0].message.content == "answer 2"
        engine.go.set()
        await asyncio.sleep(0.2)
        await served.gateway.close(served.found)
        got = served.session.trajectory()
        assert (served.trained, got.num_turns, got.counts["abandoned_turns"]) == (f"answer 2{END}", 1, 1)
        assert CODEC.decode(got.response_ids.tolist()) == "answer 2"


async def test_a_call_that_is_broken_off_by_the_end_is_not_trained() -> None:
    class Held:
        asked = asyncio.Event()

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, *, request_id: str) -> Generation:
            if request_id == "r.0-0":
                return said("a")
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    engine = Held()
    async with serve(engine=engine) as served:
        await served.ask([user("x")])
        late = asyncio.create_task(served.ask([user("x"), {"role": "assistant", "content": "a"}, user("y")]))
        await engine.asked.wait()
        await served.gateway.close(served.found)
        with pytest.raises(openai.APIStatusError):
            await late
        got = served.session.trajectory()
        assert (served.trained, got.num_turns) == (f"a{END}", 1)


@pytest.mark.parametrize("call", ['{"name": "multiply", "arguments": {"a": 1e999}}', '{"name": "multiply", "arguments": [1]}'])
async def test_a_call_that_no_program_could_be_told_is_text(call: str) -> None:
    """B157."""
    text = f"<tool_call>{call}</tool_call>"
    async with serve(said(text)) as served:
        message = (await served.ask([user("x")], tools=TOOLS)).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)


@pytest.mark.parametrize("what", ["v1/chat/completions", "reward"])
async def test_a_request_that_ends_after_its_rollout_is_refused(what: str) -> None:
    async with serve(said("a"), said("late")) as served:
        await served.ask([user("x")])
        body = json.dumps({"messages": [user("late")], "reward": 0.125}).encode()
        address, path = served.url.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(
            f"POST /{path}/{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.found.token}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body[:5]
        )
        await writer.drain()
        await asyncio.sleep(0.2)
        await served.gateway.close(served.found)
        writer.write(body[5:])
        assert (await reader.readline()).split()[1] == b"410"
        writer.close()
        assert (served.trained, served.session.reward) == (f"a{END}", None)


async def test_a_rollout_has_so_many_calls_and_no_more() -> None:
    async with serve(said("a"), said("b"), max_calls=2) as served:
        await served.ask([user("x")])
        await served.ask([user("y")])
        with pytest.raises(openai.PermissionDeniedError, match=r"gateway\.max_calls"):
            await served.ask([user("z")])


async def test_a_long_message_is_encoded_beside_the_event_loop() -> None:
    async with serve(said("a"), said("b")) as served:
        with pytest.raises(openai.BadRequestError, match=r"engine\.max_model_len"):
            await served.ask([user("lorem " * 10_000)])
        await served.ask([user("x")])
        with pytest.raises(openai.BadRequestError, match=r"engine\.max_model_len"):
            await served.ask([user("x"), {"role": "assistant", "content": "a"}, user("lorem " * 10_000)])
        await served.ask([user("x"), {"role": "assistant", "content": "a"}, user("y")])
        assert served.trained == f"a{END}b{END}"
        assert served.session.trajectory().segment_starts.tolist() == [0]
