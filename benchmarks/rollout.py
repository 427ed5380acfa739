"""What the rollouter costs beside the engine that it asks: tokens per second through an agent loop and through the gateway over
those of vLLM asked directly, and trajectories per second where the engine costs nothing.

    python -m benchmarks.rollout [--quick] [--json] [--in-flight N] [--rounds N]

One real vLLM server of a small model with random weights. The same requests, always so many at once, go to it in three ways
that take turns: plain HTTP requests whose answers are read and thrown away; whole attempts as the rollouter plays them
(session, seat, request, answer checked and turned into columns, reward, sample); and such attempts by a program that asks
`/v1/chat/completions` of the gateway, with the program's side of HTTP counted in. Then a fake engine that answers after a given
time has 1,000 rollouts in flight. Ratios are medians over the rounds of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import structlog
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from agent_loop.engine import SamplingParams
from agent_loop.gateway.server import Gateway
from agent_loop.loop import AgentLoop
from agent_loop.program import branches_of
from agent_loop.rewards import load_reward
from agent_loop.session import Session, TextCodec
from agent_loop.single_turn import SingleTurn
from agent_loop.task import Task
from agent_loop.vllm_wire import encode_request
from benchmarks.partial_rollout import MAX_MODEL_LEN, VOCABULARY, make_model
from configs.schema import EngineSettings, GatewaySettings, ToolSettings, WeightSyncSettings
from rollouter.codec import Codec
from rollouter.engine_pool import EnginePool
from rollouter.loop_lag import LoopLag
from rollouter.rollouts import Plan, Runner, sample_of
from rollouter.scoring import Scorer
from sample_bus import wire
from tests.agent_loop.scripted import Letters
from tests.fakes.fake_engine import Call, FakeEngine
from tests.fakes.tiny_models import checkpoint_tensors
from tests.fakes.weight_rounds import WeightRounds
from tests.rollouter.playing import engine_at

PROMPT_TOKENS = 64
FAKE_IN_FLIGHT = 1000
FAKE_REPLY_S = 0.2
"""On average; a reply takes from half to one and a half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """With a real engine."""

    in_flight: int
    reply_tokens: int
    direct_tokens_per_s: float
    loop_tokens_per_s: float
    loop_of_direct: float
    """Median of the rounds' ratios."""
    loop_cpu_us_per_trajectory: float
    """Of the rollouter's process."""
    gateway_tokens_per_s: float
    gateway_of_direct: float
    gateway_cpu_us_per_trajectory: float
    """Of the same process, which is also the program's here."""
    lag_ms: float
    """The longest time for which the event loop was late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """With an engine that costs nothing."""

    in_flight: int
    reply_tokens: int
    trajectories_per_s: float
    cpu_us_per_trajectory: float
    lag_ms: float


def plan_of(number: int, reply_tokens: int) -> Plan:
    """A rollout with a prompt of its own and a reply of exactly so many tokens."""
    draw = np.random.default_rng(number)
    task = Task(
        task_id=f"task/{number}",
        prompt_ids=draw.integers(1, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
        prompt_text="",
        ground_truth="1",
        data_source="benchmark",
    )
    return Plan(
        task=task,
        group_id=f"{number // 8}",
        seat=number % 8,
        group_size=8,
        rollout_id=f"{number // 8}/{number % 8}",
        seed_key=f"{number}",
        sampling=SamplingParams(temperature=1.0, max_tokens=reply_tokens, seed=number),
        settings_revision=0,
        incarnation="a",
    )


def make_codec() -> Codec:
    """A word for each id of the model, and a chat template that adds nothing."""
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return Codec(fast)


class AskTheGateway:
    """The program, in this process."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self._gateway = gateway
        self._http = http

    async def run(self, task: Task, session: Session) -> None:
        """One call."""
        served = self._gateway.open(session, branches_of(session, ToolSettings()))
        try:
            words = " ".join(f"w{token}" for token in task.prompt_ids.tolist())
            body = {"model": "policy", "messages": [{"role": "user", "content": words}]}
            headers = {"Authorization": f"Bearer {served.token}"}
            async with self._http.post(
                f"{self._gateway.url(served)}/v1/chat/completions", json=body, headers=headers
            ) as response:
                orjson.loads(await response.read())["choices"][0]["message"]["content"]
        finally:
            await self._gateway.close(served)


