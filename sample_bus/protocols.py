"""The seams of the bus: what a producer, a consumer and a control client may rely on, whatever the transport.

Delivery: `offer` returns once the sample survives the death of any one process; its producer keeps a copy until the consumer
has committed it. A record is handed to `lease` in its producer's order; `acknowledge` settles it in memory and gives its credit
back; `commit` makes a position of settled records final. After a consumer's restart `seek` names the position to go on from:
records beyond it come again, those it covers never. Nothing is dropped to make room: when the consumer's limit in samples or
bytes is reached, `offer` waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sample_bus.closed_seat import ClosedSeat
from sample_bus.messages import Message
from sample_bus.peers import LostPeer, PeerState
from sample_bus.position import BusPosition
from sample_bus.sample import Sample, SampleId

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A sample in the trainer's hands, until acknowledged."""

    id: SampleId
    sample: Sample
    nbytes: int
    """Bytes on the wire."""
    received_at: float = 0.0
    """Unix seconds at which this process received it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedClosure:
    """A seat that stays empty, in the trainer's hands, until acknowledged with its group."""

    id: SampleId
    closed: ClosedSeat
    nbytes: int
    received_at: float = 0.0


Lease = Leased | LeasedClosure


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Records that a producer no longer has and that this consumer never settled: a checkpoint that covered them is lost, or
    there never was one."""

    producer: str
    epoch: int
    first: int
    last: int
    """Sequence numbers first … last - 1, less those that the position covers."""
    num_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A record that the trainer's end could not decode: it is settled there and will never be trained."""

    id: SampleId
    error: str
    lost: bool = False
    """The broker had lost it: nothing is wrong with what its producer made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the trainer that took a producer already accounts for, in records since `origin_version`."""

    origin_version: int
    accounted: int
    """Trained, queued with it, or kept by this producer and still to come; what was given back (`dropped`) is left out."""
    incarnation: str
    dropped: int = 0
    """Given back until then (`Counts.refunded`): only what is given back beyond it is to be refunded."""
    run_id: str = ""
    """Names the run over restarts of both daemons. Another one: the trainer began afresh, and earlier records are not its
    own."""
    epoch: int = 0
    """Epoch of this producer's stream; another one than before: what it had kept is lost. 0 for a console."""
    next_seq: int = 0
    """Sequence number up to which `accounted` counts; records since then have this number and those after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatistics:
    offered: int
    """Records that are durable."""
    acknowledged: int
    """Settled by the trainer."""
    unsettled: int
    bytes_sent: int
    waiting: int
    """Offers that wait for credit."""
    committed: int = 0
    """Records that a commit covers, whose copies are freed."""
    kept_bytes: int = 0
    """Bytes of the producer's copies."""
    problem: str = ""
    """Why records cannot be made durable at the moment; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    received: int
    queued: int
    """Received, not yet acknowledged (leased ones included)."""
    queued_bytes: int
    rejected: int
    """Messages that did not decode; quarantined."""
    duplicates: int
    """Records that came again although they are held or settled: refused."""


class Producer(Protocol):
    async def offer(self, sample: Sample) -> SampleId:
        """Hand over a sample; afterwards it survives the death of any one process. Waits while the consumer is full, and while
        the copy cannot be written (disk full, read-only, broker out of memory): a line every few seconds says so.

        Raises SampleTooLarge, WireError (inconsistent sample), PeerLost, Ended.
        """
        ...

    async def close_seat(self, closed: ClosedSeat) -> SampleId:
        """Say, as durably and in the same order, that a seat will never bring a sample. Raises as `offer`."""
        ...

    def stored(self, first: int = 0) -> AsyncIterator[tuple[SampleId, Sample | ClosedSeat]]:
        """Records of this stream that are durable and not committed, from sequence number `first` on, in order.

        To be called when a resumption is known: a producer that restarts learns what its earlier process had offered.
        """
        ...

    def rejections(self) -> AsyncIterator[Rejection]:
        """Yield each rejection since the link was opened, then each new one."""
        ...

    def producer_statistics(self) -> ProducerStatistics: ...


class Consumer(Protocol):
    async def lease(self) -> Lease:
        """Next record in order of arrival; waits for one."""
        ...

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        """Settle leased records, in any order: trained, or dropped. Their credit returns to the producer.

        Raises BusError, before settling any, if one is not leased.
        """
        ...

    def position(self) -> BusPosition:
        """What is settled now; to be stored with the state that holds its effect. Of several streams of one producer the newest
        is the last."""
        ...

    def seek(self, position: BusPosition) -> None:
        """Go on from `position`: what is queued or leased is forgotten, and producers send again what it does not cover."""
        ...

    def commit(self, position: BusPosition) -> None:
        """The effect of everything that `position` covers is durable: producers may free their copies."""
        ...

    def gone(self) -> AsyncIterator[Gone]:
        """Yield each loss that was noticed since the hub was opened, then each new one."""
        ...

    def consumer_statistics(self) -> ConsumerStatistics: ...


class Control(Protocol):
    """A client's view of the control channel. Event driven: `watch` wakes on each change of a topic."""

    def get(self, topic: str, kind: type[M]) -> M | None:
        """Newest value of a retained topic."""
        ...

    def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        """Yield the current value, then each newer one (intermediate values may be skipped)."""
        ...

    async def publish(self, topic: str, value: Message) -> None:
        """Set a retained topic."""
        ...

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        """Ask the trainer. Raises RequestFailed with the trainer's words, or naming the deadline."""
        ...


Handler = Callable[[Any], Awaitable[Message]]
"""Takes the decoded body, returns the reply; an exception's text goes back as RequestFailed."""


class ControlServer(Control, Protocol):
    """The trainer's side: the same view, plus the answers."""

    def handle(self, name: str, kind: type[Message], handler: Handler) -> None:
        """Answer request `name`, whose body is validated as `kind`."""
        ...

    def expect(self, names: Iterable[str]) -> None:
        """These requests will be answered later: who asks before waits for as long as its own deadline says."""
        ...


class Hub(Consumer, ControlServer, Protocol):
    """The trainer's end. All methods belong to the event loop in which it was opened."""

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    @property
    def run_id(self) -> str:
        """Names the run over restarts."""
        ...

    @property
    def rollouter(self) -> str | None:
        """Name of a rollouter that is connected."""
        ...

    async def wait_rollouter(self, timeout_s: float) -> str:
        """Wait for a rollouter and return its name; a line every few seconds says so. Raises PeerLost at the deadline."""
        ...

    def rollouter_lost(self) -> AsyncIterator[LostPeer]:
        """Yield each loss of a rollouter since the hub was opened, then each new one.

        An idle healthy rollouter is never lost.
        """
        ...

    def set_origin(self, origin_version: int, accounted: int = 0) -> None:
        """Say from where admission counts, and how many samples since then are accounted for by an earlier process. Call it
        before the first await after opening, or clients are told the default: version 0, nothing."""
        ...


class Link(Producer, Control, Protocol):
    """A client's end. All methods belong to the event loop in which it was opened."""

    @property
    def peer_state(self) -> PeerState: ...

    @property
    def resumption(self) -> Resumption | None:
        """What the newest trainer said when it took this client; None before."""
        ...

    def resumptions(self) -> AsyncIterator[Resumption]:
        """Yield the newest resumption, then one for each new incarnation of the trainer."""
        ...

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait for the trainer; a line every few seconds says so. Raises PeerLost at the deadline, Refused with its reason."""
        ...

    async def wait_lost(self) -> LostPeer:
        """Return when the trainer has been silent for the heartbeat timeout (at once if it is now)."""
        ...
