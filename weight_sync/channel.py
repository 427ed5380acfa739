"""The seam between streaming weights and the transport that carries the buckets.

A channel is one connection for one transfer. The sender has at most two buckets out; `next_bucket` waits until the receiver
gave one back. Every wait has a deadline and ends in `TransferTimeout`, `PeerLost` or `PeerFailed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weight_sync.arena import Segment
    from weight_sync.snapshot import Snapshot


class BucketKind(IntEnum):
    MANIFEST = 1
    """A part of the encoded manifest; it has no header."""
    WEIGHTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket at its receiver, readable until `release`."""

    kind: BucketKind
    sequence: int
    """Of its kind, from 0."""
    payload: NDArray[np.uint8]
    header: bytes
    lent: torch.Tensor | None = None
    """The payload as memory that stays readable after `release`, so that tensors in it need no copy; None: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """Says that all buckets were sent, and what they amount to."""

    policy_version: int
    manifest_digest: str
    num_tensors: int
    total_bytes: int
    num_buckets: int


class SendChannel(Protocol):
    """The sender's end."""

    @property
    def bucket_bytes(self) -> int: ...

    def next_bucket(self) -> torch.Tensor:
        """A free bucket, uint8[bucket_bytes], writable until `send_bucket`."""
        ...

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        """Hand the bucket of the last `next_bucket` over; `header` is written behind the payload."""
        ...

    def finish(self, end: StreamEnd) -> None:
        """Announce the end and wait until the receiver confirms that it holds everything."""
        ...


@runtime_checkable
class ViewChannel(SendChannel, Protocol):
    """A sender's end that can send bytes from where they lie, in place of those in the bucket."""

    def send_view(self, kind: BucketKind, sequence: int, *, payload: torch.Tensor, header: bytes) -> None:
        """As `send_bucket`, with `payload`, uint8[bytes] of a CPU, which must stay as it is until the end of the transfer."""
        ...


@runtime_checkable
class LendingChannel(SendChannel, Protocol):
    """A sender's end that can pass the memory itself, where it is `Memory.is_lendable`, in place of its bytes."""

    def lend(self, snapshot: Snapshot, segments: Sequence[Segment]) -> None:
        """Pass a version on and wait until the receiver confirms that it holds it."""
        ...

    def wait_returned(self) -> bool:
        """Wait for the end of the loan; whether the receiver said that nobody reads any more."""
        ...


class ReceiveChannel(Protocol):
    """The receiver's end."""

    @property
    def policy_version(self) -> int:
        """The version that this transfer carries."""
        ...

    def receive(self) -> Bucket | StreamEnd: ...

    def release(self) -> None:
        """Give the bucket of the last `receive` back."""
        ...

    def confirm(self, manifest_digest: str) -> None:
        """Tell the sender that everything arrived and is what `manifest_digest` says."""
        ...
