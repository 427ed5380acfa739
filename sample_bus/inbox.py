"""The trainer's side of the record streams: what was received, leased, settled and committed, and how far each producer may go.
No I/O.

Invariant: a record is handed out exactly once per process, in its producer's order, and never when the position that was sought
covers it; what is received and not settled stays within the credit that was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sample_bus.credit import Credit, Stream
from sample_bus.errors import BusError
from sample_bus.position import BusPosition, StreamPosition
from sample_bus.protocols import ConsumerStatistics, Gone, Lease
from sample_bus.sample import SampleId

Place = tuple[str, int]
"""A stream: (producer, epoch)."""


class Verdict(StrEnum):
    """What became of a record that arrived."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    """Held or settled already."""
    GAP = "gap"
    """Records before it have not come: the connection was remade on the way."""
    OVERDRAWN = "overdrawn"
    """Sent without credit."""
    CLOSED = "closed"
    """Its stream is not open here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a stream stands, as its producer is told."""

    received: int
    """Sequence number expected next."""
    settled: int
    committed: int
    credit: Credit


class Inbox:
    def __init__(self, *, max_samples: int, max_bytes: int) -> None:
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._sought = BusPosition()
        self._streams: dict[Place, Stream] = {}
        self._queue: deque[Lease] = deque()
        self._leased: dict[SampleId, int] = {}
        self._accounted_before = 0
        self._settled = self._dropped = 0
        self._received = self._rejected = self._duplicates = 0

    def seek(self, position: BusPosition) -> None:
        """Forget all streams; each begins at `position` when its producer opens it."""
        self._sought = position
        self._streams.clear()
        self._queue.clear()
        self._leased.clear()

    def open_stream(self, place: Place, *, committed: int) -> Gone | None:
        """A producer opened a stream that is kept from `committed` on: go on where it stands here, or at the position sought.

        Returns what can no longer come although it was never settled.
        """
        producer, epoch = place
        for other in [key for key in self._streams if key[0] == producer and key[1] != epoch]:
            if not self._streams[other].queued:
                del self._streams[other]
        stream = self._streams.get(place)
        if stream is None:
            stream = self._streams[place] = Stream.at(self._sought.of(producer, epoch))
            kept = [one for one in self._sought.streams if one.producer != producer]
            self._sought = BusPosition(streams=tuple(kept))
        stream.is_away = False
        if committed <= stream.settled.watermark or committed <= stream.received:
            return None
        return self._give_up(place, stream, committed)

    def leave(self, producer: str) -> None:
        """A producer has left: until it opens its stream again it takes no share of the room beyond what it holds."""
        for key, stream in self._streams.items():
            stream.is_away = stream.is_away or key[0] == producer

    def standing(self, place: Place) -> Standing:
        """How far the producer is, and how far it may go: its share of the room."""
        stream = self._streams[place]
        sharing = len({key[0] for key, one in self._streams.items() if key == place or one.queued or not one.is_away})
        others = [other for key, other in self._streams.items() if key != place and key[0] == place[0]]
        credit = stream.credit(
            room_samples=max(1, self._max_samples // sharing) - sum(other.queued for other in others),
            room_bytes=self._max_bytes // sharing - sum(other.queued_bytes for other in others),
        )
        if not stream.queued and credit.room_bytes < self._max_bytes:
            credit = Credit(samples=credit.samples, room_bytes=self._max_bytes)  # so that the largest record can always come
        return Standing(received=stream.received, settled=stream.settled.num_settled, committed=stream.committed, credit=credit)

    def take(self, lease: Lease) -> Verdict:
        """A record arrived."""
        stream = self._streams.get((lease.id.producer, lease.id.epoch))
        verdict = self._verdict(stream, lease.id.seq)
        if stream is not None and verdict is Verdict.TAKEN:
            if stream.queued and stream.queued_bytes + lease.nbytes > self._max_bytes:
                return Verdict.OVERDRAWN
            stream.receive(lease.nbytes)
            self._received += 1
            self._queue.append(lease)
        return verdict

    def skip(self, place: Place, seq: int, nbytes: int) -> Verdict:
        """What arrived in a record's place is none: its credit goes back at once, and the stream goes on."""
        stream = self._streams.get(place)
        verdict = self._verdict(stream, seq)
        if verdict is Verdict.TAKEN and stream is not None:
            stream.receive(nbytes)
            stream.settle(seq, nbytes)
            self._rejected += 1
        return verdict

    def lose(self, place: Place, seq: int) -> bool:
        """The record expected next will never come: the stream goes on behind it. False if another one is expected."""
        stream = self._streams.get(place)
        if stream is None or seq != stream.received or stream.settled.covers(seq):
            return False
        stream.settled.add(seq)
        stream.received += 1
        return True

    def count_rejected(self) -> None:
        """A message without a place in any stream was refused."""
        self._rejected += 1

    def lease(self) -> Lease | None:
        if not self._queue:
            return None
        leased = self._queue.popleft()
        self._leased[leased.id] = leased.nbytes
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool) -> None:
        """Settle leased records. Raises BusError, before settling any, if one is not leased."""
        unknown = [sample_id for sample_id in ids if sample_id not in self._leased]
        if unknown or len(set(ids)) != len(ids):
            first = (unknown or list(ids))[0]
            raise BusError(f"acknowledge: {len(unknown)} of {len(ids)} ids are not leased or named twice, first {first}")
        for sample_id in ids:
            nbytes = self._leased.pop(sample_id)
            self._streams[sample_id.producer, sample_id.epoch].settle(sample_id.seq, nbytes)
        self._settled += len(ids)
        self._dropped += len(ids) if dropped else 0

    def position(self) -> BusPosition:
        """What is settled, streams included that no producer has opened since `seek`."""
        own = tuple(
            StreamPosition(producer=producer, epoch=epoch, watermark=stream.settled.watermark, beyond=stream.settled.runs())
            for (producer, epoch), stream in self._streams.items()
        )
        return BusPosition(streams=(*self._sought.streams, *own))

    def commit(self, position: BusPosition) -> list[StreamPosition]:
        """Everything that `position` covers is final. Returns the streams whose watermark moved."""
        moved = []
        for one in position.streams:
            stream = self._streams.get((one.producer, one.epoch))
            if stream is not None and one.watermark > stream.committed:
                if one.watermark > stream.settled.watermark:
                    raise BusError(f"commit: {one.producer} up to {one.watermark}, settled up to {stream.settled.watermark}")
                stream.committed = one.watermark
                moved.append(one)
        return moved

    def count_from(self, accounted: int) -> None:
        """Begin the account anew: so many records were trained or queued before."""
        self._accounted_before = accounted
        self._settled = self._dropped = 0

    def accounted(self, place: Place, next_seq: int) -> int:
        """Trained or queued, and what the producer at `place` keeps and will still send; what was dropped is left out."""
        stream = self._streams[place]
        to_come = max(0, next_seq - stream.received) - stream.num_settled_ahead
        return self._accounted_before + self._settled - self._dropped + len(self._queue) + len(self._leased) + to_come

    @property
    def dropped(self) -> int:
        return self._dropped

    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(
            received=self._received,
            queued=len(self._queue) + len(self._leased),
            queued_bytes=sum(stream.queued_bytes for stream in self._streams.values()),
            rejected=self._rejected,
            duplicates=self._duplicates,
        )

    def _give_up(self, place: Place, stream: Stream, committed: int) -> Gone | None:
        """Records from what is received to `committed` will never come."""
        first, lost = stream.received, 0
        for seq in range(first, committed):
            lost += stream.settled.add(seq)
        stream.received = committed
        if not lost:
            return None
        return Gone(producer=place[0], epoch=place[1], first=first, last=committed, num_records=lost)

    def _verdict(self, stream: Stream | None, seq: int) -> Verdict:
        if stream is None:
            return Verdict.CLOSED
        if seq == stream.received and stream.settled.covers(seq):
            stream.pass_over()
            self._duplicates += 1
            return Verdict.DUPLICATE
        if seq < stream.received:
            self._duplicates += 1
            return Verdict.DUPLICATE
        if seq > stream.received:
            return Verdict.GAP
        return Verdict.TAKEN if seq < stream.limit else Verdict.OVERDRAWN
