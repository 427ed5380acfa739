"""How far a trainer has settled the streams: what a checkpoint stores, and from where producers are asked to send again. Pure.

Invariant: a position names exactly the ids whose effect (trained, or dropped for a reason) it covers. Its size is bounded by
the number of unsettled samples, not by the length of the run: per producer one watermark and the runs of ids settled beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sample_bus.errors import WireError
from sample_bus.sample import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    producer: str
    epoch: int
    watermark: int
    """Every sequence number below it is settled."""
    beyond: tuple[tuple[int, int], ...] = ()
    """Runs [first, last) of settled numbers above it, rising, with gaps between them."""

    @property
    def num_settled(self) -> int:
        return self.watermark + sum(last - first for first, last in self.beyond)

    def covers(self, seq: int) -> bool:
        return seq < self.watermark or any(first <= seq < last for first, last in self.beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusPosition:
    streams: tuple[StreamPosition, ...] = ()

    def of(self, producer: str, epoch: int) -> StreamPosition:
        """Where that stream stands; at its beginning if it is not known."""
        for stream in self.streams:
            if stream.producer == producer and stream.epoch == epoch:
                return stream
        return StreamPosition(producer=producer, epoch=epoch, watermark=0)

    def covers(self, sample_id: SampleId) -> bool:
        return self.of(sample_id.producer, sample_id.epoch).covers(sample_id.seq)

    def as_plain(self) -> list[dict[str, Any]]:
        """For JSON and msgpack."""
        return [
            {
                "producer": stream.producer,
                "epoch": stream.epoch,
                "watermark": stream.watermark,
                "beyond": [list(run) for run in stream.beyond],
            }
            for stream in self.streams
        ]

    @classmethod
    def from_plain(cls, plain: Iterable[Mapping[str, Any]]) -> BusPosition:
        """What `as_plain` gave. Raises WireError for anything else."""
        try:
            return cls(
                streams=tuple(
                    StreamPosition(
                        producer=str(one["producer"]),
                        epoch=int(one["epoch"]),
                        watermark=int(one["watermark"]),
                        beyond=tuple((int(first), int(last)) for first, last in one["beyond"]),
                    )
                    for one in plain
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"bus position: {type(error).__name__} {error}") from error


@dataclass(slots=True)
class Settled:
    """The settled ids of one stream, as they are settled in any order."""

    watermark: int = 0
    _starts: dict[int, int] = field(default_factory=dict)
    """First of each run beyond the watermark to its end."""
    _ends: dict[int, int] = field(default_factory=dict)
    """End of each run to its first."""

    def add(self, seq: int) -> bool:
        """Settle `seq`; False if it was settled already."""
        return self.add_run(seq, seq + 1)

    def covers(self, seq: int) -> bool:
        if seq < self.watermark:
            return True
        return any(first <= seq < last for first, last in self._starts.items())

    def add_run(self, first: int, last: int) -> bool:
        """Settle [first, last), which must be wholly new; False, and nothing changes, if it starts in settled ground."""
        if first >= last:
            return True
        if first < self.watermark or first in self._starts or (self._starts and self.covers(first)):
            return False
        if first in self._ends:
            first = self._ends.pop(first)
            del self._starts[first]
        if last in self._starts:
            end = self._starts.pop(last)
            del self._ends[end]
            last = end
        if first == self.watermark:
            self.watermark = last
        else:
            self._starts[first] = last
            self._ends[last] = first
        return True

    @property
    def num_settled(self) -> int:
        return self.watermark + sum(last - first for first, last in self._starts.items())

    def runs(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._starts.items()))
