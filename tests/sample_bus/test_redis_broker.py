"""The bus on a real redis-server that dies, comes back, loses things, is full, read-only or slow."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sample_bus.errors import AddressInUse, BusError, NotDurable, PeerLost
from sample_bus.peers import PeerState
from sample_bus.position import BusPosition
from sample_bus.protocols import Hub, Link
from sample_bus.sample import SampleId
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import HANG_S, hub_at, link_to, soon, until
from tests.sample_bus.redis_server import RedisServer, redis_server

STREAM = "headrace:run:run-1:s:rollouter"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def volatile() -> Iterator[RedisServer]:
    with redis_server(durable=False) as running:
        yield running


def hub_on(server: RedisServer, **changes: Any) -> Any:
    return hub_at(server.address, **{"transport": "redis", "on_lost": "wait", **changes})


def link_on(server: RedisServer, *, name: str = "rollouter", **changes: Any) -> Any:
    return link_to(server.address, name=name, **{"transport": "redis", "on_lost": "wait", **changes})


@asynccontextmanager
async def ends(server: RedisServer, **changes: Any) -> AsyncIterator[tuple[Hub, Link]]:
    async with hub_on(server, **changes) as hub, link_on(server, **changes) as link:
        await link.wait_connected(HANG_S)
        yield hub, link


async def offer(link: Link, first: int, last: int) -> list[SampleId]:
    return [await soon(link.offer(make_sample(task_id=f"task-{number}"))) for number in range(first, last)]


async def leased(hub: Hub, number: int) -> list[SampleId]:
    return [(await soon(hub.lease())).id for _ in range(number)]


async def count(server: RedisServer) -> int:
    return int(await asyncio.to_thread(server.command, "XLEN", STREAM))


async def test_committed_records_are_deleted_and_others_are_not(server: RedisServer) -> None:
    async with ends(server) as (hub, link):
        ids = await offer(link, 0, 6)
        assert await leased(hub, 6) == ids
        hub.acknowledge([ids[0], ids[1], ids[2], ids[4]])
        hub.commit(hub.position())
        await soon(_until_left(server, 3))
        hub.acknowledge([ids[3], ids[5]])
        hub.commit(hub.position())
        await soon(_until_left(server, 0))
        await until(lambda: link.producer_statistics().committed == 6)
    assert server.command("XPENDING", STREAM, "trainer")["pending"] == 0


async def _until_left(server: RedisServer, number: int) -> None:
    while await count(server) != number:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def test_an_idle_stream_outlasts_the_socket_timeout(server: RedisServer) -> None:
    """B133: the read that blocks longer than any timeout of its socket surfaces no error."""
    async with ends(server, heartbeat_timeout_s=1.0) as (hub, link):
        await offer(link, 0, 1)
        await leased(hub, 1)
        await asyncio.sleep(6)
        assert link.peer_state is PeerState.CONNECTED
        ids = await offer(link, 1, 2)
        assert await leased(hub, 1) == ids


async def test_a_server_killed_and_restarted_in_traffic_costs_nothing(server: RedisServer) -> None:
    """B134: with its log kept."""
    async with ends(server) as (hub, link):
        for round_ in range(3):
            ids = await offer(link, 10 * round_, 10 * round_ + 5)
            offering = asyncio.create_task(offer(link, 10 * round_ + 5, 10 * round_ + 10))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            ids += await soon(offering)
            assert await leased(hub, 10) == ids
            hub.acknowledge(ids)
            hub.commit(hub.position())
        await soon(_until_left(server, 0))
        assert hub.consumer_statistics().rejected == 0


async def test_a_server_that_forgets_everything_gets_it_again(volatile: RedisServer) -> None:
    """B134: without persistence; the group is made again, and what the trainer had not received is offered again."""
    async with ends(volatile, redis_allow_volatile=True, max_queued_samples=4) as (hub, link):
        ids = await offer(link, 0, 4)
        assert await leased(hub, 4) == ids
        hub.acknowledge(ids[:3])
        ids += await offer(link, 4, 7)
        await asyncio.to_thread(volatile.kill)
        await asyncio.to_thread(volatile.start)
        assert await leased(hub, 3) == ids[4:]
        hub.acknowledge(ids[3:])
        more = await offer(link, 7, 9)
        assert await leased(hub, 2) == more
        assert [one.epoch for one in more] == [ids[0].epoch] * 2


async def test_a_trainer_that_restarts_reads_its_pending_entries_first(server: RedisServer) -> None:
    async with link_on(server) as link:
        async with hub_on(server) as hub:
            await link.wait_connected(HANG_S)
            ids = await offer(link, 0, 8)
            assert await leased(hub, 5) == ids[:5]
            hub.acknowledge(ids[:2])
            position = hub.position()
        async with hub_on(server, incarnation="second") as hub:
            hub.seek(position)
            assert await leased(hub, 6) == ids[2:]
            ids += await offer(link, 8, 10)
            assert await leased(hub, 2) == ids[8:]
            assert hub.consumer_statistics().rejected == 0


async def test_entries_pending_under_another_consumer_are_claimed(server: RedisServer) -> None:
    """B134, B138: on a real server."""
    async with link_on(server) as link:
        async with hub_on(server) as hub:
            await link.wait_connected(HANG_S)
            ids = await offer(link, 0, 3)
            await leased(hub, 3)
        server.command("XCLAIM", STREAM, "trainer", "stranger", "0", f"{ids[1].epoch}-2", f"{ids[2].epoch}-3")
        async with hub_on(server, incarnation="second") as hub:
            hub.seek(BusPosition())
            assert await leased(hub, 3) == ids
        consumers = {row[1]: row[3] for row in server.command("XINFO", "CONSUMERS", STREAM, "trainer")}
        assert consumers[b"stranger"] == 0
        assert consumers[b"trainer"] == 3


async def test_entries_that_somebody_deleted_are_counted_as_lost(server: RedisServer) -> None:
    """B132: a trimmed stream is no nil and no hang; its producer is told which records will never be trained."""
    async with link_on(server) as link:
        async with hub_on(server) as hub:
            await link.wait_connected(HANG_S)
            ids = await offer(link, 0, 5)
            await leased(hub, 5)
        server.command("XDEL", STREAM, f"{ids[1].epoch}-2", f"{ids[3].epoch}-4")
        async with hub_on(server, incarnation="second") as hub:
            hub.seek(BusPosition())
            assert await leased(hub, 3) == [ids[0], ids[2], ids[4]]
            assert hub.consumer_statistics().rejected == 0
            gone, rejections = hub.gone(), link.rejections()
            assert [(await soon(anext(gone))).first for _ in range(2)] == [1, 3]
            told = [await soon(anext(rejections)) for _ in range(2)]
            assert {one.id for one in told} == {ids[1], ids[3]}
            assert all(one.lost for one in told)


async def test_a_group_that_was_destroyed_is_made_again(server: RedisServer) -> None:
    """B134."""
    async with ends(server) as (hub, link):
        ids = await offer(link, 0, 2)
        assert await leased(hub, 2) == ids
        server.command("XGROUP", "DESTROY", STREAM, "trainer")
        ids = await offer(link, 2, 4)
        assert await leased(hub, 2) == ids


@pytest.mark.parametrize(
    ("trouble", "cure"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0")),
    ],
    ids=["out of memory", "read-only", "without its replicas"],
)
async def test_a_server_that_takes_no_writes_holds_offers_back_and_loses_none(
    server: RedisServer, trouble: tuple[str, ...], cure: tuple[str, ...]
) -> None:
    async with ends(server) as (hub, link):
        ids = await offer(link, 0, 2)
        assert await leased(hub, 2) == ids
        hub.acknowledge(ids)
        server.command(*trouble)
        hub.commit(hub.position())
        offering = asyncio.create_task(offer(link, 2, 6))
        await asyncio.sleep(0.5)
        assert not offering.done()
        assert link.peer_state is PeerState.CONNECTED
        server.command(*cure)
        ids = await soon(offering)
        assert await leased(hub, 4) == ids
        assert [one.seq for one in ids] == [2, 3, 4, 5]
        await soon(_until_left(server, 4))


async def test_a_stopped_server_is_told_apart_by_name_and_comes_back(server: RedisServer) -> None:
    async with ends(server, heartbeat_timeout_s=2.0, on_lost="fail", connect_timeout_s=4.0) as (hub, link):
        server.signal(signal.SIGSTOP)
        for lost in (await soon(link.wait_lost()), await soon(anext(hub.rollouter_lost()))):
            assert f"redis at 127.0.0.1:{server.port} is gone" in str(lost)
        with pytest.raises(PeerLost) as failure:
            await link.offer(make_sample())
        assert f"redis at 127.0.0.1:{server.port} is gone" in str(failure.value)
        server.signal(signal.SIGCONT)
        await link.wait_connected(HANG_S)


async def test_a_dead_server_is_named_by_who_waits_for_the_trainer(server: RedisServer) -> None:
    server.kill()
    async with link_on(server) as link:
        with pytest.raises(PeerLost) as failure:
            await link.wait_connected(1.5)
        assert f"redis at 127.0.0.1:{server.port} cannot be used" in str(failure.value)
        await asyncio.to_thread(server.start)
        with pytest.raises(PeerLost) as failure:
            await link.wait_connected(3.0)
        assert "is there again, and no trainer of the run is" in str(failure.value)


async def test_the_trainer_waits_for_a_server_that_comes_later(server: RedisServer) -> None:
    server.kill()
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(_opened(server))
        await asyncio.sleep(0.3)
        assert not opening.done()
        await asyncio.to_thread(server.start)


async def _opened(server: RedisServer) -> None:
    async with hub_on(server):
        pass


async def test_the_trainer_gives_up_on_a_server_that_never_comes(server: RedisServer) -> None:
    server.kill()
    with pytest.raises(BusError, match=f"redis at 127.0.0.1:{server.port} cannot be reached within 1 s"):
        await soon(_opened_within(server, 1.0))


async def _opened_within(server: RedisServer, timeout_s: float) -> None:
    async with hub_on(server, connect_timeout_s=timeout_s):
        pass


async def test_a_second_trainer_of_a_run_is_refused_while_the_first_lives(server: RedisServer) -> None:
    async with hub_on(server):
        with pytest.raises(AddressInUse, match=r"a trainer of run 'run' uses redis at .* already \(process \d+ on "):
            await soon(_opened(server))
    await soon(_opened(server))


async def test_a_trainer_whose_lock_is_in_other_hands_ends(server: RedisServer) -> None:
    """Of one that was stopped for so long that another took its place."""
    async with hub_on(server) as hub:
        server.command("SET", "headrace:run:lock", "somebody else")
        with pytest.raises(BusError, match="a trainer of run 'run' uses redis"):
            await soon(hub.lease())


async def test_a_server_that_loses_samples_is_refused_with_the_remedy(volatile: RedisServer) -> None:
    with pytest.raises(NotDurable, match="CONFIG SET appendonly yes"):
        await soon(_opened(volatile))
    volatile.command("CONFIG", "SET", "appendonly", "yes")
    await soon(_opened(volatile))


async def test_two_runs_of_one_name_in_two_databases_do_not_meet(server: RedisServer) -> None:
    """Channels are not of a database."""
    other = server.address.replace("/0#", "/1#")
    async with (
        ends(server) as (hub, link),
        hub_at(other, run_id="other", transport="redis") as other_hub,
        link_to(other, transport="redis") as other_link,
    ):
        await other_link.wait_connected(HANG_S)
        assert other_link.resumption is not None
        assert other_link.resumption.run_id == "other"
        there = [await soon(other_link.offer(make_sample()))]
        here = await offer(link, 0, 1)
        assert await leased(hub, 1) == here
        assert await leased(other_hub, 1) == there


async def test_closing_on_a_server_that_hangs_ends(server: RedisServer) -> None:
    """With offers under way, and long before any deadline of the connection."""
    async with hub_on(server) as hub:
        async with link_on(server) as link:
            await link.wait_connected(HANG_S)
            await offer(link, 0, 2)
            server.signal(signal.SIGSTOP)
            offering = asyncio.create_task(link.offer(make_sample()))
            await asyncio.sleep(0.1)
        with pytest.raises(BusError):
            await soon(offering)
        assert hub.consumer_statistics().rejected == 0


async def test_streams_of_an_earlier_run_are_left_alone(server: RedisServer) -> None:
    async with link_on(server) as link:
        async with hub_on(server):
            await link.wait_connected(HANG_S)
            await offer(link, 0, 2)
        async with hub_on(server, run_id="run-2", incarnation="second") as hub:
            await until(lambda: link.resumption is not None and link.resumption.run_id == "run-2")
            ids = await offer(link, 0, 1)
            assert await leased(hub, 1) == ids
            assert ids[0].seq == 0
    assert server.command("XLEN", STREAM) == 2
    assert server.command("XLEN", "headrace:run:run-2:s:rollouter") == 1


async def test_two_processes_of_one_producer_cannot_both_believe_that_they_offered(server: RedisServer) -> None:
    """The record at a place is compared before 'there already' counts as success."""
    async with ends(server) as (_hub, link):
        ids = await offer(link, 0, 1)
        server.command("XADD", STREAM, f"{ids[0].epoch}-2", "f0", "not ours")
        with pytest.raises(BusError, match="another process offers under this producer's name"):
            await soon(link.offer(make_sample()))
