from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest
import structlog

from sample_bus.errors import AddressInUse, BusError, Insecure, PeerLost, Refused, RequestFailed
from sample_bus.frames import PROTOCOL
from sample_bus.frames import Refused as RefusedMessage
from sample_bus.messages import Accepted, EndOfRun, EndReason, RollouterState, RollouterStatus
from sample_bus.open import open_link
from sample_bus.peers import LossReason, PeerState
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import Child, RawClient, bus_settings, hub_at, lease, link_to, pair, soon, until


async def test_busy_event_loop_is_no_loss_of_either_end(address: str) -> None:
    """Heartbeats come from the I/O threads: an idle healthy peer never trips the timeout."""
    async with pair(address, heartbeat_timeout_s=0.8) as (hub, link):
        losses = asyncio.ensure_future(anext(hub.rollouter_lost()))
        time.sleep(1.2)  # noqa: ASYNC251 - the loop is to be blocked
        await asyncio.sleep(1.2)
        assert (link.peer_state, hub.rollouter) == (PeerState.CONNECTED, "rollouter")
        assert not losses.done()
        losses.cancel()
        await soon(link.offer(make_sample()))


async def test_stopped_trainer_is_lost_and_taken_up_again_when_it_goes_on(address: str) -> None:
    child = await Child.start("hub", address, "only")
    try:
        await child.heard("open")
        async with link_to(address, heartbeat_timeout_s=0.8, on_lost="wait") as link:
            await link.wait_connected(30)
            lost = asyncio.ensure_future(link.wait_lost())
            child.signal(signal.SIGSTOP)
            assert (await soon(lost)).silent_s >= 0.8
            assert link.peer_state is PeerState.LOST
            offer = asyncio.create_task(link.offer(make_sample(task_id="after the stop")))
            await soon(offer)  # it is durable, and waits here
            child.signal(signal.SIGCONT)
            assert (await child.heard("leased"))["task_id"] == "after the stop"
            assert link.peer_state is PeerState.CONNECTED
            assert link.resumption is not None
            assert link.resumption.incarnation == "only"
    finally:
        await child.kill()


async def test_killed_trainer_is_replaced_by_its_next_incarnation_and_waiting_offers_reach_that(address: str) -> None:
    """What the old trainer held is not lost, and its socket file does not stop the new one."""
    socket_file = Path(address.removeprefix("ipc://"))
    first = await Child.start("hub", address, "one")
    await first.heard("open")
    async with link_to(address) as link:
        resumptions = link.resumptions()
        assert (await soon(anext(resumptions))).incarnation == "one"
        offers = [asyncio.create_task(link.offer(make_sample(task_id=f"t{n}"))) for n in range(12)]
        await until(lambda: sum(offer.done() for offer in offers) == 4)  # the child's limit
        asked = asyncio.create_task(link.request("anything", Accepted(), Accepted))
        with pytest.raises(RequestFailed, match="knows no request"):
            await soon(asked)
        await first.kill()
        await until(lambda: link.peer_state is PeerState.DISCONNECTED)
        assert socket_file.exists()  # noqa: ASYNC240 - a look at a local directory
        async with hub_at(address, incarnation="two") as hub:
            hub.set_origin(17, accounted=100)
            resumption = await soon(anext(resumptions))
            assert (resumption.incarnation, resumption.dropped) == ("two", 0)
            received = [taken.sample.task_id for taken in [await lease(hub) for _ in range(12)]]
            assert received == [f"t{n}" for n in range(12)]  # what the old one held was never committed
            await soon(asyncio.gather(*offers))


async def test_resumption_tells_what_the_trainer_accounts_for(address: str) -> None:
    async with hub_at(address) as hub:
        hub.set_origin(17, accounted=100)
        async with link_to(address, name="before") as link:
            for _ in range(5):
                await soon(link.offer(make_sample()))
            assert link.resumption is not None
            assert (link.resumption.origin_version, link.resumption.accounted) == (17, 100)
            leased = [await lease(hub) for _ in range(4)]
        hub.acknowledge([leased[0].id, leased[1].id])
        hub.acknowledge([leased[2].id], dropped=True)
        async with link_to(address, name="after") as link:
            await link.wait_connected(30)
            assert link.resumption is not None
            assert (link.resumption.accounted, link.resumption.dropped) == (104, 1)


async def test_killed_rollouter_is_reported_silent_and_what_it_had_confirmed_arrives(address: str) -> None:
    """B127: the producer exits at once after its last offer; all 128 samples of 28 KB reach a slow consumer, those that were
    still here with its next process."""
    async with hub_at(address, heartbeat_timeout_s=0.8) as hub:
        losses = hub.rollouter_lost()
        child = await Child.start("burst", address, "burst", "128", "3100")
        assert await child.end() == 0
        lost = await soon(anext(losses))
        assert (lost.name, lost.reason) == ("burst", LossReason.SILENT)
        assert lost.silent_s >= 0.8
        assert hub.rollouter is None
        async with link_to(address, name="burst"):
            for number in range(128):
                leased = await lease(hub)
                assert leased.sample.task_id == f"burst-{number}"
                assert leased.nbytes > 27_000
                await asyncio.sleep(0.001)


