"""Credit of a producer's stream. Pure.

Positions are absolute: samples and bytes since the producer's first sample. Invariant: what the consumer holds unsettled, plus
what it has allowed and not yet received, never exceeds its limits.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        return self.received - self.queued

    def receive(self, nbytes: int) -> None:
        self.received += 1
        self.received_bytes += nbytes
        self.queued += 1
        self.queued_bytes += nbytes

    def settle(self, nbytes: int) -> None:
        self.queued -= 1
        self.queued_bytes -= nbytes

    def limits(self, *, max_samples: int, max_bytes: int, queued_elsewhere: int, queued_bytes_elsewhere: int) -> Credit:
        """How far the producer may go: the room that all streams share, less what others hold, from what is settled here."""
        return Credit(
            samples=max(self.received, self.settled + max_samples - queued_elsewhere),
            num_bytes=max(self.received_bytes, self.received_bytes - self.queued_bytes + max_bytes - queued_bytes_elsewhere),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    samples: int = 0
    """Sequence numbers below it may be sent."""
    num_bytes: int = 0
    """So many bytes may have been sent in all."""

    def or_further(self, other: Credit) -> Credit:
        """The further of both, so that acknowledgements may be lost, repeated or late."""
        return Credit(samples=max(self.samples, other.samples), num_bytes=max(self.num_bytes, other.num_bytes))

    def allows(self, seq: int, bytes_before: int, nbytes: int) -> bool:
        """Whether the sample at `seq`, with so many bytes sent before it, may be sent."""
        return seq < self.samples and bytes_before + nbytes <= self.num_bytes
