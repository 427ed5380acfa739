"""Credit of a producer's stream. Pure.

Positions are absolute (samples and bytes since the producer's first sample), so an acknowledgement that is lost, repeated or
late does no harm. Invariant: what the consumer holds unsettled, and what it allowed and did not receive yet, fit its room.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    samples: int = 0
    """Sequence numbers below it may be sent."""
    num_bytes: int = 0
    """So many bytes may have been sent in all."""

    def or_further(self, other: Credit) -> Credit:
        return Credit(samples=max(self.samples, other.samples), num_bytes=max(self.num_bytes, other.num_bytes))

    def allows(self, seq: int, bytes_before: int, nbytes: int) -> bool:
        """Whether the sample at `seq`, with so many bytes sent before it, may be sent."""
        return seq < self.samples and bytes_before + nbytes <= self.num_bytes


@dataclass(slots=True)
class Stream:
    """The consumer's account of one producer's process."""

    received: int
    """Sequence number expected next."""
    received_bytes: int
    queued: int = 0
    """Received and not settled."""
    queued_bytes: int = 0

    @property
    def settled(self) -> int:
        """How many are settled, whichever they are."""
        return self.received - self.queued

    def receive(self, nbytes: int) -> None:
        self.received += 1
        self.received_bytes += nbytes
        self.queued += 1
        self.queued_bytes += nbytes

    def settle(self, nbytes: int) -> None:
        self.queued -= 1
        self.queued_bytes -= nbytes

    def credit(self, *, room_samples: int, room_bytes: int) -> Credit:
        """How far the producer may go when the consumer has room for so much of this stream."""
        return Credit(
            samples=max(self.received, self.settled + room_samples),
            num_bytes=max(self.received_bytes, self.received_bytes - self.queued_bytes + room_bytes),
        )
