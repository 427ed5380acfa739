"""Weights that are sent from where they are trained, for want of memory for a snapshot.

Invariant: what travels has the checksums that were computed before the version was announced. Weights that changed meanwhile
are none of it: the receiver refuses them, and nothing of them leaves after the withdrawal, as buckets are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil
import torch
import xxhash

from weight_sync.channel import BucketKind, SendChannel, StreamEnd
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.tensors import copy_flat, wire_dtype_of, without_aliases

Read = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""The weights as they are now, in the same order each time; called from any thread, also while others read."""

_MARGIN = 1.2


def has_room(num_bytes: int, *, available_bytes: int) -> bool:
    """Whether a snapshot of `num_bytes` may be taken: some memory has to be left."""
    return available_bytes >= _MARGIN * num_bytes


def available_memory() -> int:
    """Bytes of this host that can be had without swapping."""
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """A policy version that lies in the tensors that are trained; to be sent only until they change."""

    policy_version: int
    manifest: Manifest
    read: Read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            yield from self.read()


def sizes_of(read: Read, dtype: torch.dtype) -> int:
    """Bytes of all tensors as they travel."""
    with torch.no_grad():
        return sum(tensor.numel() * wire_dtype_of(tensor, dtype).itemsize for _, tensor in without_aliases(read(), []))


def measure(read: Read, *, policy_version: int, dtype: torch.dtype, bucket_bytes: int) -> LiveWeights:
    """Look at the weights once, through one bucket, for their manifest.

    Raises:
        WeightSyncError: a name comes twice, or a tensor is not dense.
        ProtocolError: a tensor cannot travel (name, dtype, number of dimensions).
    """
    bucket = torch.empty(bucket_bytes, dtype=torch.uint8)
    aliases: list[tuple[str, str]] = []
    specs: list[TensorSpec] = []
    checksums: list[int] = []
    with torch.no_grad():
        for name, tensor in without_aliases(read(), aliases):
            spec = TensorSpec(name=name, dtype=wire_dtype_of(tensor, dtype), shape=tuple(tensor.shape))
            specs.append(spec)
            checksums.append(_checksum(tensor, spec, bucket))
    manifest = Manifest(specs=tuple(specs), checksums=tuple(checksums), aliases=tuple(aliases))
    return LiveWeights(policy_version=policy_version, manifest=manifest, read=read)


def _checksum(tensor: torch.Tensor, spec: TensorSpec, bucket: torch.Tensor) -> int:
    hasher = xxhash.xxh3_64()
    num_elements = tensor.numel()
    step = len(bucket) // spec.dtype.itemsize
    for start in range(0, num_elements, step):
        window = bucket[: min(step, num_elements - start) * spec.dtype.itemsize]
        copy_flat(window.view(spec.dtype), tensor, start)
        hasher.update(window.numpy().data)
    return hasher.intdigest()


class Copying:
    """A sender's end by which only copies leave, whatever else the channel can do."""

    def __init__(self, channel: SendChannel) -> None:
        self._channel = channel

    @property
    def bucket_bytes(self) -> int:
        return self._channel.bucket_bytes

    def next_bucket(self) -> torch.Tensor:
        return self._channel.next_bucket()

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        self._channel.send_bucket(kind, sequence, payload_bytes=payload_bytes, header=header)

    def finish(self, end: StreamEnd) -> None:
        self._channel.finish(end)
