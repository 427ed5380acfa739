"""A policy version at rest: all its tensors in the wire dtype, in one arena, with their checksums.

Invariant: a snapshot does not change while it is held; the trainer may go on training at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from weight_sync.arena import Arena
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases

_CHUNK_BYTES = 2 << 20
"""Copied, then hashed while the cache holds it."""
_MAX_THREADS = 8
_AHEAD_BYTES = 256 << 20
"""Of tensors that may be waiting for a thread: a sharded one is gathered whole before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    policy_version: int
    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]
    """In the order of the manifest; views of the arena."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(zip((spec.name for spec in self.manifest.specs), self.tensors, strict=True))


def take_snapshot(
    arena: Arena,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    dtype: torch.dtype,
) -> Snapshot:
    """Copy the tensors into `arena`, floating ones cast to `dtype`; what the arena held before is overwritten.

    Raises:
        WeightSyncError: a name comes twice, or a tensor is not dense.
        ProtocolError: a tensor cannot travel (name, dtype, number of dimensions).
    """
    arena.reset()
    aliases: list[tuple[str, str]] = []
    specs: list[TensorSpec] = []
    hashes: list[Future[int]] = []
    tensors: list[torch.Tensor] = []
    waiting: deque[tuple[Future[int], int]] = deque()
    waiting_bytes = 0
    with ThreadPoolExecutor(num_copying(), thread_name_prefix="weights-copy") as pool:
        for name, tensor in without_aliases(named_tensors, aliases):
            spec = TensorSpec(name=name, dtype=wire_dtype_of(tensor, dtype), shape=tuple(tensor.shape))
            memory = arena.take(spec.num_bytes)
            while waiting and waiting_bytes > _AHEAD_BYTES:
                future, num_bytes = waiting.popleft()
                future.result()
                waiting_bytes -= num_bytes
            hashes.append(pool.submit(_copy_in, memory, spec, tensor))
            waiting.append((hashes[-1], spec.num_bytes))
            waiting_bytes += spec.num_bytes
            specs.append(spec)
            tensors.append(memory.view(spec.dtype).view(spec.shape))
        checksums = tuple(digest.result() for digest in hashes)
    manifest = Manifest(specs=tuple(specs), checksums=checksums, aliases=tuple(aliases))
    return Snapshot(policy_version=policy_version, manifest=manifest, tensors=tuple(tensors))


def num_copying() -> int:
    """Threads that copy and hash: one for each core that this process may use, up to eight."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


@torch.no_grad()
def _copy_in(memory: torch.Tensor, spec: TensorSpec, tensor: torch.Tensor) -> int:
    """The checksum of what was copied."""
    hasher = xxhash.xxh3_64()
    for start in range(0, spec.num_bytes, _CHUNK_BYTES):
        window = memory[start : start + _CHUNK_BYTES]
        copy_flat(window.view(spec.dtype), tensor, start // spec.dtype.itemsize)
        hasher.update(window.numpy().data)
    return hasher.intdigest()
