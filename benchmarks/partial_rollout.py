"""What a sync costs the engine in each mode of `partial_rollout`, beside the same work without a sync.

    python -m benchmarks.partial_rollout [--quick] [--json] [--in-flight N …] [--rounds N]

One real vLLM server of a small model with random weights. So many rollouts at a time play turns of unequal length, the same
ones for each mode, while syncs come at even distances; the modes take turns within a round, and each figure is the median over
the rounds. A pause is the time in which the engine generates nothing, from the call that stops it to the answer that it goes
on; a drain is the time before that in which nobody is let in (`finish`). Read again are the tokens of prompts and replies that
requests ended by a sync gave to the engine once more; thrown away are those that it sampled and nobody got.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agent_loop.engine import Engine, Generation, SamplingParams
from agent_loop.session import Session
from configs.schema import EngineSettings, WeightSyncSettings
from rollouter.engine_member import Member, PartialRollout
from rollouter.engine_pool import EnginePool
from tests.agent_loop.scripted import Letters
from tests.fakes.tiny_models import checkpoint_tensors
from tests.fakes.weight_rounds import WeightRounds

Mode = Literal["none", "keep", "recompute", "finish"]
MODES: tuple[Mode, ...] = ("none", "keep", "recompute", "finish")
IN_FLIGHT = (1, 16, 64)
NUM_SYNCS = 3
MAX_MODEL_LEN = 512
VOCABULARY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is played."""

    num_turns: int
    """Of each rollout."""
    turn_tokens: int
    """Mean; a turn has half as many to one and a half times as many."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One mode with so many requests in flight."""

    wall_s: float
    tokens_per_s: float
    of_none: float
    """Throughput over that of the same work without a sync."""
    cost_ms: float
    """What one sync added to the time of the work."""
    pause_ms: float
    drain_ms: float
    reread_tokens: float
    """For each sync."""
    thrown_away_tokens: float
    """For each sync."""


@dataclass
class Tally:
    """The engine, and what passed through it."""

    engine: Engine
    num_tokens: int = 0
    reread: int = 0
    aborted: set[str] = field(default_factory=set)

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        rollout, _, _ = request_id.rpartition("-")
        if rollout in self.aborted:
            self.reread += prompt_ids.size
        got = await self.engine.generate(prompt_ids, sampling, request_id=request_id)
        self.num_tokens += int(got.token_ids.size)
        if got.stop_reason == "abort":
            self.aborted.add(rollout)
        else:
            self.aborted.discard(rollout)
        return got


@dataclass
class Bench:
    pool: EnginePool
    rounds: WeightRounds
    tensors: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    """Of even and of odd versions."""
    mode: PartialRollout = "keep"
    version: int = -1

    @property
    def member(self) -> Member:
        return self.pool._members[0]  # noqa: SLF001 - looked at from outside, as nobody else needs to

    async def sync(self) -> tuple[float, float]:
        """Milliseconds of pause and drain."""
        self.version += 1
        (result,) = await self.pool.sync(
            self.rounds.publish(self.tensors[self.version % 2], self.version), self.rounds.wait_staged
        )
        if not result.committed:
            raise RuntimeError(f"the sync to version {self.version} failed: {result.message}")
        return result.pause_ms, self.member.last_drain_ms or 0.0

    async def sampled(self) -> float:
        """Tokens that the engine says it has sampled so far."""
        text = await self.member.client.metrics(timeout_s=10.0)
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))
        return sum(float(value) for _, value in lines)

    async def run(self, mode: Mode, in_flight: int, load: Load, *, apart_s: float) -> tuple[Figures, int]:
        """Figures, those beside a run without syncs left open, and the number of syncs. These come every `apart_s`."""
        if mode != "none":
            self.mode = mode
        tally = Tally(self.pool)
        before = await self.sampled()
        started = time.monotonic()
        playing = asyncio.gather(*(play(tally, f"{mode}{self.version}.{n}", load, seed=n) for n in range(in_flight)))
        pauses: list[tuple[float, float]] = []
        if mode != "none":
            for number in range(NUM_SYNCS):
                await asyncio.wait((playing,), timeout=started + apart_s * (number + 1) - time.monotonic())
                if playing.done():
                    break
                pauses.append(await self.sync())
        await playing
        wall_s = time.monotonic() - started
        num_syncs = max(1, len(pauses))
        thrown_away = await self.sampled() - before - tally.num_tokens
        figures = Figures(
            wall_s=wall_s,
            tokens_per_s=tally.num_tokens / wall_s,
            of_none=1.0,
            cost_ms=0.0,
            pause_ms=statistics.median([pause for pause, _ in pauses] or [0.0]),
            drain_ms=statistics.median([drain for _, drain in pauses] or [0.0]),
            reread_tokens=tally.reread / num_syncs,
            thrown_away_tokens=thrown_away / num_syncs,
        )
        return figures, num_syncs