async def test_rollouter_that_comes_back_replaces_the_killed_one(address: str) -> None:
    async with hub_at(address, max_queued_samples=8) as hub:
        losses = hub.rollouter_lost()
        child = await Child.start("rollouter", address, "same name", "5", "10")
        await child.heard("offered")
        await child.kill()
        async with link_to(address, name="same name") as link:
            lost = await soon(anext(losses))
            assert (lost.name, lost.reason) == ("same name", LossReason.REPLACED)
            offers = [asyncio.create_task(link.offer(make_sample(task_id=f"new-{n}"))) for n in range(4)]
            await until(lambda: sum(offer.done() for offer in offers) == 3)  # the dead one's samples still fill the queue
            assert hub.consumer_statistics().queued == 8
            for number in range(9):
                leased = await lease(hub)
                assert leased.sample.task_id == (f"same name-{number}" if number < 5 else f"new-{number - 5}")
                hub.acknowledge([leased.id])
            await soon(asyncio.gather(*offers))


async def test_stopped_rollouter_is_lost_and_goes_on_as_the_same_one(address: str) -> None:
    async with hub_at(address, heartbeat_timeout_s=0.8) as hub:
        losses = hub.rollouter_lost()
        child = await Child.start("rollouter", address, "sleeper", "1", "10")
        try:
            await child.heard("offered")
            child.signal(signal.SIGSTOP)
            assert (await soon(anext(losses))).reason is LossReason.SILENT
            assert hub.rollouter is None
            child.signal(signal.SIGCONT)
            assert await hub.wait_rollouter(30) == "sleeper"
            more = asyncio.ensure_future(anext(losses))
            await asyncio.sleep(0.3)
            assert not more.done()
            more.cancel()
        finally:
            await child.kill()


async def test_second_rollouter_is_refused_by_name_and_the_first_goes_on(address: str) -> None:
    async with pair(address) as (hub, first), link_to(address) as second:
        with pytest.raises(Refused, match="refuses 'rollouter': rollouter 'rollouter' is connected and alive"):
            await second.wait_connected(30)
        assert second.peer_state is PeerState.REFUSED
        with pytest.raises(Refused):
            await second.offer(make_sample())
        await soon(first.offer(make_sample(task_id="still here")))
        assert (await lease(hub)).sample.task_id == "still here"


async def test_rollouter_waits_for_a_stopped_ones_place_and_gets_it(address: str, tmp_path: Path) -> None:
    async with hub_at(address, heartbeat_timeout_s=0.8) as hub:
        child = await Child.start("rollouter", address, "rollouter", "1", "10")
        try:
            await child.heard("offered")
            losses = hub.rollouter_lost()
            child.signal(signal.SIGSTOP)
            async with link_to(address, spool_dir=tmp_path) as link:
                await link.wait_connected(30)
                assert hub.rollouter == "rollouter"
                assert (await soon(anext(losses))).reason in (LossReason.SILENT, LossReason.REPLACED)
        finally:
            await child.kill()


async def test_successor_of_a_process_that_still_holds_the_spool_is_refused_by_name(address: str) -> None:
    async with hub_at(address, heartbeat_timeout_s=0.8):
        child = await Child.start("rollouter", address, "rollouter", "1", "10")
        try:
            await child.heard("offered")
            child.signal(signal.SIGSTOP)
            async with link_to(address) as link:
                with pytest.raises(BusError, match="spool/run-1/rollouter: another process offers samples from this spool"):
                    await link.wait_connected(30)
        finally:
            await child.kill()


async def test_client_of_another_protocol_is_refused_with_both_numbers(address: str) -> None:
    async with hub_at(address):
        with RawClient(address) as client:
            await client.greet(protocol=99)
            assert f"protocol 99, the trainer {PROTOCOL}" in (await client.next(RefusedMessage)).reason


async def test_rollouter_that_leaves_is_reported_at_once(address: str) -> None:
    async with hub_at(address) as hub:
        async with link_to(address) as link:
            await link.wait_connected(30)
        lost = await soon(anext(hub.rollouter_lost()))
        assert (lost.name, lost.reason) == ("rollouter", LossReason.LEFT)


async def test_trainer_that_leaves_is_seen_at_once_and_its_successor_is_found(address: str) -> None:
    async with link_to(address) as link:
        async with hub_at(address, incarnation="one"):
            await link.wait_connected(30)
        await until(lambda: link.peer_state in (PeerState.LEFT, PeerState.DISCONNECTED))
        async with hub_at(address, incarnation="two"):
            await link.wait_connected(30)
            await until(lambda: link.resumption is not None and link.resumption.incarnation == "two")


async def test_end_that_is_published_just_before_the_trainer_closes_always_arrives(address: str) -> None:
    for _ in range(20):
        async with link_to(address) as link:
            async with hub_at(address) as hub:
                await link.wait_connected(30)
                await hub.publish("end", EndOfRun(reason=EndReason.FINISHED))
            end = await soon(anext(link.watch("end", EndOfRun)))
            assert end.reason is EndReason.FINISHED


