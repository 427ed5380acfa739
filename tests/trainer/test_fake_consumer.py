"""The fake consumer is as good as the hub: both pass the same tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import BusError
from sample_bus.position import BusPosition
from sample_bus.protocols import Consumer, Leased, LeasedClosure, Link
from sample_bus.sample import Sample, SampleId
from tests.fakes.fake_consumer import FakeConsumer, FakeStreams
from tests.fakes.samples import make_closed, make_sample
from tests.sample_bus.ends import hub_at, link_to, soon, until


class Bus(Protocol):
    """A producer and a consumer that can be restarted."""

    consumer: Consumer

    async def offer(self, record: Sample | ClosedSeat) -> SampleId: ...

    async def restart(self, position: BusPosition) -> None:
        """Another consumer takes over, from `position` on."""
        ...

    async def lose_stream(self) -> None:
        """The producer is replaced by one that has lost its disk."""
        ...

    async def freed(self, watermark: int) -> None:
        """Return once the producer has freed everything below `watermark`."""
        ...


class FakeBus:
    def __init__(self) -> None:
        self.streams = FakeStreams()
        self._epoch = 1
        self.consumer: Consumer = FakeConsumer(self.streams)

    async def offer(self, record: Sample | ClosedSeat) -> SampleId:
        return self.streams.offer(record, epoch=self._epoch)

    async def restart(self, position: BusPosition) -> None:
        fake = FakeConsumer(self.streams)
        fake.seek(position)
        self.consumer = fake

    async def lose_stream(self) -> None:
        self.streams.lose(epoch=self._epoch)
        self._epoch += 1

    async def freed(self, watermark: int) -> None:
        assert self.streams.kept().start == watermark


class RealBus:
    def __init__(self, directory: Path) -> None:
        self._address = f"ipc://{directory}/bus"
        self._hub, self._ends = AsyncExitStack(), AsyncExitStack()
        self._directory = directory
        self._life = self._disks = 0
        self.link: Link
        self.consumer: Consumer

    async def __aenter__(self) -> RealBus:
        await self.restart(BusPosition())
        await self._connect()
        return self

    async def _connect(self) -> None:
        spool = self._directory / f"spool {self._disks}"
        self.link = await self._ends.enter_async_context(link_to(self._address, on_lost="wait", spool_dir=spool))
        await self.link.wait_connected(30)

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()
        await self._hub.aclose()

    async def offer(self, record: Sample | ClosedSeat) -> SampleId:
        offering: Awaitable[SampleId] = self.link.offer(record) if isinstance(record, Sample) else self.link.close_seat(record)
        return await soon(offering)

    async def restart(self, position: BusPosition) -> None:
        await self._hub.aclose()
        self._life += 1
        hub = await self._hub.enter_async_context(hub_at(self._address, incarnation=f"life {self._life}"))
        hub.seek(position)
        self.consumer = hub

    async def lose_stream(self) -> None:
        await self._ends.aclose()
        self._disks += 1
        await self._connect()

    async def freed(self, watermark: int) -> None:
        await until(lambda: self.link.producer_statistics().committed >= watermark)
        assert self.link.producer_statistics().committed == watermark


@pytest.fixture(params=["fake", "hub"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "fake":
        yield FakeBus()
        return
    async with RealBus(tmp_path) as real:
        yield real


def _sample(number: int) -> Sample:
    return make_sample(group_id=f"g{number}", group_size=2)


async def _lease(bus: Bus, count: int) -> list[SampleId]:
    return [(await soon(bus.consumer.lease())).id for _ in range(count)]


async def test_records_of_both_kinds_come_in_order(bus: Bus) -> None:
    ids = [await bus.offer(_sample(0)), await bus.offer(make_closed(group_id="g1", group_size=2)), await bus.offer(_sample(2))]
    leases = [await soon(bus.consumer.lease()) for _ in ids]
    assert [lease.id for lease in leases] == ids
    assert [type(lease) for lease in leases] == [Leased, LeasedClosure, Leased]
    assert [one.seq for one in ids] == [0, 1, 2]


async def test_a_restarted_consumer_gets_what_its_position_does_not_cover(bus: Bus) -> None:
    ids = [await bus.offer(_sample(number)) for number in range(6)]
    await _lease(bus, 6)
    bus.consumer.acknowledge([ids[0], ids[3]])
    bus.consumer.acknowledge([ids[1]], dropped=True)
    position = bus.consumer.position()
    bus.consumer.acknowledge([ids[2]])
    assert [position.covers(one) for one in ids] == [True, True, False, True, False, False]
    bus.consumer.commit(position)
    await bus.freed(2)
    await bus.restart(position)
    assert await _lease(bus, 3) == [ids[2], ids[4], ids[5]]
    bus.consumer.acknowledge([ids[2]])
    assert bus.consumer.position().of("rollouter", ids[0].epoch).watermark == 4


async def test_what_was_committed_and_is_not_covered_any_more_is_reported_as_gone(bus: Bus) -> None:
    ids = [await bus.offer(_sample(number)) for number in range(4)]
    await _lease(bus, 4)
    bus.consumer.acknowledge(ids[:1])
    older = bus.consumer.position()
    bus.consumer.acknowledge(ids[1:3])
    bus.consumer.commit(bus.consumer.position())
    await bus.freed(3)
    await bus.restart(older)
    assert await _lease(bus, 1) == ids[3:]
    gone = await soon(anext(aiter(bus.consumer.gone())))
    assert (gone.producer, gone.epoch, gone.first, gone.last, gone.num_records) == ("rollouter", ids[0].epoch, 1, 3, 2)
    assert bus.consumer.position().covers(ids[2])


@pytest.mark.parametrize("wrong", [lambda one: [one, one], lambda one: [one, one._replace(seq=99)]])
async def test_settling_what_is_not_leased_settles_nothing(bus: Bus, wrong: Callable[[SampleId], list[SampleId]]) -> None:
    one = await bus.offer(_sample(0))
    await _lease(bus, 1)
    with pytest.raises(BusError, match="not leased or named twice"):
        bus.consumer.acknowledge(wrong(one))
    assert not bus.consumer.position().covers(one)


async def test_a_lease_that_is_cancelled_takes_nothing(bus: Bus) -> None:
    waiting = asyncio.ensure_future(bus.consumer.lease())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    one = await bus.offer(_sample(0))
    assert await _lease(bus, 1) == [one]


async def test_the_newest_stream_of_a_producer_is_the_last_of_its_own_in_the_position(bus: Bus) -> None:
    """What `Intake.note_streams` relies on. The lost stream's records stay leased."""
    old = [await bus.offer(_sample(0)), await bus.offer(_sample(1))]
    await _lease(bus, 2)
    await bus.lose_stream()
    new = await bus.offer(_sample(2))
    assert (await _lease(bus, 1), new.seq) == ([new], 0)
    streams = [(one.producer, one.epoch) for one in bus.consumer.position().streams]
    assert streams == [("rollouter", old[0].epoch), ("rollouter", new.epoch)]
    bus.consumer.acknowledge(old, dropped=True)