async def play(engine: Engine, name: str, load: Load, *, seed: int) -> None:
    """One rollout: prompts that nobody shares, turns whose lengths depend on `seed` only."""
    draw = np.random.default_rng(seed)
    for turn in range(load.num_turns):
        max_tokens = int(load.turn_tokens * draw.uniform(0.5, 1.5))
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
        session = Session(engine, sampling, rollout_id=f"{name}.{turn}", max_model_len=MAX_MODEL_LEN, codec=Letters())
        session.append(draw.integers(0, VOCABULARY, load.prompt_tokens).astype(np.int32))
        await session.generate()


async def measure(in_flights: Sequence[int], load: Load, num_rounds: int) -> dict[int, dict[Mode, Figures]]:
    found: dict[tuple[int, Mode], list[Figures]] = {}
    async with started(max(in_flights)) as bench:
        for in_flight in in_flights:
            bench.mode = "keep"
            await bench.sync()
            warm, _ = await bench.run("none", in_flight, load, apart_s=0.0)
            apart_s = warm.wall_s / (NUM_SYNCS + 1)
            for number in range(num_rounds):
                none: Figures | None = None
                for mode in MODES:
                    sys.stderr.write(f"round {number + 1}: {in_flight} in flight, {mode}\n")
                    figures, num_syncs = await bench.run(mode, in_flight, load, apart_s=apart_s)
                    none = none or figures
                    found.setdefault((in_flight, mode), []).append(beside(figures, none, num_syncs))
    return {n: {mode: median_of(found[n, mode]) for mode in MODES} for n in in_flights}


def beside(figures: Figures, none: Figures, num_syncs: int) -> Figures:
    """The same figures with what the syncs cost, given the same work without any."""
    return Figures(
        **asdict(figures)
        | {
            "of_none": figures.tokens_per_s / none.tokens_per_s,
            "cost_ms": (figures.wall_s - none.wall_s) / num_syncs * 1e3 if figures is not none else 0.0,
        }
    )


def median_of(all_figures: Sequence[Figures]) -> Figures:
    return Figures(**{each.name: statistics.median(getattr(one, each.name) for one in all_figures) for each in fields(Figures)})


@asynccontextmanager
async def started(max_in_flight: int) -> AsyncIterator[Bench]:
    """One server, without weights."""
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as place:
        directory = Path(place)
        model_dir = make_model(directory / "model")
        settings = EngineSettings(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_in_flight,
            kv_cache_bytes=256 << 20,
            adaptive_requests=True,  # keeps the engine's counters
        )
        made: list[Bench] = []
        pool = EnginePool(
            settings, WeightSyncSettings(), socket_dir=directory, log_dir=directory, partial_rollout=lambda: made[0].mode
        )
        try:
            await pool.start(str(model_dir), "float32")
            supervision = asyncio.create_task(pool.supervise())
            with WeightRounds(directory) as rounds:
                even = checkpoint_tensors(model_dir)
                odd = {name: tensor * 1.01 for name, tensor in even.items()}
                made.append(Bench(pool=pool, rounds=rounds, tensors=(even, odd)))
                yield made[0]
            supervision.cancel()
        finally:
            await pool.close()


def make_model(directory: Path) -> Path:
    """Six million random parameters and no end-of-sequence token: every turn has the length that it was given."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def table(results: dict[int, dict[Mode, Figures]]) -> str:
    """Markdown."""
    lines = [
        "| in flight | mode | tokens/s | of none | one sync costs, ms | pause ms | drain ms | read again | thrown away |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for in_flight, modes in results.items():
        for mode, one in modes.items():
            lines.append(
                f"| {in_flight} | {mode} | {one.tokens_per_s:,.0f} | {one.of_none:.2f} | {one.cost_ms:.0f} "
                f"| {one.pause_ms:.0f} | {one.drain_ms:.0f} | {one.reread_tokens:,.0f} | {one.thrown_away_tokens:,.1f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partial_rollout", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 and 16 in flight, short turns, one round: about a minute")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on the last line")
    parser.add_argument("--in-flight", type=int, nargs="+", metavar="N", help=f"requests at a time; default {IN_FLIGHT}")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 3")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    load = Load(num_turns=2, turn_tokens=32 if arguments.quick else 160, prompt_tokens=64)
    in_flights = tuple(arguments.in_flight or (IN_FLIGHT[:2] if arguments.quick else IN_FLIGHT))
    results = asyncio.run(measure(in_flights, load, arguments.rounds or (1 if arguments.quick else 3)))
    if arguments.json:
        print(json.dumps({"results": {n: {m: asdict(one) for m, one in modes.items()} for n, modes in results.items()}}))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