async def always(in_flight: int, total: int, play: Callable[[int], Awaitable[int]], *, apart_s: float = 0.0) -> float:
    """Tokens per second of `total` plays, so many at once; the first of them begin `apart_s` after each other."""
    numbers = iter(range(total))

    async def work(delay_s: float) -> int:
        await asyncio.sleep(delay_s)
        return sum([await play(number) for number in numbers])

    started = time.monotonic()
    tokens = await asyncio.gather(*(work(number * apart_s) for number in range(in_flight)))
    return sum(tokens) / (time.monotonic() - started)


async def overhead(in_flight: int, reply_tokens: int, num_rounds: int) -> Overhead:
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as place:
        directory = Path(place)
        model_dir = make_model(directory / "model")
        settings = EngineSettings(max_model_len=MAX_MODEL_LEN, max_num_seqs=in_flight, kv_cache_bytes=256 << 20)
        pool = EnginePool(
            settings, WeightSyncSettings(), socket_dir=directory, log_dir=directory, partial_rollout=lambda: "keep"
        )
        try:
            await pool.start(str(model_dir), "float32")
            supervision = asyncio.create_task(pool.supervise())
            with WeightRounds(directory) as rounds:
                await pool.sync(rounds.publish(checkpoint_tensors(model_dir), 0), rounds.wait_staged)
                result = await _take_turns(pool, in_flight, reply_tokens, num_rounds)
            supervision.cancel()
            return result
        finally:
            await pool.close()


async def _take_turns(pool: EnginePool, in_flight: int, reply_tokens: int, num_rounds: int) -> Overhead:
    address = pool._members[0].client.address  # noqa: SLF001 - asked past the pool on purpose
    gateway = Gateway(GatewaySettings())
    await gateway.start()
    lag = LoopLag(on_block=lambda lag_s, where: None)
    connector = aiohttp.UnixConnector(address.removeprefix("unix:"), limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, auto_decompress=False) as http,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as of_program,
    ):
        loop_runner = make_runner(pool, SingleTurn(), Letters())
        gateway_runner = make_runner(pool, AskTheGateway(gateway, of_program), make_codec())

        async def ask(number: int) -> int:
            plan = plan_of(number, reply_tokens)
            body = encode_request(plan.task.prompt_ids, plan.sampling, request_id=f"direct-{number}-{time.monotonic_ns()}")
            headers = {"Content-Type": "application/json"}
            async with http.post("http://engine/inference/v1/generate", data=body, headers=headers) as response:
                return len(orjson.loads(await response.read())["choices"][0]["token_ids"])

        async def play(runner: Runner, number: int) -> int:
            plan = replace(plan_of(number, reply_tokens), rollout_id=f"{number}-{time.monotonic_ns()}")
            episode = await runner.attempt(plan, 0)
            return sample_of(plan, 0, episode, now=time.time).num_trained_tokens

        total = 4 * in_flight
        await always(in_flight, 2 * in_flight, ask)
        direct: list[float] = []
        ways = (Way(loop_runner), Way(gateway_runner))
        beating = asyncio.create_task(lag.run())
        for number in range(num_rounds):
            sys.stderr.write(f"round {number + 1} of {num_rounds}: {in_flight} in flight\n")
            direct.append(await always(in_flight, total, ask))
            for way in ways:
                cpu_s = time.process_time()
                way.tokens_per_s.append(await always(in_flight, total, partial(play, way.runner)))
                way.cpu_us.append((time.process_time() - cpu_s) / total * 1e6)
                way.of_direct.append(way.tokens_per_s[-1] / direct[-1])
        beating.cancel()
    await gateway.stop()
    loop, through_gateway = ways
    return Overhead(
        in_flight=in_flight,
        reply_tokens=reply_tokens,
        direct_tokens_per_s=statistics.median(direct),
        loop_tokens_per_s=statistics.median(loop.tokens_per_s),
        loop_of_direct=statistics.median(loop.of_direct),
        loop_cpu_us_per_trajectory=statistics.median(loop.cpu_us),
        gateway_tokens_per_s=statistics.median(through_gateway.tokens_per_s),
        gateway_of_direct=statistics.median(through_gateway.of_direct),
        gateway_cpu_us_per_trajectory=statistics.median(through_gateway.cpu_us),
        lag_ms=lag.worst_ms,
    )


