"""Connections that break: both ends find each other again by themselves, with back-off, and the stream has no gap."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from sample_bus.peers import PeerState
from tests.sample_bus.conformance.brokers import Broker
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import sample, task_of, tasks
from tests.sample_bus.conformance.remote import remote
from tests.sample_bus.ends import soon, until

MAX_ATTEMPTS_PER_S = 40
"""Far above any back-off's, far below a loop without one (thousands)."""


async def test_trainer_that_comes_and_goes_finds_its_producer_each_time(place: Place) -> None:
    offered = 0
    async with place.link() as link:
        resumptions = link.resumptions()
        for life in range(4):
            async with place.hub(incarnation=f"life {life}") as hub:
                assert (await soon(anext(resumptions))).incarnation == f"life {life}"
                again = [await soon(hub.lease()) for _ in range(offered)]
                await soon(asyncio.gather(*(link.offer(sample(offered + n)) for n in range(3))))
                offered += 3
                again += [await soon(hub.lease()) for _ in range(3)]
                assert [task_of(lease) for lease in again] == tasks(range(offered))
            await until(lambda: link.peer_state is not PeerState.CONNECTED)


async def test_stopped_trainer_is_taken_up_again_when_it_goes_on(place: Place) -> None:
    async with remote(place, "hub", "only") as hub, place.link(heartbeat_timeout_s=0.8, on_lost="wait") as link:
        await soon(link.wait_connected(30))
        await soon(link.offer(sample(0)))
        hub.signal(signal.SIGSTOP)
        await soon(link.wait_lost())
        offer = asyncio.create_task(link.offer(sample(1)))
        hub.signal(signal.SIGCONT)
        await soon(offer)
        assert await hub.tasks(2) == tasks(range(2))
        await until(lambda: link.peer_state is PeerState.CONNECTED)


async def test_stopped_producer_is_taken_up_again_when_it_goes_on(place: Place) -> None:
    async with place.hub(heartbeat_timeout_s=0.8, on_lost="wait") as hub, remote(place, "link", "rollouter") as producer:
        await producer.do("offer", numbers=[0])
        losses = hub.rollouter_lost()
        producer.signal(signal.SIGSTOP)
        await soon(anext(losses))
        producer.signal(signal.SIGCONT)
        await producer.do("offer", numbers=[1])
        assert [task_of(await soon(hub.lease())) for _ in range(2)] == tasks(range(2))


async def test_attempts_to_connect_are_spaced_while_nobody_answers(place: Place) -> None:
    """A peer that closes every connection at once is not hammered."""
    accepted = 0

    async def slam(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(slam, sock=listener)
    async with server:
        dead_end = place.at_port(listener.getsockname()[1])
        async with dead_end.link() as link:
            await until(lambda: accepted > 0)
            await asyncio.sleep(3)
            assert link.peer_state is PeerState.CONNECTING
            assert 1 <= accepted <= 3 * MAX_ATTEMPTS_PER_S


@pytest.mark.parametrize("erased", [False, True])
async def test_killed_broker_that_comes_back_is_taken_up_by_both_ends(broker: Broker, erased: bool) -> None:
    """B134: a blocked read neither hangs nor dies; pending entries come once; nothing offered is lost, whatever the broker has
    lost, while both ends live."""
    place = broker.place
    async with place.hub(max_queued_samples=16) as hub, place.link() as link:
        found: list[str] = []
        for life in range(4):
            offers = [asyncio.create_task(link.offer(sample(20 * life + number))) for number in range(20)]
            while len(found) < 20 * life + 10:
                lease = await soon(hub.lease())
                found.append(task_of(lease))
                hub.acknowledge([lease.id])
            await broker.kill()
            if erased:
                broker.erase()
            await asyncio.sleep(0.2)
            await broker.restart()
            while len(found) < 20 * life + 20:
                lease = await soon(hub.lease())
                found.append(task_of(lease))
                hub.acknowledge([lease.id])
            await soon(asyncio.gather(*offers))
            if life % 2:
                hub.commit(hub.position())
        assert found == tasks(range(80))
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 80)


async def test_trainer_that_closes_before_it_has_begun_leaves_nothing_at_the_broker(broker: Broker) -> None:
    """Its successor would wait until the lock expires."""
    for life in range(10):
        async with broker.place.hub(incarnation=f"life {life}"):
            pass
        assert broker.command("KEYS", "*") == []


async def test_broker_that_lost_everything_gets_the_living_producers_copies_again(broker: Broker) -> None:
    """B134: restarted without its data; the group and the stream are made again."""
    place = broker.place
    async with place.hub() as hub, place.link() as link:
        for number in range(10):
            await soon(link.offer(sample(number)))
        leases = [await soon(hub.lease()) for _ in range(4)]
        hub.acknowledge([lease.id for lease in leases])
        await broker.kill()
        broker.erase()
        await broker.restart()
        await soon(link.offer(sample(10)))
        rest = [await soon(hub.lease()) for _ in range(7)]
        assert [task_of(lease) for lease in rest] == tasks(range(4, 11))
        hub.acknowledge([lease.id for lease in rest])
        assert hub.consumer_statistics().queued == 0


async def test_dead_broker_is_named_to_both_ends(broker: Broker) -> None:
    place = broker.place
    async with (
        place.hub(heartbeat_timeout_s=0.8, on_lost="wait") as hub,
        place.link(heartbeat_timeout_s=0.8, on_lost="wait") as link,
    ):
        await soon(link.wait_connected(30))
        losses = hub.rollouter_lost()
        await broker.kill()
        assert (await soon(link.wait_lost())).silent_s >= 0.5
        assert (await soon(anext(losses))).name == "rollouter"
        await broker.restart()
        await soon(link.offer(sample(0)))
        assert task_of(await soon(hub.lease())) == "rollouter-0"
