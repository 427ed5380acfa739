"""Credit of a producer's stream. Pure.

A window that begins at the consumer's own `received`: so many records by number, so many bytes from there on. An
acknowledgement that is lost, repeated or late does no harm. Invariant: what the consumer holds unsettled, and what it allowed
and did not receive yet, fit its room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sample_bus.position import Settled, StreamPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    samples: int = 0
    """Sequence numbers below it may be sent."""
    room_bytes: int = 0
    """So many bytes of records from the consumer's `received` on may be sent."""


class Sizes:
    """Bytes of the kept records of a stream, and of any run of them."""

    def __init__(self, first: int = 0, sizes: tuple[int, ...] = ()) -> None:
        self._first = first
        self._base = 0
        self._ends: deque[int] = deque()
        for size in sizes:
            self.append(size)

    @property
    def next_seq(self) -> int:
        return self._first + len(self._ends)

    @property
    def first(self) -> int:
        return self._first

    @property
    def total_bytes(self) -> int:
        """Of the kept records."""
        return self.before(self.next_seq) - self._base

    def append(self, nbytes: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else self._base) + nbytes)

    def before(self, seq: int) -> int:
        """Bytes of all records before `seq`, counted from an arbitrary origin; `seq` may lie anywhere up to the next one."""
        if seq <= self._first:
            return self._base
        return self._ends[min(seq, self.next_seq) - self._first - 1]

    def free(self, watermark: int) -> None:
        """Forget records below `watermark`."""
        while self._ends and self._first < watermark:
            self._base = self._ends.popleft()
            self._first += 1


@dataclass(slots=True)
class Stream:
    """The consumer's account of one producer's stream."""

    received: int
    """Sequence number expected next."""
    settled: Settled = field(default_factory=Settled)
    committed: int = 0
    queued: int = 0
    """Received and not settled."""
    queued_bytes: int = 0
    limit: int = 0
    """Largest limit in records that its producer was given."""
    is_away: bool = False
    """Its producer has left: what it does not hold is room for others."""

    @classmethod
    def at(cls, position: StreamPosition) -> Stream:
        settled = Settled(position.watermark)
        for first, last in position.beyond:
            settled.add_run(first, last)
        return cls(received=position.watermark, settled=settled, committed=position.watermark)

    def receive(self, nbytes: int) -> None:
        self.received += 1
        self.queued += 1
        self.queued_bytes += nbytes

    def pass_over(self) -> None:
        """The record expected next is settled already."""
        self.received += 1

    def settle(self, seq: int, nbytes: int) -> None:
        self.settled.add(seq)
        self.received = max(self.received, self.settled.watermark)  # records settled ahead need not come
        self.queued -= 1
        self.queued_bytes -= nbytes

    @property
    def num_settled_ahead(self) -> int:
        """Settled records that did not come yet."""
        return sum(max(0, last - max(first, self.received)) for first, last in self.settled.runs())

    def credit(self, *, room_samples: int, room_bytes: int) -> Credit:
        """How far the producer may go when the consumer has room for so much of this stream."""
        self.limit = max(self.limit, self.received + max(0, room_samples - self.queued))
        return Credit(samples=self.limit, room_bytes=max(0, room_bytes - self.queued_bytes))
