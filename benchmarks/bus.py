"""What the sample bus costs: a hub and a rollouter's link in two processes over an ipc socket, and the codec alone.

    python -m benchmarks.bus [--quick] [--json]

Samples of 4096 tokens (a quarter prompt) are offered with 64 offers in flight, leased and acknowledged one by one. Figures:
samples/s by the wall clock, and CPU time per sample of each process (all its threads, start-up left out). On a machine that
others use, CPU time says more than the wall clock; of several rounds the least is taken for both ends apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from configs.schema import BusSettings
from sample_bus import wire
from sample_bus.open import open_hub, open_link
from sample_bus.sample import NO_VERSION, Sample, SampleId, StopReason

NUM_TOKENS = 4096
IN_FLIGHT = 64
START_S = 60.0


def sample_of(num_tokens: int) -> Sample:
    mask = np.zeros(num_tokens, np.uint8)
    mask[num_tokens // 4 :] = 1
    random = np.random.default_rng(0)
    return Sample(
        task_id="task-17",
        group_id="task-17/3",
        rollout_id="task-17/3/5",
        attempt=0,
        seat=5,
        group_size=8,
        data_source="benchmark",
        tokens=random.integers(0, 150_000, num_tokens).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -random.exponential(1.0, num_tokens), 0).astype(np.float32),
        version_starts=np.array([0, num_tokens // 4, num_tokens // 2], np.int32),
        versions=np.array([NO_VERSION, 6, 7], np.int32),
        reward=1.0,
        temperature=1.0,
        stop_reason=StopReason.STOP,
        num_turns=1,
        settings_revision=0,
        incarnation="benchmark",
        produced_at=time.time(),
    )


async def produce(address: str, num_samples: int) -> dict[str, float]:
    """The rollouter's end; offers begin when the trainer's end is there."""
    sample = sample_of(NUM_TOKENS)
    left = iter(range(num_samples))
    async with open_link(BusSettings(), address=address, name="benchmark", role="rollouter") as link:

        async def offer() -> None:
            for _ in left:
                await link.offer(sample)

        await link.wait_connected(START_S)
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(offer() for _ in range(IN_FLIGHT)))
        return {"seconds": time.perf_counter() - began, "cpu_us": (time.process_time() - cpu) / num_samples * 1e6}


async def consume(num_samples: int) -> dict[str, float]:
    """The trainer's end, with the rollouter's as a child process: one round."""
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as directory:
        address = f"ipc://{directory}/bus"
        async with open_hub(
            BusSettings(), address=address, run="benchmark", incarnation="1", quarantine_dir=Path(directory)
        ) as hub:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.bus", "--produce", address, str(num_samples), stdout=asyncio.subprocess.PIPE
            )
            first = await hub.lease()
            began, cpu = time.perf_counter(), time.process_time()
            hub.acknowledge([first.id])
            for _ in range(num_samples - 1):
                hub.acknowledge([(await hub.lease()).id])
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            output, _ = await child.communicate()
        producer = json.loads(output)
        return {
            "samples_per_s": num_samples / seconds,
            "hub_cpu_us": cpu_s / num_samples * 1e6,
            "link_cpu_us": producer["cpu_us"],
        }


def codec(num_calls: int) -> dict[str, float]:
    """Microseconds a call, least of five: encode, decode with all checks, and the checks alone."""
    sample, sample_id = sample_of(NUM_TOKENS), SampleId("benchmark", 1, 2)
    frames = wire.encode(sample, sample_id)

    def least(call: Any) -> float:
        return min(timeit.repeat(call, number=num_calls, repeat=5)) / num_calls * 1e6

    return {
        "encode_us": least(lambda: wire.encode(sample, sample_id)),
        "decode_us": least(lambda: wire.decode(frames, max_bytes=1 << 30)),
        "validate_us": least(sample.validate),
        "sample_bytes": float(wire.num_bytes(frames)),
    }


def measure(num_samples: int, num_rounds: int, num_calls: int) -> dict[str, float]:
    rounds = [asyncio.run(consume(num_samples)) for _ in range(num_rounds)]
    return {
        "num_tokens": NUM_TOKENS,
        "samples_per_s": max(one["samples_per_s"] for one in rounds),
        "hub_cpu_us": min(one["hub_cpu_us"] for one in rounds),
        "link_cpu_us": min(one["link_cpu_us"] for one in rounds),
        **codec(num_calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bus", description="Speed and cost of the sample bus.")
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--produce", nargs=2, metavar=("ADDRESS", "NUMBER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if arguments.produce:
        print(json.dumps(asyncio.run(produce(arguments.produce[0], int(arguments.produce[1])))))
        return
    figures = measure(1000, 1, 200) if arguments.quick else measure(5000, 3, 1000)
    print(f"sample of {NUM_TOKENS} tokens, {figures['sample_bytes']:.0f} bytes on the wire")
    print(f"hub and link over ipc   {figures['samples_per_s']:9.0f} samples/s")
    print(f"CPU per sample          {figures['hub_cpu_us']:9.0f} us hub   {figures['link_cpu_us']:9.0f} us link")
    print(
        f"codec                   {figures['encode_us']:9.1f} us encode {figures['decode_us']:7.1f} us decode, checks included"
    )
    print(f"consistency checks      {figures['validate_us']:9.1f} us (part of decode; once more before an offer)")
    if arguments.json:
        print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
