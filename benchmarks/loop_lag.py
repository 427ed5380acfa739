"""How late the rollouter's event loop is with many rollouts in flight, and what ran on it when it was latest.

    python -m benchmarks.loop_lag [--quick] [--json] [--in-flight N] [--steps N] [--log FILE]

The rollouter's daemon itself, journal, progress, spool, log and bus included, in this process; the real hub with a trainer that
trains nothing in another; an engine that costs nothing here, in which one rollout in a hundred fails at its first attempt. Two
loads: `bursts`, where all rollouts begin in the same turn of the loop, with a new version, and all replies come in one;
and `spread`, where each reply takes a second on average, asked for in slices as it grows, and a new rollout begins for each
that ended.

A beat is due every 20 ms; the lag is how much later it came. `of_which_cpu` is what of the longest lag the loop's thread can
have spent computing, at most: the rest it waited for the machine, which is another process's doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import EngineUnavailable, ToolUnavailable
from configs.logs import set_up
from configs.schema import Settings
from rollouter.codec import Codec
from rollouter.daemon import run
from rollouter.engines import EngineFleet
from rollouter.loop_lag import BEAT_S
from sample_bus.messages import RoundResult
from tests.fakes.fake_engine import ALPHABET, FakeEngine, FakeTokenizer
from tests.rollouter.stand_in import make_settings, stand_in_trainer

REPLY_TOKENS = 256
REPLY_S = 1.0
"""On average, where replies are spread; one takes from half to one and a half of it."""
CALM_S = 0.1
"""After the last request, before all replies come at once."""
FAILS_ONE_IN = 100
LOOK_S = 0.001
"""Between two looks at what runs on a loop that is late."""
LATE_S = 0.01
"""A beat that is overdue by less is not looked into."""
OURS = ("agent_loop", "configs", "rollouter", "sample_bus", "tests", "benchmarks")
STAGED = {"engine-0": "at once"}
_HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """One load. Milliseconds."""

    load: str
    in_flight: int
    trajectories_per_s: float
    cpu_us_per_trajectory: float
    """Of the rollouter's process, all its threads."""
    num_beats: int
    median_ms: float
    p99_ms: float
    max_ms: float
    max_of_which_cpu_ms: float
    max_cpu_ms: float
    """The largest of all beats' lags, counted as far as the loop's thread can have spent them computing."""
    blocked_by: list[tuple[str, float]]
    """The innermost lines of this repository that were seen during the latest beat, with their shares."""


class Beats:
    """Beats on the running loop and looks at it from a thread whenever a beat is overdue."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self.cpu_s: list[float] = []
        """Of the loop's thread from one beat to the next."""
        self.seen: Counter[str] = Counter()
        """During the latest beat."""
        self.until = time.monotonic() + 1e9
        """Nothing counts that comes later."""
        self._due = float("inf")
        self._now_seen: Counter[str] = Counter()

    async def run(self) -> None:
        looking = threading.Thread(target=self._look, args=(threading.get_ident(),), name="lag-look", daemon=True)
        looking.start()
        while time.monotonic() < self.until:
            cpu_s = time.thread_time()
            self._due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            lag_s, self._due = max(0.0, time.monotonic() - self._due), float("inf")
            seen, self._now_seen = self._now_seen, Counter()
            if lag_s > max(self.lags_s, default=0.0):
                self.seen = seen
            self.lags_s.append(lag_s)
            self.cpu_s.append(time.thread_time() - cpu_s)

    def _look(self, watched: int) -> None:
        while time.monotonic() < self.until:
            time.sleep(LOOK_S)
            if time.monotonic() - self._due < LATE_S - BEAT_S:
                continue  # the work behind a late beat may have begun before it was due
            frame = sys._current_frames().get(watched)  # noqa: SLF001  (the documented way to see another thread)
            if frame is not None:
                self._now_seen[place_of(frame)] += 1