async def test_state_that_is_published_just_before_the_rollouter_closes_always_arrives(address: str) -> None:
    async with hub_at(address) as hub:
        for version in range(20):
            async with link_to(address) as link:
                await link.wait_connected(30)
                await link.publish("rollouter", RollouterStatus(state=RollouterState.ENDED, policy_version=version))
            async with asyncio.timeout(30):
                async for status in hub.watch("rollouter", RollouterStatus):
                    if status.policy_version == version:
                        break


async def test_lost_trainer_ends_offers_and_requests_when_told_to_fail(address: str) -> None:
    async with link_to(address, heartbeat_timeout_s=0.8, on_lost="fail") as link:
        async with hub_at(address, max_queued_samples=1):
            await soon(link.offer(make_sample()))
            offer = asyncio.create_task(link.offer(make_sample()))
            await asyncio.sleep(0.1)
        asked = asyncio.create_task(link.request("anything", Accepted(), Accepted))
        with pytest.raises(PeerLost, match="silent for"):
            await soon(offer)
        with pytest.raises(RequestFailed, match="silent for"):
            await soon(asked)
        with pytest.raises(PeerLost):
            await link.offer(make_sample())
        assert (await soon(link.wait_lost())).reason is LossReason.SILENT
        async with hub_at(address, incarnation="two"):
            await link.wait_connected(30)
            await soon(link.offer(make_sample()))


async def test_waits_end_at_their_deadlines_and_say_what_was_awaited(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sample_bus.patience.NOTICE_S", 0.1)
    with structlog.testing.capture_logs() as lines:
        async with link_to(address, connect_timeout_s=0.5) as link:
            with pytest.raises(PeerLost, match=r"no trainer answered at ipc://.* within 0\.35 s \(it is connecting\)"):
                await link.wait_connected(0.35)
            with pytest.raises(PeerLost, match=r"no trainer at ipc://.* for 0\.5 s"):
                await soon(link.offer(make_sample()))
        async with hub_at(address) as hub:
            with pytest.raises(PeerLost, match=r"no rollouter came to ipc://.* within 0\.35 s"):
                await hub.wait_rollouter(0.35)
    for awaited in ("waiting for the trainer", "waiting for a rollouter"):
        waits = [line for line in lines if line["event"] == awaited]
        assert len(waits) >= 2
        assert all(line["waited_s"] > 0 and line["deadline_s"] == 0.35 and line["address"] == address for line in waits)


async def test_second_trainer_at_an_address_is_refused_and_the_first_goes_on(address: str) -> None:
    async with pair(address) as (hub, link):
        with pytest.raises(AddressInUse, match="another trainer"):
            async with hub_at(address):
                pass
        await soon(link.offer(make_sample()))
        assert (await lease(hub)).id.seq == 0


async def test_closed_ends_leave_no_file_behind(address: str) -> None:
    directory = Path(address.removeprefix("ipc://")).parent
    async with pair(address):
        assert (directory / "bus").is_socket()
    assert [path.name for path in directory.iterdir()] == ["spool"]


async def test_tcp_carries_the_bus_on_loopback_at_a_port_of_its_own(tmp_path: Path) -> None:
    async with hub_at("tcp://127.0.0.1:0") as hub, link_to(hub.address, spool_dir=tmp_path) as link:
        await soon(link.offer(make_sample(task_id="over tcp")))
        assert (await lease(hub)).sample.task_id == "over tcp"
        with pytest.raises(AddressInUse, match="cannot listen"):
            async with hub_at(hub.address):
                pass
    with pytest.raises(Insecure, match="can be reached from other hosts"):
        async with hub_at("tcp://0.0.0.0:0"):
            pass


async def test_nonsense_address_is_an_error_at_once() -> None:
    with pytest.raises(BusError, match="not an address"):
        async with link_to("nonsense"):
            pass
    with pytest.raises(AddressInUse, match="expected ipc"):
        async with hub_at("udp://1"):
            pass


async def test_copies_that_end_before_what_their_producer_knows_begin_a_new_epoch(address: str) -> None:
    """A power cut took the end of the spool: no number may mean two records."""
    async with pair(address) as (hub, link):
        ids = [await soon(link.offer(make_sample(task_id=f"t{n}"))) for n in range(5)]
    async with hub_at(address, incarnation="second") as hub:
        spool = Path(address.removeprefix("ipc://")).parent / "spool"
        async with open_link(
            bus_settings(),
            address=address,
            name="rollouter",
            role="rollouter",
            spool_dir=spool,
            known_next=lambda run_id, epoch: 7 if (run_id, epoch) == ("run-1", ids[0].epoch) else 0,
        ) as link:
            resumption = await soon(anext(link.resumptions()))
            assert resumption.epoch > ids[0].epoch
            assert resumption.next_seq == 0
            again = await soon(link.offer(make_sample(task_id="new")))
            assert (again.epoch, again.seq) == (resumption.epoch, 0)
            assert (await lease(hub)).sample.task_id == "new"
