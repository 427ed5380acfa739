"""A queue as a Ray actor around a deque, samples cloudpickled: how verl's fully asynchronous recipe hands samples over.

Written from its description, not its code: an asyncio actor that holds one lock and condition, drops the oldest when full, and
is called once a sample at each end. Here both ends keep 16 calls in flight, so that round trips overlap.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from benchmarks.bus_paths.measure import LATENCY_PAUSE_S, Load, Result, cpu_s, latency_ms, percentile, sample_of, stamped

IN_FLIGHT = 16


class Queue:
    """The actor."""

    def __init__(self, max_size: int) -> None:
        self._items: deque[bytes] = deque(maxlen=max_size)
        self._changed = asyncio.Condition()

    async def put(self, item: bytes) -> bool:
        async with self._changed:
            self._items.append(item)
            self._changed.notify()
        return True

    async def get(self) -> bytes:
        async with self._changed:
            while not self._items:
                await self._changed.wait()
            return self._items.popleft()


class Producer:
    """The other actor: a rollouter's end."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def produce(self, load: Load) -> dict[str, float]:
        sample = sample_of(load.num_tokens)
        left = iter(range(load.num_samples))

        async def put() -> None:
            for _ in left:
                await self._queue.put.remote(cloudpickle.dumps(sample))

        cpu = time.process_time()
        await asyncio.gather(*(put() for _ in range(IN_FLIGHT)))
        cpu = time.process_time() - cpu
        return {"cpu_s": cpu}

    async def pace(self, load: Load) -> None:
        sample = sample_of(load.num_tokens)
        for _ in range(load.num_paced):
            await asyncio.sleep(LATENCY_PAUSE_S)
            await self._queue.put.remote(cloudpickle.dumps(stamped(sample)))


class Ray:
    """A Ray of this benchmark's own, on loopback, for several loads."""

    def __init__(self) -> None:
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells it so
        os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
        import ray

        self._ray = ray
        self._directory = tempfile.TemporaryDirectory(prefix="hr-ray-")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            object_store_memory=512 << 20,
            _temp_dir=self._directory.name,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
        )

    def close(self) -> None:
        self._ray.shutdown()
        self._directory.cleanup()

    def run(self, load: Load) -> Result:
        ray = self._ray
        queue = ray.remote(num_cpus=0, max_concurrency=20)(Queue).remote(max(1024, 2 * load.num_samples))
        producer = ray.remote(num_cpus=0)(Producer).remote(queue)
        ray.get(queue.put.remote(b""))
        ray.get(queue.get.remote())
        me = psutil.Process()
        began, all_before, mine_before = time.perf_counter(), self._cpu_s(), cpu_s_of_self(me)
        produced = producer.produce.remote(load)
        pending = [queue.get.remote() for _ in range(min(IN_FLIGHT, load.num_samples))]
        nbytes = 0
        for number in range(load.num_samples):
            item = ray.get(pending.pop(0))
            if number + IN_FLIGHT < load.num_samples:
                pending.append(queue.get.remote())
            assert cloudpickle.loads(item).tokens.size
            nbytes = len(item)
        seconds = time.perf_counter() - began
        producer_cpu = ray.get(produced)["cpu_s"]
        mine = cpu_s_of_self(me) - mine_before
        everything = self._cpu_s() - all_before
        paced = producer.pace.remote(load)
        latencies = [latency_ms(cloudpickle.loads(ray.get(queue.get.remote()))) for _ in range(load.num_paced)]
        ray.get(paced)
        for actor in (producer, queue):
            ray.kill(actor)
        return Result(
            samples_per_s=load.num_samples / seconds,
            producer_cpu_us=producer_cpu / load.num_samples * 1e6,
            consumer_cpu_us=mine / load.num_samples * 1e6,
            other_cpu_us=max(0.0, everything - mine - producer_cpu) / load.num_samples * 1e6,
            latency_p50_ms=percentile(latencies, 50),
            latency_p99_ms=percentile(latencies, 99),
            wire_bytes=nbytes,
        )

    def _cpu_s(self) -> float:
        """Of this process and of all of Ray's, which are its children."""
        return cpu_s(psutil.Process())


def cpu_s_of_self(me: psutil.Process) -> float:
    times = me.cpu_times()
    return times.user + times.system
