"""A producer's end of the bus without a network, as strict as the real one.

`Stream` is what survives the producer's process: records in order, dense numbers, the watermark of what was committed. A
`FakeProducer` is one process on it. Implements `sample_bus.protocols.Producer`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from sample_bus.closed_seat import ClosedSeat
from sample_bus.protocols import ProducerStatistics, Rejection, Resumption
from sample_bus.sample import Sample, SampleId

Item = Sample | ClosedSeat


@dataclass(slots=True)
class Stream:
    epoch: int = 1
    records: list[Item] = field(default_factory=list)
    committed: int = 0
    """Records below it are not kept any more."""
    settled: int = 0
    """Records whose credit came back."""

    def resumption(self, *, incarnation: str = "first", run_id: str = "run-1", origin_version: int = 0) -> Resumption:
        """What a trainer says that counts everything from `origin_version` on and has given nothing back."""
        return Resumption(
            origin_version=origin_version,
            accounted=len(self.records),
            incarnation=incarnation,
            run_id=run_id,
            epoch=self.epoch,
            next_seq=len(self.records),
        )


class FakeProducer:
    def __init__(self, stream: Stream, *, credit: int = 10**9, name: str = "rollouter") -> None:
        """`credit`: records that may be unsettled."""
        self.stream = stream
        self.credit = credit
        self.name = name
        self.failure: Exception | None = None
        """Raised by every offer from now on."""
        self.before_return: asyncio.Event | None = None
        """An offer whose record is stored returns only when this is set."""
        self.resumption = stream.resumption()
        self._is_dead = False
        self._waiting: deque[tuple[Item, asyncio.Future[int]]] = deque()
        self._rejections: asyncio.Queue[Rejection] = asyncio.Queue()

    async def offer(self, sample: Sample) -> SampleId:
        sample.validate()
        return await self._put(sample)

    async def close_seat(self, closed: ClosedSeat) -> SampleId:
        closed.validate()
        return await self._put(closed)

    async def stored(self, first: int = 0) -> AsyncIterator[tuple[SampleId, Item]]:
        for seq in range(max(first, self.stream.committed), len(self.stream.records)):
            await asyncio.sleep(0)
            yield SampleId(self.name, self.stream.epoch, seq), self.stream.records[seq]

    async def resumptions(self) -> AsyncIterator[Resumption]:
        yield self.resumption

    async def rejections(self) -> AsyncIterator[Rejection]:
        while True:
            yield await self._rejections.get()

    def producer_statistics(self) -> ProducerStatistics:
        stored = len(self.stream.records)
        return ProducerStatistics(
            offered=stored,
            acknowledged=self.stream.settled,
            unsettled=stored - self.stream.settled,
            bytes_sent=0,
            waiting=len(self._waiting),
            committed=self.stream.committed,
        )

    def die(self) -> None:
        """The process ends here and now: nothing more reaches the stream."""
        self._is_dead = True

    def settle(self, count: int) -> None:
        """The trainer gives the credit of `count` records back."""
        self.stream.settled += count
        self._pump()

    def reject(self, seq: int, error: str) -> Rejection:
        """The trainer's end could not decode that record."""
        rejection = Rejection(id=SampleId(self.name, self.stream.epoch, seq), error=error)
        self._rejections.put_nowait(rejection)
        return rejection

    async def _put(self, record: Item) -> SampleId:
        placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, placed))
        self._pump()
        try:
            seq = await placed
        except asyncio.CancelledError:
            self._waiting = deque(one for one in self._waiting if one[1] is not placed)
            raise
        await asyncio.sleep(0)  # durable: a death from here on finds it in the stream
        if self.before_return is not None:
            await self.before_return.wait()
        return SampleId(self.name, self.stream.epoch, seq)

    def _pump(self) -> None:
        """Numbers are given in the order of offers, as far as the credit reaches."""
        while not self._is_dead and self._waiting and len(self.stream.records) - self.stream.settled < self.credit:
            record, placed = self._waiting.popleft()
            if self.failure is not None:
                placed.set_exception(self.failure)
                continue
            placed.set_result(len(self.stream.records))
            self.stream.records.append(record)
