"""A producer's records on their way: those that wait for credit, those being made durable, those kept until committed.

Lives in the event loop; no I/O. Invariant: sequence numbers are dense and given in the order of offers, at the moment when the
credit covers the record; an offer ends when its record is durable; everything that is kept can be delivered again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sample_bus import wire
from sample_bus.credit import Credit, Sizes
from sample_bus.sample import SampleId

Parts = Sequence[bytes | memoryview]


class Outflow(Protocol):
    """What an outbox asks of the transport (`carrier.LinkCarrier`)."""

    def store(self, seq: int, frames: Parts) -> None: ...

    def deliver(self, first: int | None, limit: int) -> None: ...

    def hold(self) -> None: ...

    def free(self, watermark: int) -> None: ...


@dataclass(slots=True, eq=False)
class Offer:
    parts: Parts
    """Header, body, large columns."""
    nbytes: int
    """Of its frames."""
    done: asyncio.Future[SampleId]


class Outbox:
    def __init__(self, producer: str, outflow: Outflow) -> None:
        self._producer = producer
        self._outflow = outflow
        self._epoch = 0
        self._sizes = Sizes()
        self._credit = Credit()
        self._received = 0
        self._limit = 0
        self._max_bytes: int | None = None
        self._delivers = False
        self._waiting: deque[Offer] = deque()
        self._storing: deque[Offer] = deque()
        self._num_bytes = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def next_seq(self) -> int:
        return self._sizes.next_seq

    @property
    def committed(self) -> int:
        return self._sizes.first

    @property
    def kept_bytes(self) -> int:
        return self._sizes.total_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all records stored by this process."""
        return self._num_bytes

    @property
    def num_stored(self) -> int:
        """Records of the stream that are durable."""
        return self.next_seq - len(self._storing)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def open(self, epoch: int, first: int, sizes: tuple[int, ...]) -> None:
        """The stream as the transport found it. What waits goes there; nothing is stored before `resume`."""
        self._epoch = epoch
        self._sizes = Sizes(first, sizes)
        self._credit = Credit()
        self._received = self._limit = first
        self._delivers = False

    def add(self, offer: Offer) -> None:
        self._waiting.append(offer)
        self._pump()

    def withdraw(self, offer: Offer) -> bool:
        """Take back an offer that still waits for credit; False if it is in the stream."""
        try:
            self._waiting.remove(offer)
        except ValueError:
            return False
        return True

    def resume(self, received: int, committed: int, credit: Credit) -> None:
        """A trainer takes the stream up from `received`."""
        self._credit = credit
        self._received = self._limit = received
        self._delivers = True
        self._free(committed)
        self._extend_limit()
        self._outflow.deliver(received, self._limit)
        self._pump()

    def bound(self, max_bytes: int, refusal: Callable[[int], Exception]) -> None:
        """The trainer takes no record above `max_bytes`: end those that wait with the refusal for their size. What is kept goes
        to it all the same, by number and without its bytes."""
        self._max_bytes = max_bytes
        for offer in [offer for offer in self._waiting if offer.nbytes > max_bytes]:
            self._waiting.remove(offer)
            if not offer.done.done():
                offer.done.set_exception(refusal(offer.nbytes))

    def advance(self, received: int, committed: int, credit: Credit) -> None:
        """An acknowledgement; an older one than known changes nothing."""
        if received < self._received or not self._delivers:
            return
        self._received = received
        self._credit = credit
        self._free(committed)
        before = self._limit
        self._extend_limit()
        if self._limit != before:
            self._outflow.deliver(None, self._limit)
        self._pump()

    def pause(self) -> None:
        """The trainer is away: what credit is left may be stored, nothing is delivered until `resume`."""
        self._delivers = False
        self._outflow.hold()

    def stored(self, upto: int) -> None:
        """Every record below `upto` is durable."""
        while self._storing and self.num_stored < upto:
            seq = self.num_stored
            offer = self._storing.popleft()
            if not offer.done.done():
                offer.done.set_result(SampleId(self._producer, self._epoch, seq))

    def fail(self, error: Exception) -> None:
        """End every offer with the error. Those in the stream stay there, so it has no gaps."""
        for offer in (*self._waiting, *self._storing):
            if not offer.done.done():
                offer.done.set_exception(error)
        self._waiting.clear()

    def fail_all(self, error: Exception) -> None:
        """End every offer, and forget the stream."""
        self.fail(error)
        self._storing.clear()
        self.open(0, 0, ())

    def _free(self, committed: int) -> None:
        if committed > self._sizes.first:
            self._sizes.free(committed)
            self._outflow.free(committed)

    def _allows(self, seq: int, nbytes: int) -> bool:
        if seq < self._credit.samples and self._max_bytes is not None and nbytes > self._max_bytes:
            return True
        used = self._sizes.before(seq) - self._sizes.before(self._received)
        return seq < self._credit.samples and used + nbytes <= self._credit.room_bytes

    def _extend_limit(self) -> None:
        """Move the limit over kept records as far as the credit reaches."""
        while self._limit < self.next_seq:
            seq = self._limit
            if not self._allows(seq, self._sizes.before(seq + 1) - self._sizes.before(seq)):
                return
            self._limit = seq + 1

    def _pump(self) -> None:
        """Give waiting offers their place, as far as the credit reaches."""
        seq = self.next_seq
        if not self._waiting or self._limit < seq:
            return
        free_bytes = self._credit.room_bytes - (self._sizes.before(seq) - self._sizes.before(self._received))
        ready: list[Offer] = []
        for offer in self._waiting:
            free_bytes -= offer.nbytes
            if free_bytes < 0 or seq + len(ready) >= self._credit.samples:
                break
            ready.append(offer)
        if not ready:
            return
        self._limit = seq + len(ready)
        if self._delivers:
            self._outflow.deliver(None, self._limit)
        for offer in ready:
            self._waiting.popleft()
            self._sizes.append(offer.nbytes)
            self._num_bytes += offer.nbytes
            self._storing.append(offer)
            self._outflow.store(seq, wire.stamp(offer.parts, self._epoch, seq))
            offer.parts = ()
            seq += 1
