"""Headrace's bus, durable, over either transport: two processes, a trainer's end that leases, acknowledges and commits.

python -m benchmarks.bus_paths.ours TRANSPORT ADDRESS DIRECTORY NUM_TOKENS NUM_SAMPLES NUM_PACED    the producing process
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import structlog

from benchmarks.bus_paths.measure import (
    IN_FLIGHT,
    LATENCY_PAUSE_S,
    START_S,
    Load,
    Result,
    cpu_s,
    latency_ms,
    percentile,
    sample_of,
    stamped,
)
from benchmarks.bus_paths.redis_process import redis_server
from configs.schema import BusSettings
from sample_bus.open import open_hub, open_link
from sample_bus.protocols import Hub, Leased

COMMIT_EVERY = 64
"""Samples: a step's."""


def settings(transport: str) -> BusSettings:
    return BusSettings.model_validate({"transport": transport, "max_queued_bytes": 1 << 30})


async def produce(transport: str, address: str, directory: str, load: Load) -> dict[str, float]:
    """Offer everything, IN_FLIGHT at a time; then the paced samples; then wait until all is settled."""
    sample = sample_of(load.num_tokens)
    left = iter(range(load.num_samples))
    async with open_link(
        settings(transport), address=address, name="rollouter", role="rollouter", spool_dir=Path(directory) / "spool"
    ) as link:

        async def offer() -> None:
            for _ in left:
                await link.offer(sample)

        await link.wait_connected(START_S)
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(offer() for _ in range(IN_FLIGHT)))
        while link.producer_statistics().acknowledged < load.num_samples:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        for _ in range(load.num_paced):
            await asyncio.sleep(LATENCY_PAUSE_S)
            await link.offer(stamped(sample))
        while link.producer_statistics().acknowledged < load.num_samples + load.num_paced:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return {
            "seconds": seconds,
            "cpu_s": cpu,
            "wire_bytes": link.producer_statistics().bytes_sent / (load.num_samples + load.num_paced),
        }


def take(hub: Hub, leased: object, waiting: list[Leased]) -> Leased:
    """Acknowledge and, as a trainer does after a checkpoint, commit."""
    assert isinstance(leased, Leased)
    assert leased.sample.tokens.size
    waiting.append(leased)
    if len(waiting) >= COMMIT_EVERY:
        hub.acknowledge([one.id for one in waiting])
        waiting.clear()
        hub.commit(hub.position())
    return leased


async def consume(transport: str, address: str, directory: str, load: Load, broker: psutil.Process | None) -> Result:
    async with open_hub(
        settings(transport), address=address, run="bench", run_id="1", incarnation="1", quarantine_dir=Path(directory)
    ) as hub:
        words = (transport, address, directory, str(load.num_tokens), str(load.num_samples), str(load.num_paced))
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.bus_paths.ours", *words, stdout=asyncio.subprocess.PIPE
        )
        waiting: list[Leased] = []
        take(hub, await hub.lease(), waiting)
        began, cpu = time.perf_counter(), time.process_time()
        broker_cpu = cpu_s(broker) if broker is not None else 0.0
        for _ in range(load.num_samples - 1):
            take(hub, await hub.lease(), waiting)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        broker_cpu = cpu_s(broker) - broker_cpu if broker is not None else 0.0
        hub.acknowledge([one.id for one in waiting])
        waiting.clear()
        latencies = []
        for _ in range(load.num_paced):
            leased = await hub.lease()
            assert isinstance(leased, Leased)
            latencies.append(latency_ms(leased.sample))
            hub.acknowledge([leased.id])
        output, _ = await child.communicate()
    producer = json.loads(output)
    return Result(
        samples_per_s=load.num_samples / seconds,
        producer_cpu_us=producer["cpu_s"] / load.num_samples * 1e6,
        consumer_cpu_us=cpu / load.num_samples * 1e6,
        other_cpu_us=broker_cpu / load.num_samples * 1e6,
        latency_p50_ms=percentile(latencies, 50),
        latency_p99_ms=percentile(latencies, 99),
        wire_bytes=producer["wire_bytes"],
    )


def run_zmq(load: Load) -> Result:
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as directory:
        return asyncio.run(consume("zmq", f"ipc://{directory}/bus", directory, load, None))


def run_redis(load: Load) -> Result:
    with _redis() as (url, process, directory):
        return asyncio.run(consume("redis", f"{url}#bench", directory, load, process))


@contextmanager
def _redis() -> Iterator[tuple[str, psutil.Process, str]]:
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as directory, redis_server(Path(directory)) as (url, process):
        yield url, process, directory


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    transport, address, directory, *numbers = sys.argv[1:]
    load = Load(num_tokens=int(numbers[0]), num_samples=int(numbers[1]), num_paced=int(numbers[2]))
    print(json.dumps(asyncio.run(produce(transport, address, directory, load))))