def place_of(frame: FrameType | None) -> str:
    """The innermost call in this repository, and what it was doing elsewhere."""
    inside = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        if path.is_relative_to(_HERE) and path.relative_to(_HERE).parts[0] in OURS:
            return f"{path.relative_to(_HERE)} {name}" + (f" > {inside}" if inside else "")
        inside = inside or f"{path.name} {name}"
        frame = frame.f_back
    return inside


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Failures:
    """One first attempt in a hundred fails, in turn in one of several ways."""

    def __init__(self) -> None:
        self._num_first = 0

    async def next(self, request_id: str) -> None:
        if not request_id.endswith(".0-0"):
            return
        self._num_first += 1
        kind, rest = divmod(self._num_first, FAILS_ONE_IN)
        if rest:
            return
        match kind % 4:
            case 0:
                raise ConnectionResetError("the benchmark broke it")
            case 1:
                raise EngineUnavailable("the benchmark broke it")
            case 2:
                raise ToolUnavailable("the benchmark broke it")
            case 3:
                async with asyncio.timeout(0.05):
                    await asyncio.Event().wait()


class Waves:
    """All who wait go on at once, when nobody else has come for a while."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CALM_S, self._open)
        await self._gate.wait()

    def _open(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()


class CheapEngine(FakeEngine):
    """Replies that were made before. It has the weights of each version as soon as it is told of it: the trainer's side need
    not hear of it."""

    def __init__(self, load: str) -> None:
        super().__init__()
        digits = [ALPHABET.index(digit) + 1 for digit in "0123456789"]
        self._tokens = np.array(digits * (REPLY_TOKENS // 10 + 1), np.int32)
        self._logprobs = np.full(self._tokens.size, -0.5, np.float32)
        self._draw, self._failures, self._waves, self._is_spread = random.Random(0), Failures(), Waves(), load == "spread"

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        await self._serving.wait()
        await self._failures.next(request_id)
        size = min(sampling.max_tokens, REPLY_TOKENS)
        if self._is_spread:
            await asyncio.sleep(REPLY_S * self._draw.uniform(0.5, 1.5) * size / REPLY_TOKENS)
        else:
            await self._waves.wait()
        self._generated += size
        return Generation(
            token_ids=self._tokens[:size],
            logprobs=self._logprobs[:size],
            version_starts=np.zeros(1, np.int32),
            versions=np.full(1, self.version, np.int32),
            kept_cache=np.zeros(1, np.uint8),
            stop_reason="length",
        )

    @property
    def nonce(self) -> str:
        return STAGED[self.name]


# ── the two processes ────────────────────────────────────────────────────────────────────────────────────────────────────


def settings_of(run_dir: Path, load: str, in_flight: int) -> Settings:
    return make_settings(
        run_dir,
        samples_per_step=in_flight,
        group_size=5,
        num_steps=100_000,
        staleness_threshold=0.0 if load == "bursts" else 3.0,
        max_staleness=None if load == "bursts" else 8,
        sampling__max_tokens=REPLY_TOKENS,
        engine__max_model_len=2 * REPLY_TOKENS,
        rollouter__max_concurrent_rollouts=in_flight,
        bus__max_queued_samples=8 * in_flight,
        bus__heartbeat_timeout_s=30.0,
    )


async def train(run_dir: Path, load: str, in_flight: int, num_steps: int) -> None:
    """The other process: take so many samples, publish a version at each step, tell the time that the steps behind the first
    took."""
    settings = settings_of(run_dir, load, in_flight)
    set_up(settings.logging.model_copy(update={"level": "warning"}), daemon="trainer")
    async with stand_in_trainer(settings) as trainer:
        await trainer.begin()
        started = 0.0
        for step in range(num_steps + 1):
            await trainer.publish(step, staged=STAGED)
            await trainer.train(in_flight)
            started = started or time.monotonic()
        print(time.monotonic() - started, flush=True)
        await trainer.end()
        await asyncio.sleep(1.0)  # the end is to be heard before the bus closes


async def measure(load: str, in_flight: int, num_steps: int, run_dir: Path, log_file: Path | None) -> Lag:
    settings, engine, beats = settings_of(run_dir, load, in_flight), CheapEngine(load), Beats()

    def open_fleet(
        settings: Settings,
        *,
        live: Callable[[], Settings],
        on_change: Callable[[], None],
        on_round_result: Callable[[RoundResult], None],
    ) -> EngineFleet:
        return engine

    arguments = [str(run_dir), load, str(in_flight), str(num_steps)]
    with (log_file or run_dir / "log").open("a") as log:
        set_up(settings.logging, daemon="rollouter", stream=log)
        command = [sys.executable, "-m", "benchmarks.loop_lag", "--trainer", *arguments]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - nothing runs yet
        try:
            playing = asyncio.create_task(
                run(settings, open_fleet=open_fleet, codec_of=lambda model_dir: Codec(FakeTokenizer()))
            )
            while not engine.generated_tokens and not playing.done():  # noqa: ASYNC110
                await asyncio.sleep(BEAT_S)  # what starts up is not what is measured
            cpu_s, tokens = time.process_time(), engine.generated_tokens
            beating = asyncio.create_task(beats.run())
            assert trainer.stdout is not None, "a pipe was asked for"
            took = await asyncio.to_thread(trainer.stdout.readline)
            beats.until = 0.0
            cpu_s = time.process_time() - cpu_s
            played = (engine.generated_tokens - tokens) / REPLY_TOKENS
            await beating
            await playing
        finally:
            trainer.kill()
            trainer.wait()
    cpu_bound = [min(lag_s, cpu) for lag_s, cpu in zip(beats.lags_s, beats.cpu_s, strict=True)]
    latest = max(range(len(beats.lags_s)), key=lambda at: beats.lags_s[at])
    num_seen = beats.seen.total()
    return Lag(
        load=load,
        in_flight=in_flight,
        trajectories_per_s=num_steps * in_flight / float(took),
        cpu_us_per_trajectory=cpu_s / played * 1e6,
        num_beats=len(beats.lags_s),
        median_ms=statistics.median(beats.lags_s) * 1e3,
        p99_ms=statistics.quantiles(beats.lags_s, n=100)[-1] * 1e3,
        max_ms=beats.lags_s[latest] * 1e3,
        max_of_which_cpu_ms=cpu_bound[latest] * 1e3,
        max_cpu_ms=max(cpu_bound) * 1e3,
        blocked_by=[(place, round(count / num_seen, 2)) for place, count in beats.seen.most_common(8)],
    )


def table(lags: list[Lag]) -> str:
    """Markdown, and what the loop did when it was latest."""
    lines = [
        "| load | in flight | trajectories/s | CPU us each | median ms | p99 ms | max ms | of which CPU ms | max by CPU ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {lag.load} | {lag.in_flight} | {lag.trajectories_per_s:,.0f} | {lag.cpu_us_per_trajectory:,.0f} "
        f"| {lag.median_ms:.1f} | {lag.p99_ms:.1f} | {lag.max_ms:.1f} | {lag.max_of_which_cpu_ms:.1f} | {lag.max_cpu_ms:.1f} |"
        for lag in lags
    ]
    for lag in lags:
        lines += ["", f"{lag.load}, during the latest beat:"]
        lines += [f"  {share:4.0%}  {place}" for place, share in lag.blocked_by]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--trainer"]:
        place, load, *numbers = sys.argv[2:]
        asyncio.run(train(Path(place), load, *map(int, numbers)))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop_lag", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps: under a minute")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on the last line")
    parser.add_argument("--in-flight", type=int, default=500, metavar="N", help="rollouts at a time; default 500")
    parser.add_argument("--steps", type=int, metavar="N", help="of N-in-flight samples each; default 60, quick 10")
    parser.add_argument("--loads", nargs="+", default=["bursts", "spread"], choices=["bursts", "spread"])
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the rollouter's log")
    arguments = parser.parse_args()
    num_steps = arguments.steps or (10 if arguments.quick else 60)
    lags = []
    for load in arguments.loads:
        with tempfile.TemporaryDirectory(prefix="hr-lag-") as place:
            lags.append(asyncio.run(measure(load, arguments.in_flight, num_steps, Path(place) / "run", arguments.log)))
    print(table(lags))
    if arguments.json:
        print(json.dumps({lag.load: asdict(lag) for lag in lags}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
