"""Cancellation in the middle of every call: the call ends at once, the end goes on, and no record is lost, torn or doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from sample_bus.messages import Accepted, Message, RollouterState, RollouterStatus, TrainerStatus
from sample_bus.protocols import Hub, Link
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import closed_seat, sample, task_of
from tests.sample_bus.ends import soon, until


async def cancelled(awaitable: Awaitable[Any], *, after_s: float = 0.05) -> None:
    """Start it, cancel it while it waits, and see that it ends by that."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(after_s)
    assert not task.done(), "it did not wait"
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=30)
    assert done, "cancellation was swallowed"
    assert task.cancelled()


def following(events: AsyncIterator[Any], *, skip: int = 0) -> Awaitable[Any]:
    """The next event after the first `skip` ones."""

    async def follow() -> Any:
        for _ in range(skip):
            await anext(events)
        return await anext(events)

    return follow()


async def never(_body: Message) -> Message:
    await asyncio.Event().wait()
    return Accepted()


async def works(hub: Hub, link: Link, number: int) -> None:
    """A record passes from one end to the other, and a request comes back."""
    offer = asyncio.create_task(link.offer(sample(number)))
    while True:
        lease = await soon(hub.lease())
        hub.acknowledge([lease.id])
        if task_of(lease) == f"rollouter-{number}":
            break
    assert await soon(offer) == lease.id
    assert await soon(link.request("quick", Accepted(), Accepted)) == Accepted()


Call = Callable[[Hub, Link], Awaitable[Any]]
WAITING: dict[str, Call] = {
    "lease": lambda hub, link: hub.lease(),
    "gone": lambda hub, link: following(hub.gone()),
    "rollouter_lost": lambda hub, link: following(hub.rollouter_lost()),
    "hub.watch": lambda hub, link: following(hub.watch("rollouter", RollouterStatus)),
    "hub.request": lambda hub, link: hub.request("never", Accepted(), Accepted),
    "link.request": lambda hub, link: link.request("never", Accepted(), Accepted),
    "link.watch": lambda hub, link: following(link.watch("trainer", TrainerStatus)),
    "resumptions": lambda hub, link: following(link.resumptions(), skip=1),
    "rejections": lambda hub, link: following(link.rejections()),
    "wait_lost": lambda hub, link: link.wait_lost(),
}


@pytest.mark.parametrize("name", WAITING)
async def test_call_that_waits_is_cancelled_at_once_and_both_ends_go_on(place: Place, name: str) -> None:
    async with place.hub() as hub, place.link() as link:
        hub.handle("never", Accepted, never)
        hub.handle("quick", Accepted, _accept)
        await soon(link.wait_connected(30))
        for _ in range(3):
            await cancelled(WAITING[name](hub, link))
        await works(hub, link, 0)


async def test_waits_for_the_other_end_are_cancelled_at_once(place: Place) -> None:
    async with place.hub() as hub:
        await cancelled(hub.wait_rollouter(60))
    async with place.link() as link:
        await cancelled(link.wait_connected(60))
        await cancelled(link.offer(sample(0)))
        await cancelled(link.request("quick", Accepted(), Accepted))
        async with place.hub() as hub:
            hub.handle("quick", Accepted, _accept)
            await soon(link.wait_connected(30))
            await works(hub, link, 1)
            assert hub.consumer_statistics().received == 1


async def test_offer_cancelled_while_it_waits_for_credit_leaves_no_gap(place: Place) -> None:
    async with place.hub(max_queued_samples=2) as hub, place.link() as link:
        hub.handle("quick", Accepted, _accept)
        await soon(asyncio.gather(*(link.offer(sample(number)) for number in range(2))))
        await cancelled(link.offer(sample(2)))
        await cancelled(link.close_seat(closed_seat(3)))
        last = asyncio.create_task(link.offer(sample(4)))
        found = []
        for _ in range(3):
            lease = await soon(hub.lease())
            found.append((lease.id.seq, task_of(lease)))
            hub.acknowledge([lease.id])
        assert found == [(0, "rollouter-0"), (1, "rollouter-1"), (2, "rollouter-4")]
        await soon(last)


