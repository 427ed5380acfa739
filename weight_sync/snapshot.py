"""A policy version at rest: all its tensors in the wire dtype, in one arena, with their checksums.

Invariant: a snapshot does not change while it is held; the trainer may go on training at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from weight_sync.arena import Arena
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases

_NUM_HASHING = 2
"""Threads that hash what has been copied while the next tensor is: the copy is bound by memory, the hash is not."""


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
    with ThreadPoolExecutor(_NUM_HASHING, thread_name_prefix="weights-hash") as pool:
        for name, tensor in without_aliases(named_tensors, aliases):
            spec = TensorSpec(name=name, dtype=wire_dtype_of(tensor, dtype), shape=tuple(tensor.shape))
            memory = arena.take(spec.num_bytes)
            copy_flat(memory.view(spec.dtype), tensor, 0)
            hashes.append(pool.submit(xxhash.xxh3_64_intdigest, memory.numpy().data))
            specs.append(spec)
            tensors.append(memory.view(spec.dtype).view(spec.shape))
        checksums = tuple(digest.result() for digest in hashes)
    manifest = Manifest(specs=tuple(specs), checksums=checksums, aliases=tuple(aliases))
    return Snapshot(policy_version=policy_version, manifest=manifest, tensors=tuple(tensors))
