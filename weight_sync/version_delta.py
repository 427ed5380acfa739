"""What changed between two policy versions at rest: computed once, sent to every receiver that holds the first.

Invariant: a tensor stands here only if it travels smaller than whole; which tensors do is decided by their bytes alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weight_sync.delta import Bytes, EncodedDelta, encode_delta
from weight_sync.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDelta:
    """From `base_version` to `policy_version`."""

    base_version: int
    base_digest: str
    policy_version: int
    deltas: Mapping[str, Bytes]
    """By name; empty: the tensor did not change. A tensor that is not named travels whole."""
    num_changed: int
    """Elements that differ; of tensors that travel whole, as many as were looked at."""
    num_elements: int
    payload_bytes: int
    """What travels: deltas, and tensors that travel whole."""
    total_bytes: int
    seconds: float
    """What the comparison took."""


def delta_between(base: Snapshot, new: Snapshot, *, num_threads: int = 1) -> VersionDelta:
    """Compare the two bit by bit. Tensors that the base lacks, or has in another shape or dtype, travel whole."""
    started = time.monotonic()
    before = {spec.name: (spec, tensor) for spec, tensor in zip(base.manifest.specs, base.tensors, strict=True)}

    def encode(index: int) -> EncodedDelta:
        spec, known = new.manifest.specs[index], before.get(new.manifest.specs[index].name)
        if known is None or known[0] != spec:
            return EncodedDelta(payload=None, num_changed=new.tensors[index].numel())
        return encode_delta(_bytes(known[1]), _bytes(new.tensors[index]), spec.dtype.itemsize)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights-delta") as pool:
        encoded = list(pool.map(encode, range(new.manifest.num_tensors)))
    specs = new.manifest.specs
    return VersionDelta(
        base_version=base.policy_version,
        base_digest=base.manifest.digest,
        policy_version=new.policy_version,
        deltas={spec.name: one.payload for spec, one in zip(specs, encoded, strict=True) if one.payload is not None},
        num_changed=sum(one.num_changed for one in encoded),
        num_elements=sum(tensor.numel() for tensor in new.tensors),
        payload_bytes=sum(
            spec.num_bytes if one.payload is None else len(one.payload) for spec, one in zip(specs, encoded, strict=True)
        ),
        total_bytes=new.manifest.total_bytes,
        seconds=time.monotonic() - started,
    )


def _bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found
