"""The trainer's side of the sample streams: what was received, leased and settled, and what each producer may send. No I/O.

Invariant: a sample is handed out exactly once, in the order of arrival; what is received and not settled never exceeds
`max_samples` and `max_bytes`, over all streams together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sample_bus.credit import Credit, Stream
from sample_bus.errors import BusError
from sample_bus.protocols import ConsumerStatistics, Leased
from sample_bus.sample import SampleId

Place = tuple[str, int]
"""A stream: (producer, epoch)."""


class Verdict(StrEnum):
    """What became of a sample that arrived."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    """Held or settled already."""
    GAP = "gap"
    """Samples before it have not come: the connection was remade on the way."""
    OVERDRAWN = "overdrawn"
    """Sent without credit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a stream stands, as its producer is told."""

    received: int
    """Sequence number expected next."""
    settled: int
    credit: Credit


class Inbox:
    def __init__(self, *, max_samples: int, max_bytes: int) -> None:
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._streams: dict[Place, Stream] = {}
        self._queue: deque[Leased] = deque()
        self._leased: dict[SampleId, int] = {}
        self._accounted_before = 0
        self._settled = self._dropped = 0
        self._received = self._rejected = self._duplicates = 0

    def open_stream(self, place: Place, *, first_unreceived: int, bytes_before: int) -> None:
        """A producer said hello: go on where its stream stands here, or begin where it says."""
        self._streams = {key: stream for key, stream in self._streams.items() if stream.queued or key == place}
        stream = self._streams.setdefault(place, Stream(first_unreceived, bytes_before))
        if first_unreceived > stream.received:
            stream.received, stream.received_bytes = first_unreceived, bytes_before

    def position(self, place: Place) -> Position:
        """How far the producer is, and how far it may go: the room that all streams share, less what other streams hold."""
        stream = self._streams[place]
        others = [other for key, other in self._streams.items() if key != place]
        credit = stream.credit(
            room_samples=self._max_samples - sum(other.queued for other in others),
            room_bytes=self._max_bytes - sum(other.queued_bytes for other in others),
        )
        return Position(received=stream.received, settled=stream.settled, credit=credit)

    def take(self, leased: Leased) -> Verdict:
        """A sample arrived on an open stream."""
        place = (leased.id.producer, leased.id.epoch)
        stream = self._streams[place]
        verdict = self._verdict(stream, leased.id.seq)
        if verdict is Verdict.TAKEN and not self.position(place).credit.allows(
            leased.id.seq, stream.received_bytes, leased.nbytes
        ):
            verdict = Verdict.OVERDRAWN
        if verdict is Verdict.TAKEN:
            stream.receive(leased.nbytes)
            self._received += 1
            self._queue.append(leased)
        return verdict

    def skip(self, place: Place, seq: int, nbytes: int) -> Verdict:
        """What arrived in a sample's place is none: its credit goes back at once, and the stream goes on."""
        stream = self._streams[place]
        verdict = self._verdict(stream, seq)
        if verdict is Verdict.TAKEN:
            stream.receive(nbytes)
            stream.settle(nbytes)
            self._rejected += 1
        return verdict

    def count_rejected(self) -> None:
        """A message without a place in any stream was refused."""
        self._rejected += 1

    def lease(self) -> Leased | None:
        if not self._queue:
            return None
        leased = self._queue.popleft()
        self._leased[leased.id] = leased.nbytes
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool) -> None:
        """Settle leased samples. Raises BusError, before settling any, if one is not leased."""
        unknown = [sample_id for sample_id in ids if sample_id not in self._leased]
        if unknown or len(set(ids)) != len(ids):
            first = (unknown or list(ids))[0]
            raise BusError(f"acknowledge: {len(unknown)} of {len(ids)} ids are not leased or named twice, first {first}")
        for sample_id in ids:
            self._streams[sample_id.producer, sample_id.epoch].settle(self._leased.pop(sample_id))
        self._settled += len(ids)
        self._dropped += len(ids) if dropped else 0

    def count_from(self, accounted: int) -> None:
        """Begin the account anew: so many samples were trained or queued before."""
        self._accounted_before = accounted
        self._settled = self._dropped = 0

    @property
    def accounted(self) -> int:
        """Trained or queued; what was dropped is left out."""
        return self._accounted_before + self._settled - self._dropped + len(self._queue) + len(self._leased)

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

    def _verdict(self, stream: Stream, seq: int) -> Verdict:
        if seq < stream.received:
            self._duplicates += 1
            return Verdict.DUPLICATE
        return Verdict.TAKEN if seq == stream.received else Verdict.GAP
