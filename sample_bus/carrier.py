"""The seam below hub and link: what moves frames. One thread owns the I/O; it tells the event loop in batches of events.

Two carriers: `zmq` (samples are kept in a spool on the producer's disk and sent over the socket) and `redis` (samples are kept
in the broker's streams). Hub and link hold all decisions (credit, order, who is who); a carrier holds none.

All methods belong to the event loop, return at once and raise nothing: what goes wrong comes back as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sample_bus.events import Event
from sample_bus.frames import Ack, Control
from sample_bus.position import StreamPosition

FLUSH_S = 1.0
"""How long a closing end tries to send what it was handed."""
Deliver = Callable[[list[Event]], None]
Frames = Sequence[bytes | memoryview]


class LinkCarrier(Protocol):
    """A client's end; its only peer is `events.SERVER`."""

    def start(self) -> None: ...

    def send(self, message: Control, *, key: str | None = None) -> None:
        """Send to the trainer; one with a `key` takes back an unsent one with the same key."""
        ...

    def track(self) -> None:
        """From now on send heartbeats and report the trainer's silence (`Silent`, `HeardAgain`)."""
        ...

    def open_stream(self, run_id: str, *, renew: bool = False) -> None:
        """Open or make this producer's stream of that run: `StreamOpened`, or `StreamFailed`. Records handed to `store` before
        still go to the stream that was open then. With `renew` the stream begins a new epoch: its copies lost their end."""
        ...

    def store(self, seq: int, frames: Frames) -> None:
        """Keep the next record: `Stored` once it is durable. While it cannot be written it is tried again (`StoreBlocked` with
        the reason, once; `StoreUnblocked` when it works again); later ones wait behind it, so that order and density hold."""
        ...

    def deliver(self, first: int | None, limit: int) -> None:
        """Records below `limit` may go to the trainer, from `first` on (None: from where delivery stands). Nothing is delivered
        before the first call after `open_stream`, or after `hold`."""
        ...

    def bound(self, max_bytes: int) -> None:
        """The trainer takes no larger records: of one that is kept it is told with `Withheld`, in the record's place (redis: it
        reads the record, and refuses it)."""
        ...

    def hold(self) -> None:
        """Deliver nothing more until `deliver`: the trainer is away or does not know us."""
        ...

    def free(self, watermark: int) -> None:
        """Copies below `watermark` are not needed any more."""
        ...

    def read(self, first: int, last: int) -> None:
        """Read the kept records first … last - 1 back: `ReadBack`."""
        ...

    async def close(self, *, flush_s: float) -> None:
        """Write and send what was handed over, within `flush_s`, and end the thread."""
        ...


class HubCarrier(Protocol):
    """The trainer's end. Samples arrive as `ArrivedSample`, `ArrivedClosure` and `Malformed`."""

    @property
    def address(self) -> str:
        """Where it listens, as resolved."""
        ...

    def start(self) -> None: ...

    def send(self, peer: bytes, message: Control, *, key: str | None = None) -> None: ...

    def track(self, peer: bytes) -> None: ...

    def forget(self, peer: bytes) -> None: ...

    def probe(self, peer: bytes) -> None:
        """Send a heartbeat now and report HeardAgain when the peer is next heard."""
        ...

    def open_stream(self, producer: str, epoch: int, first: int) -> None:
        """Hand over that stream's records from `first` on (zmq: they come by themselves; redis: read them, own pending ones
        before new ones)."""
        ...

    def close_streams(self, producer: str) -> None:
        """Hand over nothing more of that producer until `open_stream`."""
        ...

    def room(self, producer: str, ack: Ack) -> None:
        """Records of that producer may be handed over as far as `ack` goes, in number and bytes; none before the first call
        after `open_stream` (zmq: the producer has the same credit)."""
        ...

    def commit(self, stream: StreamPosition) -> None:
        """What the position covers may be deleted (zmq: the ACK tells the producer)."""
        ...

    async def close(self, *, flush_s: float) -> None: ...
