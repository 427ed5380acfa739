"""The limit: the same encoded samples over pyzmq's PUSH/PULL and over redis-py's streams, with nothing around them.

No credit, no order checks, no copies kept, no restart: what dies on the way is lost. The consumer decodes to arrays, unchecked.

    python -m benchmarks.bus_paths.bare (zmq|redis) ADDRESS NUM_TOKENS NUM_SAMPLES NUM_PACED    the producing process
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import redis
import zmq

from benchmarks.bus_paths.measure import LATENCY_PAUSE_S, Load, Result, cpu_s, percentile, sample_of
from benchmarks.bus_paths.redis_process import redis_server
from sample_bus import wire
from sample_bus.sample import SampleId

HIGH_WATER_MARK = 64
PIPELINE_BYTES = 256 << 10
COUNT = 16
STREAM = "bench"
Frames = Sequence[bytes | memoryview]


def frames_of(num_tokens: int) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(sample_of(num_tokens), SampleId("bench", 1, 0))]


def arrays_of(frames: Sequence[bytes | memoryview]) -> int:
    """Views on the columns, as a consumer would take them."""
    return sum(np.frombuffer(frame, np.uint8).size for frame in frames[1:])


def stamp() -> bytes:
    return repr(time.time()).encode()


def produce(kind: str, address: str, load: Load) -> dict[str, float]:
    frames = frames_of(load.num_tokens)
    send, finish = (_zmq_sender if kind == "zmq" else _redis_sender)(address, sum(len(frame) for frame in frames))
    cpu = time.process_time()
    for _ in range(load.num_samples):
        send([b"0", *frames])
    finish()
    cpu = time.process_time() - cpu
    for _ in range(load.num_paced):
        time.sleep(LATENCY_PAUSE_S)
        send([stamp(), *frames])
        finish()
    return {"cpu_s": cpu}


def _zmq_sender(address: str, nbytes: int) -> tuple[Callable[[Frames], object], Callable[[], None]]:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.connect(address)
    copy = nbytes < 64 << 10
    return (lambda frames: socket.send_multipart(frames, copy=copy)), lambda: None


def _redis_sender(address: str, nbytes: int) -> tuple[Callable[[Frames], object], Callable[[], None]]:
    client = redis.Redis.from_url(address)
    pipeline = client.pipeline(transaction=False)
    batch = max(1, min(COUNT, PIPELINE_BYTES // nbytes))
    waiting = 0

    def flush() -> None:
        nonlocal waiting
        if waiting:
            pipeline.execute()
            waiting = 0

    def send(frames: Frames) -> None:
        nonlocal waiting
        pipeline.xadd(STREAM, {str(index): bytes(frame) for index, frame in enumerate(frames)})
        waiting += 1
        if waiting >= batch:
            flush()

    return send, flush


def run_zmq(load: Load) -> Result:
    with tempfile.TemporaryDirectory(prefix="hr-bench-") as directory:
        address = f"ipc://{directory}/bare"
        socket = zmq.Context.instance().socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.bind(address)

        def receive() -> Iterator[list[memoryview]]:
            while True:
                yield [frame.buffer for frame in socket.recv_multipart(copy=False)]

        try:
            return _measure("zmq", address, load, receive(), None)
        finally:
            socket.close(linger=0)


def run_redis(load: Load) -> Result:
    with (
        tempfile.TemporaryDirectory(prefix="hr-bench-") as directory,
        redis_server(Path(directory), durable=False) as (
            url,
            server,
        ),
    ):
        client = redis.Redis.from_url(url)
        client.xgroup_create(STREAM, "group", id="0", mkstream=True)

        def receive() -> Iterator[list[bytes]]:
            done: list[bytes] = []
            while True:
                pipeline = client.pipeline(transaction=False)
                if done:
                    pipeline.xack(STREAM, "group", *done)
                    pipeline.xdel(STREAM, *done)
                pipeline.xreadgroup("group", "one", {STREAM: ">"}, count=COUNT, block=5000)
                answer = pipeline.execute()[-1]
                entries = answer[0][1] if isinstance(answer, list) else next(iter(answer.values()))[0]
                done = [entry[0] for entry in entries]
                for _, fields in entries:
                    yield list(fields.values())

        return _measure("redis", url, load, receive(), server)


def _measure(
    kind: str, address: str, load: Load, receive: Iterator[Sequence[bytes | memoryview]], broker: psutil.Process | None
) -> Result:
    words = (kind, address, str(load.num_tokens), str(load.num_samples), str(load.num_paced))
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.bus_paths.bare", *words], stdout=subprocess.PIPE)
    try:
        first = next(receive)
        nbytes = sum(memoryview(frame).nbytes for frame in first[1:])
        began, cpu = time.perf_counter(), time.process_time()
        broker_cpu = cpu_s(broker) if broker is not None else 0.0
        for _ in range(load.num_samples - 1):
            arrays_of(next(receive)[1:])
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        broker_cpu = cpu_s(broker) - broker_cpu if broker is not None else 0.0
        latencies = []
        for _ in range(load.num_paced):
            frames = next(receive)
            arrays_of(frames[1:])
            latencies.append((time.time() - float(bytes(frames[0]))) * 1e3)
        output, _ = child.communicate()
    finally:
        child.kill()
    return Result(
        samples_per_s=load.num_samples / seconds,
        producer_cpu_us=json.loads(output)["cpu_s"] / load.num_samples * 1e6,
        consumer_cpu_us=cpu / load.num_samples * 1e6,
        other_cpu_us=broker_cpu / load.num_samples * 1e6,
        latency_p50_ms=percentile(latencies, 50),
        latency_p99_ms=percentile(latencies, 99),
        wire_bytes=nbytes,
    )


if __name__ == "__main__":
    kind, address, *numbers = sys.argv[1:]
    load = Load(num_tokens=int(numbers[0]), num_samples=int(numbers[1]), num_paced=int(numbers[2]))
    print(json.dumps(produce(kind, address, load)))
