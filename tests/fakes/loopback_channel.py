"""A weight channel within one process: what is sent lies in memory until it is received.

It keeps the buckets as a transport would carry them, so a test can look at them, drop one, repeat one or alter its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_sync.channel import Bucket, BucketKind, StreamEnd


@dataclass
class LoopbackSender:
    """A `SendChannel` that keeps every bucket."""

    bucket_bytes: int
    sent: list[Bucket | StreamEnd] = field(default_factory=list)
    on_bucket: Callable[[Bucket], None] = lambda bucket: None
    _memory: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._memory = torch.empty(self.bucket_bytes, dtype=torch.uint8)

    def next_bucket(self) -> torch.Tensor:
        self._memory.fill_(255)  # whatever is left from before must not be taken for weights
        return self._memory

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        assert payload_bytes + len(header) <= self.bucket_bytes, (payload_bytes, len(header), self.bucket_bytes)
        payload = self._memory.numpy()[:payload_bytes].copy()
        bucket = Bucket(kind=kind, sequence=sequence, payload=payload, header=header)
        self.sent.append(bucket)
        self.on_bucket(bucket)

    def finish(self, end: StreamEnd) -> None:
        self.sent.append(end)

    @property
    def weight_buckets(self) -> list[Bucket]:
        return [bucket for bucket in self.sent if isinstance(bucket, Bucket) and bucket.kind is BucketKind.WEIGHTS]


@dataclass
class LoopbackReceiver:
    """A `ReceiveChannel` that hands out what a `LoopbackSender` kept."""

    policy_version: int
    sent: list[Bucket | StreamEnd]
    confirmed: str | None = None
    _held: bool = False

    def receive(self) -> Bucket | StreamEnd:
        assert not self._held, "the bucket before was not released"
        received = self.sent.pop(0)
        self._held = isinstance(received, Bucket)
        return received

    def release(self) -> None:
        assert self._held, "no bucket to release"
        self._held = False

    def confirm(self, manifest_digest: str) -> None:
        self.confirmed = manifest_digest


def altered(bucket: Bucket, at: int) -> Bucket:
    """The bucket with one bit of its payload turned."""
    payload = bucket.payload.copy()
    payload[at] ^= np.uint8(1)
    return Bucket(kind=bucket.kind, sequence=bucket.sequence, payload=payload, header=bucket.header)
