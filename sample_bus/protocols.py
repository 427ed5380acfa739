"""The seams of the bus: what a producer, a consumer and a control client may rely on, whatever the transport.

Delivery: `offer` returns once the consumer's side holds the sample; a sample is handed to `lease` exactly once per consumer
process, in the order of arrival; `acknowledge` settles it and gives its credit back. Nothing is dropped to make room:
when the consumer's limit in samples or bytes is reached, `offer` waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sample_bus.messages import Message
from sample_bus.peers import LostPeer, PeerState
from sample_bus.sample import Sample, SampleId

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A sample in the trainer's hands, until acknowledged."""

    id: SampleId
    sample: Sample
    nbytes: int
    """Bytes on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the consumer already accounts for when a producer connects, in samples since `origin_version`."""

    origin_version: int
    accounted: int
    """Received and not dropped: trained or queued."""
    incarnation: str
    dropped: int = 0
    """Dropped until then, already left out of `accounted`: only drops beyond it are to be refunded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatistics:
    offered: int
    acknowledged: int
    """Settled by the trainer."""
    unsettled: int
    bytes_sent: int
    waiting: int
    """Offers that wait for credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    received: int
    queued: int
    """Received, not yet acknowledged (leased ones included)."""
    queued_bytes: int
    rejected: int
    """Messages that did not decode; quarantined."""
    duplicates: int


class Producer(Protocol):
    async def offer(self, sample: Sample) -> SampleId:
        """Hand over a sample; waits while the consumer is full.

        Raises SampleTooLarge, WireError (inconsistent sample), PeerLost, Ended.
        """
        ...

    def producer_statistics(self) -> ProducerStatistics: ...


class Consumer(Protocol):
    async def lease(self) -> Leased:
        """Next sample in order of arrival; waits for one."""
        ...

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        """Settle leased samples, in any order: trained, or dropped. Their credit returns to the producer.

        Raises BusError, before settling any, if one is not leased.
        """
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


class Hub(Consumer, ControlServer, Protocol):
    """The trainer's end. All methods belong to the event loop in which it was opened."""

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    @property
    def rollouter(self) -> str | None:
        """Name of the rollouter that is connected."""
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
        """Say from where admission counts, and how many samples since then are accounted for by an earlier process."""
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
