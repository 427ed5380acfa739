"""Records that cannot be made durable: offers wait, nothing is lost or torn, and all goes on when the cause is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sample_bus.errors import BusError
from tests.sample_bus.conformance.brokers import Broker
from tests.sample_bus.conformance.disks import Disk
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import sample, task_of, tasks
from tests.sample_bus.conformance.remote import remote
from tests.sample_bus.ends import soon, until

BLOCKED = "records cannot be made durable, offers wait"
UNBLOCKED = "records can be made durable again"


def problems_in(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the log says of a store that was blocked; and that it said when it no longer was."""
    events = [line["event"] for line in lines]
    assert events.count(UNBLOCKED) == 1
    return [line["problem"] for line in lines if line["event"] == BLOCKED]


# ── zmq: the producer's disk ─────────────────────────────────────────────────────────────────────────────────────────


async def test_producer_whose_files_may_not_grow_waits_and_goes_on_when_they_may(zmq_place: Place) -> None:
    """Disk full, as the system says it to one process."""
    async with zmq_place.hub() as hub, remote(zmq_place, "link", "rollouter") as producer:
        await producer.do("offer", numbers=[0, 1], size=1000)
        await producer.do("limit_files", num_bytes=30_000)
        await producer.do("start_offers", numbers=list(range(2, 12)), size=1000)
        found = [await soon(hub.lease()) for _ in range(2)]
        await asyncio.sleep(0.5)
        offered = (await producer.do("num_offered"))["number"]
        assert offered < 10
        await producer.do("limit_files", num_bytes=-1)
        found += [await soon(hub.lease()) for _ in range(10)]
        assert [task_of(lease) for lease in found] == tasks(range(12))
        assert len((await producer.do("finish_offers"))["ids"]) == 10


async def test_producer_killed_while_its_files_may_not_grow_lost_nothing_that_it_offered(zmq_place: Place) -> None:
    async with zmq_place.hub() as hub:
        async with remote(zmq_place, "link", "rollouter") as producer:
            await producer.do("offer", numbers=[0, 1], size=1000)
            await producer.do("limit_files", num_bytes=25_000)
            await producer.do("start_offers", numbers=list(range(2, 12)), size=1000)
            await asyncio.sleep(0.3)
            offered = 2 + (await producer.do("num_offered"))["number"]
            await producer.kill()
        async with zmq_place.link() as link:
            await soon(link.offer(sample(100)))
            found: list[str] = []
            while not found or found[-1] != "rollouter-100":
                found.append(task_of(await soon(hub.lease())))
            assert found[:-1] == tasks(range(len(found) - 1))
            assert offered <= len(found) - 1 < 12


async def test_full_disk_holds_offers_until_there_is_room_again(zmq_place: Place, disk: Disk) -> None:
    """ENOSPC from the file system itself."""
    async with zmq_place.hub() as hub, zmq_place.link(spool_dir=disk.path / "spool") as link:
        await soon(link.offer(sample(0, size=1000)))
        with capture_logs() as lines:
            disk.fill()
            offers = [asyncio.create_task(link.offer(sample(number, size=4000))) for number in range(1, 6)]
            await asyncio.sleep(0.5)
            assert not any(offer.done() for offer in offers[1:])
            disk.free()
            await soon(asyncio.gather(*offers))
        assert any("No space left" in problem for problem in problems_in(lines))
        assert [task_of(await soon(hub.lease())) for _ in range(6)] == tasks(range(6))


async def test_directory_that_cannot_be_written_is_an_error_that_names_it(zmq_place: Place, read_only: Path) -> None:
    async with zmq_place.hub() as hub, zmq_place.link(spool_dir=read_only / "spool") as link:
        with pytest.raises(BusError, match=str(read_only)):
            await soon(link.offer(sample(0)))
        assert hub.consumer_statistics().received == 0


# ── redis: the broker's memory and role ──────────────────────────────────────────────────────────────────────────────


async def test_broker_out_of_memory_holds_offers_until_it_has_room_again(broker: Broker) -> None:
    place = broker.place
    async with place.hub() as hub, place.link() as link:
        await soon(link.offer(sample(0)))
        with capture_logs() as lines:
            broker.configure("maxmemory", "1")
            offers = [asyncio.create_task(link.offer(sample(number))) for number in range(1, 8)]
            await asyncio.sleep(0.7)
            assert not any(offer.done() for offer in offers)
            broker.configure("maxmemory", "0")
            await soon(asyncio.gather(*offers))
        assert any("OOM" in problem or "memory" in problem for problem in problems_in(lines))
        assert [task_of(await soon(hub.lease())) for _ in range(8)] == tasks(range(8))


async def test_broker_that_became_a_replica_holds_offers_until_it_is_a_master_again(broker: Broker) -> None:
    """READONLY."""
    place = broker.place
    async with place.hub() as hub, place.link() as link:
        await soon(link.offer(sample(0)))
        with capture_logs() as lines:
            broker.command("REPLICAOF", "127.0.0.1", "1")
            offers = [asyncio.create_task(link.offer(sample(number))) for number in range(1, 8)]
            await asyncio.sleep(0.7)
            assert not any(offer.done() for offer in offers)
            broker.command("REPLICAOF", "NO", "ONE")
            await soon(asyncio.gather(*offers))
        assert any("read only" in problem.lower() or "READONLY" in problem for problem in problems_in(lines))
        leases = [await soon(hub.lease()) for _ in range(8)]
        assert [task_of(lease) for lease in leases] == tasks(range(8))
        hub.acknowledge([lease.id for lease in leases])
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 8)


async def test_producer_killed_while_the_broker_has_no_memory_lost_nothing_that_it_offered(broker: Broker) -> None:
    place = broker.place
    async with place.hub() as hub:
        async with remote(place, "link", "rollouter") as producer:
            await producer.do("offer", numbers=[0, 1, 2])
            broker.configure("maxmemory", "1")
            await producer.do("start_offers", numbers=[3, 4, 5])
            await asyncio.sleep(0.3)
            assert (await producer.do("num_offered"))["number"] == 0
            await producer.kill()
        broker.configure("maxmemory", "0")
        async with place.link() as link:
            await soon(link.offer(sample(100)))
            found = [task_of(await soon(hub.lease())) for _ in range(4)]
            assert found == [*tasks(range(3)), "rollouter-100"]