async def test_offers_cancelled_at_any_moment_arrive_whole_or_not_at_all_and_the_stream_stays_dense(place: Place) -> None:
    """What returned arrives; what was cancelled may have been stored; nothing arrives twice."""
    choose = random.Random(7)
    async with place.hub(max_queued_samples=16) as hub, place.link() as link:
        found: list[tuple[int, str]] = []

        async def consume() -> None:
            while True:
                lease = await hub.lease()
                found.append((lease.id.seq, task_of(lease)))
                hub.acknowledge([lease.id])

        consuming = asyncio.create_task(consume())
        offers = []
        for number in range(200):
            offers.append(asyncio.create_task(link.offer(sample(number, size=1 + number * 7))))
            if choose.random() < 0.3:
                await asyncio.sleep(choose.random() * 0.003)
            if choose.random() < 0.5:
                offers[choose.randrange(len(offers))].cancel()
        outcomes = await soon(asyncio.gather(*offers, return_exceptions=True))
        returned = {(one.seq, f"rollouter-{n}") for n, one in enumerate(outcomes) if not isinstance(one, BaseException)}
        assert all(isinstance(one, asyncio.CancelledError) for one in outcomes if isinstance(one, BaseException))
        last = await soon(link.offer(sample(1000)))
        await until(lambda: bool(found) and found[-1][0] == last.seq)
        assert [seq for seq, _ in found] == list(range(last.seq + 1))
        assert len({task for _, task in found}) == len(found)
        assert returned <= set(found)
        assert 0 < len(returned) < 200
        consuming.cancel()


async def test_lease_cancelled_at_any_moment_loses_no_record(place: Place) -> None:
    choose = random.Random(3)
    async with place.hub(max_queued_samples=8) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(150)]
        found: list[int] = []
        while len(found) < 150:
            lease = asyncio.ensure_future(hub.lease())
            await asyncio.wait([lease], timeout=choose.random() * 0.003)
            if not lease.done():
                lease.cancel()
            (outcome,) = await soon(asyncio.gather(lease, return_exceptions=True))
            if not isinstance(outcome, BaseException):
                found.append(outcome.id.seq)
                hub.acknowledge([outcome.id])
        assert found == list(range(150))
        await soon(asyncio.gather(*offers))


async def test_reading_back_is_cancelled_in_the_middle_and_begun_again(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        hub.handle("quick", Accepted, _accept)
        for number in range(20):
            await soon(link.offer(sample(number, size=3000)))

        async def read_all() -> list[int]:
            return [sample_id.seq async for sample_id, _ in link.stored()]

        for _ in range(5):
            reading = asyncio.create_task(read_all())
            await asyncio.sleep(0)
            reading.cancel()
            await soon(asyncio.gather(reading, return_exceptions=True))
        assert await soon(read_all()) == list(range(20))
        await works(hub, link, 20)


async def test_publishing_is_cancelled_and_the_next_value_still_arrives(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        await soon(link.wait_connected(30))
        for version in range(20):
            publishing = asyncio.create_task(
                link.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, policy_version=version))
            )
            if version % 2:
                await asyncio.sleep(0)
                publishing.cancel()
            await soon(asyncio.gather(publishing, return_exceptions=True))
        await soon(link.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, policy_version=100)))
        await until(lambda: (status := hub.get("rollouter", RollouterStatus)) is not None and status.policy_version == 100)


@pytest.mark.parametrize("end", ["hub", "link"])
async def test_end_that_is_cancelled_closes_and_can_be_opened_again(place: Place, end: str) -> None:
    """The address, the stream and the name are free afterwards."""

    async def hold(opened: asyncio.Event) -> None:
        async with place.hub() if end == "hub" else place.link():
            opened.set()
            await asyncio.Event().wait()

    for _ in range(3):
        opened = asyncio.Event()
        holding = asyncio.create_task(hold(opened))
        await soon(opened.wait())
        holding.cancel()
        (outcome,) = await soon(asyncio.gather(holding, return_exceptions=True))
        assert isinstance(outcome, asyncio.CancelledError)
    async with place.hub() as hub, place.link() as link:
        hub.handle("quick", Accepted, _accept)
        await works(hub, link, 0)


async def test_offers_that_wait_when_their_link_is_closed_end_with_an_error(place: Place) -> None:
    async with place.hub(max_queued_samples=1) as hub:
        async with place.link() as link:
            await soon(link.offer(sample(0)))
            waiting = asyncio.create_task(link.offer(sample(1)))
            await asyncio.sleep(0.1)
        (outcome,) = await soon(asyncio.gather(waiting, return_exceptions=True))
        assert "closed" in str(outcome)
        assert task_of(await soon(hub.lease())) == "rollouter-0"


async def _accept(_body: Message) -> Accepted:
    return Accepted()
