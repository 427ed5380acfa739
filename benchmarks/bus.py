"""What the sample bus costs, beside its limits and its like: one run, the same samples over every path.

    python -m benchmarks.bus [--quick] [--json] [--sizes BYTES …] [--paths NAME …]

Paths: our `zmq` and `redis` transports, durable, from the offer to arrays in the trainer's hands, acknowledged and committed
every 64 samples; a bare pyzmq PUSH/PULL and a bare redis-py loop (the limit: nothing survives there); and a Ray actor around a
deque with cloudpickled samples (how verl hands samples over). Each figure is the median over the rounds; the paths take turns
within a round, so the ratios hold on a noisy machine. CPU is of all processes, start-up left out; latency is that of samples
sent one at a time. The codec's times are processor time, least of several.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from benchmarks.bus_paths import bare, ours
from benchmarks.bus_paths.measure import BYTES_PER_TOKEN, Load, Result, median_of, sample_of
from benchmarks.bus_paths.ray_queue import Ray
from sample_bus import wire
from sample_bus.sample import SampleId
from sample_bus.spool import Spool

SIZES = (2_000, 20_000, 53_000, 200_000, 1_000_000)
QUICK_SIZES = (53_000, 200_000)
PATHS = ("zmq", "bare pyzmq", "redis", "bare redis-py", "ray queue")
CODEC_TOKENS = 4096
RATIO_BYTES = 53_000
LARGE_BYTES = 200_000


def num_samples(nbytes: int, path: str, *, quick: bool) -> int:
    """Enough for a steady state, few enough for a minute."""
    most = min(4000, 400_000_000 // nbytes) if not quick else min(1500, 100_000_000 // nbytes)
    return most // 5 if path == "ray queue" else most


def run_path(path: str, load: Load, ray: Ray | None) -> Result:
    runs: dict[str, Callable[[Load], Result]] = {
        "zmq": ours.run_zmq,
        "redis": ours.run_redis,
        "bare pyzmq": bare.run_zmq,
        "bare redis-py": bare.run_redis,
    }
    if ray is not None and path == "ray queue":
        return ray.run(load)
    return runs[path](load)


def measure(sizes: tuple[int, ...], paths: tuple[str, ...], rounds: int, *, quick: bool) -> dict[int, dict[str, Result]]:
    found: dict[tuple[int, str], list[Result]] = {}
    ray = Ray() if "ray queue" in paths else None
    try:
        for number in range(rounds):
            for nbytes in sizes:
                for path in paths:
                    load = Load(
                        num_tokens=max(8, nbytes // BYTES_PER_TOKEN),
                        num_samples=max(20, num_samples(nbytes, path, quick=quick)),
                        num_paced=60 if quick else 200,
                    )
                    print(f"round {number + 1}: {path}, {nbytes} bytes, {load.num_samples} samples", file=sys.stderr)
                    found.setdefault((nbytes, path), []).append(run_path(path, load, ray))
    finally:
        if ray is not None:
            ray.close()
    return {nbytes: {path: median_of(found[nbytes, path]) for path in paths} for nbytes in sizes}


def codec(num_calls: int) -> dict[str, float]:
    """Processor time in µs a call, least of many: what is done to a sample of 4096 tokens on its way, checks included."""
    sample, sample_id = sample_of(CODEC_TOKENS), SampleId("benchmark", 1, 2)
    frames = wire.encode(sample, sample_id)

    def least(call: Callable[[], Any]) -> float:
        return min(timeit.repeat(call, number=num_calls, repeat=15, timer=time.process_time)) / num_calls * 1e6

    return {
        "encode_us": least(lambda: wire.encode(sample, sample_id)),
        "decode_us": least(lambda: wire.decode(frames, max_bytes=1 << 30)),
        "of_which_validate_us": least(sample.validate),
        "sample_bytes": float(wire.num_bytes(frames)),
    }


def durability(num_calls: int) -> dict[str, float]:
    """What the producer's copy costs: processor time in µs of one append to the spool, by size."""
    costs = {}
    for nbytes in QUICK_SIZES:
        frames = wire.encode(sample_of(nbytes // BYTES_PER_TOKEN), SampleId("benchmark", 1, 0))
        with tempfile.TemporaryDirectory(prefix="hr-bench-") as directory:
            spool = Spool(Path(directory) / "spool")

            def append(spool: Spool = spool, frames: list[bytes | memoryview] = frames) -> None:
                spool.append(spool.next_seq, frames)
                if spool.next_seq % 64 == 0:
                    spool.free(spool.next_seq)

            timeit.timeit(append, number=2 * (16 << 20) // nbytes * 2)
            repeats = timeit.repeat(append, number=num_calls, repeat=7, timer=time.process_time)
            costs[f"spool_append_{nbytes}_us"] = min(repeats) / num_calls * 1e6
            spool.close()
    return costs


def ratios(results: dict[int, dict[str, Result]]) -> dict[str, float]:
    """What the bus is measured by."""
    found: dict[str, float] = {}
    at = results.get(RATIO_BYTES, {})
    if "ray queue" in at:
        for path in ("zmq", "redis"):
            if path in at:
                found[f"{path}_samples_per_s_over_ray_queue"] = at[path].samples_per_s / at["ray queue"].samples_per_s
                found[f"{path}_cpu_of_ray_queue"] = at[path].cpu_us / at["ray queue"].cpu_us
    large = results.get(LARGE_BYTES, {})
    for path, limit in (("zmq", "bare pyzmq"), ("redis", "bare redis-py")):
        if path in large and limit in large:
            found[f"{path}_samples_per_s_of_{limit.replace(' ', '_')}_at_200_kb"] = (
                large[path].samples_per_s / large[limit].samples_per_s
            )
    return found


def table(results: dict[int, dict[str, Result]]) -> str:
    """Markdown."""
    lines = [
        "| bytes | path | samples/s | MB/s | CPU µs, producer | consumer | others | p50 ms | p99 ms | bytes/token |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for nbytes, paths in results.items():
        num_tokens = max(8, nbytes // BYTES_PER_TOKEN)
        for path, one in paths.items():
            lines.append(
                f"| {nbytes:,} | {path} | {one.samples_per_s:,.0f} | {one.samples_per_s * one.wire_bytes / 1e6:,.0f} "
                f"| {one.producer_cpu_us:,.0f} | {one.consumer_cpu_us:,.0f} | {one.other_cpu_us:,.0f} "
                f"| {one.latency_p50_ms:.2f} | {one.latency_p99_ms:.2f} | {one.wire_bytes / num_tokens:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bus", description="Speed and cost of the sample bus.")
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer samples, one round")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, help="rounds; default 3, or 1 with --quick")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a sample's arrays")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sizes = tuple(arguments.sizes or (QUICK_SIZES if arguments.quick else SIZES))
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    calls = 200 if arguments.quick else 1000
    costs = {**codec(calls), **durability(calls)}
    results = measure(sizes, tuple(arguments.paths), rounds, quick=arguments.quick)
    compared = ratios(results)
    print(table(results))
    print()
    for name, value in {**compared, **costs}.items():
        print(f"{name:50} {value:10.3f}")
    if arguments.json:
        by_size = {
            str(nbytes): {
                path: {name: round(getattr(one, name), 3) for name in Result.__dataclass_fields__}
                for path, one in paths.items()
            }
            for nbytes, paths in results.items()
        }
        print(json.dumps({**{name: round(value, 4) for name, value in {**compared, **costs}.items()}, "paths": by_size}))


if __name__ == "__main__":
    main()
