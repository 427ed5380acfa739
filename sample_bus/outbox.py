"""A producer's samples on their way: those that wait for credit and those sent and not yet received.

Lives in the event loop; no I/O. Invariant: sequence numbers are dense and given at the moment of sending, in the order of
offers; a sample leaves only when the credit covers it; everything from the first unreceived one on can be sent again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sample_bus import wire
from sample_bus.credit import Credit
from sample_bus.sample import SampleId

Parts = Sequence[bytes | memoryview]


@dataclass(slots=True, eq=False)
class Offer:
    parts: Parts
    """Header, body, large columns."""
    nbytes: int
    """Of its frames."""
    done: asyncio.Future[SampleId]
    frames: Parts = ()
    """What was sent."""
    bytes_before: int = 0


class Outbox:
    def __init__(self, producer: str, epoch: int, send: Callable[[int, Parts], None]) -> None:
        """`send` hands a sequence number and the sample's frames to the transport."""
        self._producer = producer
        self._epoch = epoch
        self._send = send
        self._credit = Credit()
        self._waiting: deque[Offer] = deque()
        self._sent: OrderedDict[int, Offer] = OrderedDict()
        self._next_seq = 0
        self._num_bytes = 0
        self._cursor = 0

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples sent."""
        return self._num_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def first_unreceived(self) -> int:
        return next(iter(self._sent), self._next_seq)

    @property
    def bytes_before_unreceived(self) -> int:
        first = next(iter(self._sent.values()), None)
        return self._num_bytes if first is None else first.bytes_before

    def add(self, offer: Offer) -> None:
        self._waiting.append(offer)
        self._pump()

    def withdraw(self, offer: Offer) -> bool:
        """Take back an offer that was not sent; False if it was."""
        try:
            self._waiting.remove(offer)
        except ValueError:
            return False
        return True

    def resume(self, received: int, credit: Credit) -> None:
        """A trainer takes the stream up from `received`: what it does not hold is sent (again)."""
        self._credit = credit
        self._confirm(received)
        self._cursor = self.first_unreceived
        self._pump()

    def advance(self, received: int, credit: Credit) -> None:
        """An acknowledgement; an older one than known changes nothing."""
        self._credit = self._credit.or_further(credit)
        self._confirm(received)
        self._pump()

    def pause(self) -> None:
        """Send nothing new until `resume`."""
        self._credit = Credit()

    def fail(self, error: Exception) -> None:
        """End every offer with the error. Those that were sent stay in the stream, so it has no gaps."""
        for offer in (*self._waiting, *self._sent.values()):
            if not offer.done.done():
                offer.done.set_exception(error)
        self._waiting.clear()

    def _confirm(self, received: int) -> None:
        while self._sent and next(iter(self._sent)) < received:
            seq, offer = self._sent.popitem(last=False)
            self._cursor = max(self._cursor, seq + 1)
            if not offer.done.done():
                offer.done.set_result(SampleId(self._producer, self._epoch, seq))

    def _pump(self) -> None:
        while self._cursor < self._next_seq:
            again = self._sent[self._cursor]
            if not self._credit.allows(self._cursor, again.bytes_before, again.nbytes):
                return
            self._send(self._cursor, again.frames)
            self._cursor += 1
        while self._waiting:
            offer = self._waiting[0]
            if not self._credit.allows(self._next_seq, self._num_bytes, offer.nbytes):
                return
            self._waiting.popleft()
            offer.frames = wire.stamp(offer.parts, self._epoch, self._next_seq)
            offer.parts, offer.bytes_before = (), self._num_bytes
            self._sent[self._next_seq] = offer
            self._next_seq = self._cursor = self._next_seq + 1
            self._num_bytes += offer.nbytes
            self._send(self._next_seq - 1, offer.frames)
