"""A policy version at rest: all its tensors in the wire dtype, in one arena, with their checksums.

Invariant: a snapshot does not change while it is held; the trainer may go on training at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from weight_sync.arena import Arena
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases

_CHUNK_BYTES = 4 << 20


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
    checksums: list[int] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in without_aliases(named_tensors, aliases):
        spec = TensorSpec(name=name, dtype=wire_dtype_of(tensor, dtype), shape=tuple(tensor.shape))
        memory = arena.take(spec.num_bytes)
        checksums.append(_copy_in(memory, spec, tensor))
        specs.append(spec)
        tensors.append(memory.view(spec.dtype).view(spec.shape))
    manifest = Manifest(specs=tuple(specs), checksums=tuple(checksums), aliases=tuple(aliases))
    return Snapshot(policy_version=policy_version, manifest=manifest, tensors=tuple(tensors))


def _copy_in(memory: torch.Tensor, spec: TensorSpec, tensor: torch.Tensor) -> int:
    """Copy and hash chunk by chunk, so that the hash finds most of it in the processor's cache; returns the checksum."""
    hasher = xxhash.xxh3_64()
    for start in range(0, spec.num_bytes, _CHUNK_BYTES):
        window = memory[start : start + _CHUNK_BYTES]
        copy_flat(window.view(spec.dtype), tensor, start // spec.dtype.itemsize)
        hasher.update(window.numpy().data)
    return hasher.intdigest()
