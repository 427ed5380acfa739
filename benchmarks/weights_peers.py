"""What weight sync is measured against, in the same run: a copy in memory, and other ways to bring tensors to processes.

- `memcpy`: one thread, both buffers faulted in: the limit.
- `cast`: float32 to bfloat16, one thread, into memory that is reused: the limit for weights that have to be cast.
- `request_reply`: bucket by bucket in lock step, as verl hands weights to an engine of the same host: a buffer of shared
  memory made for each sync, filled with cast tensors; a request names what lies in it; the other side copies it out, replies.
- `tmpfs`: a safetensors file written to /dev/shm, mapped and copied out.
- `gloo`: broadcast of flat buckets, without cast, packing and checksums.

Receivers copy into memory that is faulted in, as parameters are; every way but gloo starts from float32 weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import zmq
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.weights_model import Model
from benchmarks.weights_receivers import WAIT_S, Desk, Receivers, least_seconds

REQUEST_BUCKET_BYTES = 512 << 20
GLOO_BUCKET_BYTES = 64 << 20
MAX_COPY_BYTES = 1 << 30


def memcpy_seconds(num_bytes: int, repetitions: int) -> float:
    """Of `num_bytes`; measured on at most 1 GiB."""
    measured = min(num_bytes, MAX_COPY_BYTES)
    source, destination = np.ones(measured, np.uint8), np.ones(measured, np.uint8)
    return least_seconds(lambda: np.copyto(destination, source), max(10, repetitions)) * num_bytes / measured


def cast_seconds(model: Model, repetitions: int) -> float:
    """One thread, tensor by tensor."""
    destination = torch.ones(max(tensor.numel() for tensor in model.tensors.values()), dtype=torch.bfloat16)

    def cast() -> None:
        for tensor in model.tensors.values():
            destination[: tensor.numel()].copy_(tensor.view(-1))

    return least_seconds(cast, max(10, repetitions))


def prepare(desk: Desk, *, num_bytes: int) -> None:
    desk.destination = np.ones(num_bytes, np.uint8)


def clear(desk: Desk) -> None:
    desk.destination = np.empty(0, np.uint8)
    desk.kept.clear()


# ── request and reply ────────────────────────────────────────────────────────────────────────────────────────────────


def request_reply_seconds(model: Model, num: int, fleet: Receivers, *, repetitions: int) -> float:
    fleet.all(num, prepare, num_bytes=model.num_bytes)
    with tempfile.TemporaryDirectory(prefix="hr-") as directory, zmq.Context() as context:
        addresses = [f"ipc://{directory}/{index}" for index in range(num)]
        sockets = [context.socket(zmq.REQ) for _ in range(num)]

        def sync() -> None:
            for index, address in enumerate(addresses):
                fleet.tell(index, answer_requests, address=address)
            memory = SharedMemory(create=True, size=REQUEST_BUCKET_BYTES)
            try:
                buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
                for request in filled(model, buffer):
                    request["memory"] = memory.name
                    for socket in sockets:
                        socket.send_json(request)
                    for socket in sockets:
                        socket.recv()
                del buffer
                for index in range(num):
                    fleet.answer(index)
            finally:
                memory.close()
                memory.unlink()

        for socket, address in zip(sockets, addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
            socket.connect(address)
        try:
            return least_seconds(sync, repetitions)
        finally:
            for socket in sockets:
                socket.close()
            fleet.all(num, clear)


def filled(model: Model, buffer: torch.Tensor) -> Iterator[dict[str, object]]:
    """Cast tensors into the buffer until it is full; yields what lies in it."""
    entries: list[tuple[str, list[int], int, int]] = []
    at = 0
    for name, tensor in model.tensors.items():
        size = 2 * tensor.numel()
        if at + size > len(buffer):
            yield {"tensors": entries, "is_last": False}
            entries, at = [], 0
        buffer[at : at + size].view(torch.bfloat16).copy_(tensor.view(-1))
        entries.append((name, list(tensor.shape), at, size))
        at += size
    yield {"tensors": entries, "is_last": True}


def answer_requests(desk: Desk, *, address: str) -> None:
    memory: SharedMemory | None = None
    at = 0
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        socket.bind(address)
        while True:
            request = json.loads(socket.recv())
            memory = memory or SharedMemory(name=request["memory"])
            source = np.frombuffer(memory.buf or b"", np.uint8)
            for _, _, start, size in request["tensors"]:
                np.copyto(desk.destination[at : at + size], source[start : start + size])
                at += size
            del source
            socket.send(b"")
            if request["is_last"]:
                memory.close()
                return


# ── a file in memory ─────────────────────────────────────────────────────────────────────────────────────────────────


def tmpfs_seconds(model: Model, num: int, fleet: Receivers, *, repetitions: int) -> float:
    fleet.all(num, prepare, num_bytes=model.num_bytes)
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/dev/shm") as directory:
        path = Path(directory) / "model.safetensors"

        def sync() -> None:
            save_file({name: tensor.bfloat16() for name, tensor in model.tensors.items()}, path)
            fleet.all(num, read_file, path=str(path))

        try:
            return least_seconds(sync, repetitions)
        finally:
            fleet.all(num, clear)


def read_file(desk: Desk, *, path: str) -> None:
    at = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            source = file.get_tensor(name).view(-1).view(torch.uint8).numpy()
            np.copyto(desk.destination[at : at + len(source)], source)
            at += len(source)


# ── gloo ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gloo_seconds(model: Model, num: int, fleet: Receivers, *, repetitions: int) -> float:
    buckets = [min(GLOO_BUCKET_BYTES, model.num_bytes - at) for at in range(0, model.num_bytes, GLOO_BUCKET_BYTES)]
    with tempfile.TemporaryDirectory(prefix="hr-") as directory:
        store = f"file://{directory}/store"
        for index in range(num):
            fleet.tell(index, join_gloo, store=store, world=num + 1, buckets=buckets, repetitions=repetitions)
        _init_gloo(store, rank=0, world=num + 1)
        try:
            source = [torch.ones(size, dtype=torch.uint8) for size in buckets]

            def sync() -> None:
                for bucket in source:
                    dist.broadcast(bucket, src=0)
                dist.barrier()

            seconds = least_seconds(sync, repetitions)
            for index in range(num):
                fleet.answer(index)
            return seconds
        finally:
            dist.destroy_process_group()


def join_gloo(desk: Desk, *, store: str, world: int, buckets: list[int], repetitions: int) -> None:
    _init_gloo(store, rank=desk.index + 1, world=world)
    try:
        memory = [torch.ones(size, dtype=torch.uint8) for size in buckets]
        for _ in range(repetitions):
            for bucket in memory:
                dist.broadcast(bucket, src=0)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _init_gloo(store: str, *, rank: int, world: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_S))
