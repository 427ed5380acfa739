"""A bus's consumer and its producers' streams in one process, with the semantics of the real hub.

`FakeStreams` is what survives a trainer: each producer's copies. `FakeConsumer` is one trainer's end; a restarted trainer opens
another one on the same streams and seeks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import BusError
from sample_bus.feed import Feed
from sample_bus.position import BusPosition, Settled, StreamPosition
from sample_bus.protocols import ConsumerStatistics, Gone, Lease, Leased, LeasedClosure
from sample_bus.sample import Sample, SampleId

Place = tuple[str, int]


@dataclass(slots=True)
class _Copies:
    """What a producer keeps: record number `first` on."""

    first: int = 0
    records: deque[Sample | ClosedSeat] = field(default_factory=deque)

    @property
    def next_seq(self) -> int:
        return self.first + len(self.records)


class FakeStreams:
    """Producers' durable copies by (producer, epoch)."""

    def __init__(self) -> None:
        self.copies: dict[Place, _Copies] = {}
        self.consumer: FakeConsumer | None = None

    def offer(self, record: Sample | ClosedSeat, *, producer: str = "rollouter", epoch: int = 1) -> SampleId:
        """The producer's next record: durable at once, delivered if a consumer is there."""
        copies = self.copies.setdefault((producer, epoch), _Copies())
        record_id = SampleId(producer, epoch, copies.next_seq)
        copies.records.append(record)
        if self.consumer is not None:
            self.consumer.open_stream(producer, epoch)
        return record_id

    def kept(self, producer: str = "rollouter", epoch: int = 1) -> range:
        """Sequence numbers of which the producer keeps a copy."""
        copies = self.copies[producer, epoch]
        return range(copies.first, copies.next_seq)

    def lose(self, producer: str = "rollouter", epoch: int = 1) -> None:
        """The producer's disk is gone."""
        del self.copies[producer, epoch]


@dataclass(slots=True)
class _Held:
    received: int
    settled: Settled
    committed: int


class FakeConsumer:
    """Implements `sample_bus.protocols.Consumer`. Opening it takes the streams over from an earlier one."""

    def __init__(self, streams: FakeStreams, position: BusPosition | None = None) -> None:
        self._streams = streams
        self._sought = position or BusPosition()
        self._held: dict[Place, _Held] = {}
        self._queue: deque[Lease] = deque()
        self._leased: set[SampleId] = set()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._gone: Feed[Gone] = Feed()
        self._received = self._duplicates = 0
        self.settled: list[SampleId] = []
        """In the order in which they were acknowledged."""
        self.num_dropped = 0
        self.commits: list[BusPosition] = []
        streams.consumer = self

    def connect(self) -> None:
        """Every producer's newest stream opens."""
        for producer, epoch in dict(self._streams.copies.keys()).items():
            self.open_stream(producer, epoch)

    def open_stream(self, producer: str, epoch: int) -> None:
        """Take what the producer keeps and was not received here."""
        place, copies = (producer, epoch), self._streams.copies[producer, epoch]
        held = self._held.get(place)
        if held is None:
            at = self._sought.of(producer, epoch)
            self._sought = BusPosition(streams=tuple(one for one in self._sought.streams if one.producer != producer))
            settled = Settled(at.watermark)
            for first, last in at.beyond:
                settled.add_run(first, last)
            held = self._held[place] = _Held(at.watermark, settled, at.watermark)
        if copies.first > held.received:
            first, lost = held.received, sum(held.settled.add(seq) for seq in range(held.received, copies.first))
            held.received = copies.first
            if lost:
                self._gone.add(Gone(producer=producer, epoch=epoch, first=first, last=copies.first, num_records=lost))
        for seq in range(held.received, copies.next_seq):
            held.received = seq + 1
            if held.settled.covers(seq):
                self._duplicates += 1
                continue
            record, record_id = copies.records[seq - copies.first], SampleId(producer, epoch, seq)
            self._received += 1
            self._queue.append(
                Leased(id=record_id, sample=record, nbytes=record.nbytes)
                if isinstance(record, Sample)
                else LeasedClosure(id=record_id, closed=record, nbytes=100)
            )
        if self._queue:
            self._idle.clear()
            self._arrived.set()

    async def lease(self) -> Lease:
        while not self._queue:
            self._arrived.clear()
            self._idle.set()
            await self._arrived.wait()
        lease = self._queue.popleft()
        self._leased.add(lease.id)
        return lease

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        unknown = [one for one in ids if one not in self._leased]
        if unknown or len(set(ids)) != len(ids):
            raise BusError(f"acknowledge: {len(unknown)} of {len(ids)} ids are not leased or named twice")
        for one in ids:
            self._leased.discard(one)
            self._held[one.producer, one.epoch].settled.add(one.seq)
        self.settled += ids
        self.num_dropped += len(ids) if dropped else 0

    def position(self) -> BusPosition:
        own = tuple(
            StreamPosition(producer=producer, epoch=epoch, watermark=held.settled.watermark, beyond=held.settled.runs())
            for (producer, epoch), held in self._held.items()
        )
        return BusPosition(streams=(*self._sought.streams, *own))

    def seek(self, position: BusPosition) -> None:
        self._sought = position
        self._held.clear()
        self._queue.clear()
        self._leased.clear()
        self.connect()

    def commit(self, position: BusPosition) -> None:
        self.commits.append(position)
        for stream in position.streams:
            held = self._held.get((stream.producer, stream.epoch))
            if held is None or stream.watermark <= held.committed:
                continue
            if stream.watermark > held.settled.watermark:
                raise BusError(f"commit: {stream.producer} up to {stream.watermark}, settled up to {held.settled.watermark}")
            held.committed = stream.watermark
            copies = self._streams.copies.get((stream.producer, stream.epoch))
            while copies is not None and copies.records and copies.first < stream.watermark:
                copies.records.popleft()
                copies.first += 1

    def gone(self) -> AsyncIterator[Gone]:
        return self._gone.follow()

    def consumer_statistics(self) -> ConsumerStatistics:
        queued = len(self._queue) + len(self._leased)
        return ConsumerStatistics(
            received=self._received, queued=queued, queued_bytes=0, rejected=0, duplicates=self._duplicates
        )

    async def idle(self) -> None:
        """Return when everything that came has been leased and another lease waits."""
        await self._idle.wait()