@dataclass(slots=True)
class Way:
    """Beside asking directly, with what each round brought."""

    runner: Runner
    tokens_per_s: list[float] = field(default_factory=list)
    of_direct: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def make_runner(engine: EnginePool | FakeEngine, loop: AgentLoop, codec: TextCodec) -> Runner:
    return Runner(
        loop=loop,
        engine=engine,
        codec=codec,
        scorer=Scorer(load_reward("agent_loop.rewards:exact_match"), codec),
        max_model_len=MAX_MODEL_LEN,
        timeout_s=lambda: 300.0,
        seed=0,
    )


async def ceiling(in_flight: int, reply_tokens: int, total: int) -> Ceiling:
    """Through runner, sample and wire format."""
    reply = [*range(97, 97 + 26)] * (reply_tokens // 26 + 1)
    draw = random.Random(0)

    async def wait(call: Call) -> None:
        engine.calls.clear()  # it remembers each, which is not what is measured
        await asyncio.sleep(FAKE_REPLY_S * draw.uniform(0.5, 1.5))

    engine = await engine_at(0, reply=lambda prompt, sampling, version: reply, before_reply=wait)
    runner = make_runner(engine, SingleTurn(), Letters())
    lag = LoopLag(on_block=lambda lag_s, where: None)

    async def play(number: int) -> int:
        plan = plan_of(number, reply_tokens)
        sample = sample_of(plan, 0, await runner.attempt(plan, 0), now=time.time)
        wire.prepare(sample, "rollouter")
        return 1

    await always(in_flight, in_flight, play)
    gc.collect()
    gc.freeze()  # as the daemon does
    beating = asyncio.create_task(lag.run())
    cpu_s = time.process_time()
    per_s = await always(in_flight, total, play, apart_s=FAKE_REPLY_S / in_flight)
    cpu_s = time.process_time() - cpu_s
    beating.cancel()
    return Ceiling(
        in_flight=in_flight,
        reply_tokens=reply_tokens,
        trajectories_per_s=per_s,
        cpu_us_per_trajectory=cpu_s / total * 1e6,
        lag_ms=lag.worst_ms,
    )


def table(overheads: Sequence[Overhead], top: Ceiling) -> str:
    """Markdown."""
    lines = [
        "| in flight | reply tokens | vLLM directly, tokens/s | agent loop | CPU us each | gateway | CPU us each | late, ms |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.in_flight} | {one.reply_tokens} | {one.direct_tokens_per_s:,.0f} "
        f"| {one.loop_of_direct:.3f} | {one.loop_cpu_us_per_trajectory:,.0f} "
        f"| {one.gateway_of_direct:.3f} | {one.gateway_cpu_us_per_trajectory:,.0f} | {one.lag_ms:.0f} |"
        for one in overheads
    ]
    lines += [
        "",
        (
            f"fake engine, {top.in_flight} in flight, {top.reply_tokens} tokens each: "
            f"{top.trajectories_per_s:,.0f} trajectories/s ({top.cpu_us_per_trajectory:,.0f} us of CPU each), "
            f"event loop late by {top.lag_ms:.0f} ms at most"
        ),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="short replies, two rounds: about a minute")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on the last line")
    parser.add_argument("--in-flight", type=int, nargs="+", metavar="N", help="requests at a time; default 16 and 64")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 5")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    num_rounds = arguments.rounds or (2 if arguments.quick else 5)
    in_flights = arguments.in_flight or ([16] if arguments.quick else [16, 64])
    reply_tokens = 64 if arguments.quick else 256
    top = asyncio.run(ceiling(FAKE_IN_FLIGHT, 256, 4000 if arguments.quick else 20_000))
    overheads = [asyncio.run(overhead(in_flight, reply_tokens, num_rounds)) for in_flight in in_flights]
    if arguments.json:
        print(json.dumps({"overhead": [asdict(one) for one in overheads], "ceiling": asdict(top)}))
    else:
        print(table(overheads, top))
    return 0


if __name__ == "__main__":
    sys.exit(main())
