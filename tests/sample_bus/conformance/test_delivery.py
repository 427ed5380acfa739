"""Order, completeness and sizes: what is offered is leased, unchanged, in its producer's order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from sample_bus.errors import SampleTooLarge, WireError
from sample_bus.messages import Accepted
from sample_bus.peers import PeerState
from sample_bus.protocols import Hub, Leased, LeasedClosure
from sample_bus.sample import Sample
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import closed_seat, sample, task_of, tasks
from tests.sample_bus.ends import soon, until

ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "version_starts", "versions", "kept_cache")


async def lease_tasks(hub: Hub, number: int) -> list[str]:
    """Lease and settle the next so many records."""
    found = []
    for _ in range(number):
        lease = await soon(hub.lease())
        found.append(task_of(lease))
        hub.acknowledge([lease.id])
    return found


async def test_records_arrive_in_the_order_of_their_offers_and_unchanged(place: Place) -> None:
    offered = [
        closed_seat(number) if number % 7 == 3 else sample(number, size=1 + number % 40, attempt=number % 3)
        for number in range(300)
    ]
    async with place.hub() as hub, place.link() as link:
        offers = [
            asyncio.create_task(link.offer(record) if isinstance(record, Sample) else link.close_seat(record))
            for record in offered
        ]
        ids = []
        for record in offered:
            lease = await soon(hub.lease())
            ids.append(lease.id)
            if isinstance(lease, LeasedClosure):
                assert lease.closed == record
            else:
                assert isinstance(record, Sample)
                for name in ARRAYS:
                    np.testing.assert_array_equal(getattr(lease.sample, name), getattr(record, name))
                    assert getattr(lease.sample, name).dtype == getattr(record, name).dtype
                assert (lease.sample.rollout_id, lease.sample.reward) == (record.rollout_id, record.reward)
            hub.acknowledge([lease.id])
        assert [await soon(offer) for offer in offers] == ids
        assert [one.seq for one in ids] == list(range(300))
        assert {(one.producer, one.epoch) for one in ids} == {("rollouter", ids[0].epoch)}


async def test_each_of_several_producers_keeps_its_own_order(place: Place) -> None:
    """B130: order holds for each producer; none can overtake itself."""
    names = ("a", "b", "c")
    async with place.hub(max_queued_samples=16) as hub, AsyncExitStack() as stack:
        links = {name: await stack.enter_async_context(place.link(name)) for name in names}
        offers = [
            asyncio.create_task(links[name].offer(sample(number, producer=name))) for number in range(60) for name in names
        ]
        seen: dict[str, list[str]] = {name: [] for name in names}
        numbers: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(180):
            lease = await soon(hub.lease())
            seen[lease.id.producer].append(task_of(lease))
            numbers[lease.id.producer].append(lease.id.seq)
            hub.acknowledge([lease.id])
        assert seen == {name: tasks(range(60), producer=name) for name in names}
        assert numbers == {name: list(range(60)) for name in names}
        await soon(asyncio.gather(*offers))


async def test_producer_that_leaves_takes_nothing_of_the_others_along(place: Place) -> None:
    """B130: A is done and gone while B still has fifty samples on the way; all of them arrive."""
    async with place.hub(max_queued_samples=8) as hub, place.link("b") as b:
        await soon(b.wait_connected(30))
        async with place.link("a") as a:
            first = await soon(a.offer(sample(0, producer="a")))
            lease = await soon(hub.lease())
            assert lease.id == first
            hub.acknowledge([first])
            hub.commit(hub.position())
            rest = [asyncio.create_task(b.offer(sample(number, producer="b"))) for number in range(50)]
        assert await lease_tasks(hub, 50) == tasks(range(50), producer="b")
        await soon(asyncio.gather(*rest))


async def test_sample_offered_before_the_trainer_exists_is_the_first_to_arrive(place: Place) -> None:
    """B128: a slow joiner loses nothing."""
    async with place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(5)]
        await asyncio.sleep(0.3)
        assert not any(offer.done() for offer in offers)
        async with place.hub() as hub:
            assert await lease_tasks(hub, 5) == tasks(range(5))
            await soon(asyncio.gather(*offers))


async def test_sample_of_64_mb_arrives_unchanged_and_the_next_one_follows(place: Place) -> None:
    """B125, B126: no buffer's limit on the way stops the stream."""
    length = 7_400_000
    large = sample(
        0,
        prompt=(),
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        behavior_logprobs=np.linspace(-9, -1, length, dtype=np.float32),
    )
    async with place.hub() as hub, place.link() as link:
        offer = asyncio.create_task(link.offer(large))
        lease = await soon(hub.lease())
        assert isinstance(lease, Leased)
        assert lease.nbytes > 64_000_000
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(lease.sample, name), getattr(large, name))
        hub.acknowledge([(await soon(offer))])
        del lease
        next_offer = asyncio.create_task(link.offer(sample(1)))
        assert await lease_tasks(hub, 1) == tasks([1])
        await soon(next_offer)


async def test_sample_beyond_the_limit_is_refused_at_the_producer_and_the_next_one_arrives(place: Place) -> None:
    """B125, B126: a named error, never a stream that stops in silence."""
    async with place.hub(max_sample_bytes=1 << 16) as hub, place.link() as link:
        await soon(link.wait_connected(30))
        with pytest.raises(SampleTooLarge, match=r"rollouter-0/0/0: \d+ bytes"):
            await soon(link.offer(sample(0, size=100_000)))
        await soon(link.offer(sample(1)))
        assert await lease_tasks(hub, 1) == tasks([1])


async def test_sample_without_a_reply_or_without_a_prompt_or_with_empty_words_arrives_unchanged(place: Place) -> None:
    """Whatever may be empty arrives empty."""
    samples = [
        sample(0, size=0),
        sample(1, prompt=()),
        sample(2, data_source="", incarnation="", task_id="rollouter-2"),
        sample(3, prompt=(), reply=(7,)),
    ]
    async with place.hub() as hub, place.link() as link:
        for number, offered in enumerate(samples):
            offer = asyncio.create_task(link.offer(offered))
            lease = await soon(hub.lease())
            assert isinstance(lease, Leased)
            assert lease.sample.task_id == f"rollouter-{number}"
            assert (lease.sample.data_source, lease.sample.incarnation) == (offered.data_source, offered.incarnation)
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(lease.sample, name), getattr(offered, name))
            await soon(offer)


async def test_sample_without_any_token_is_refused_at_the_producer(place: Place) -> None:
    empty = np.empty(0, np.int32)
    async with place.hub() as hub, place.link() as link:
        await soon(link.wait_connected(30))
        with pytest.raises(WireError, match="tokens"):
            await soon(link.offer(sample(0, tokens=empty)))
        with pytest.raises(WireError, match="seat"):
            await soon(link.close_seat(closed_seat(0, seat=5)))
        await soon(link.offer(sample(1)))
        lease = await soon(hub.lease())
        assert (task_of(lease), lease.id.seq) == ("rollouter-1", 0)


async def test_consumer_slower_than_its_producer_gets_everything(place: Place) -> None:
    async with place.hub(max_queued_samples=4) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(60)]
        found = []
        for _ in range(60):
            lease = await soon(hub.lease())
            await asyncio.sleep(0.005)
            assert hub.consumer_statistics().queued <= 4
            found.append(task_of(lease))
            hub.acknowledge([lease.id])
        assert found == tasks(range(60))
        await soon(asyncio.gather(*offers))


async def test_stream_that_is_idle_for_longer_than_every_heartbeat_loses_nobody(place: Place) -> None:
    """B133: a wait for a slow producer outlasts every timeout below it."""
    async with place.hub(heartbeat_timeout_s=0.6) as hub, place.link(heartbeat_timeout_s=0.6) as link:
        await soon(link.wait_connected(30))
        waiting = asyncio.ensure_future(hub.lease())
        losses = asyncio.ensure_future(anext(hub.rollouter_lost()))
        for number in range(3):
            await asyncio.sleep(1.3)
            assert (link.peer_state, hub.rollouter, losses.done()) == (PeerState.CONNECTED, "rollouter", False)
            offer = asyncio.create_task(link.offer(sample(number)))
            lease = await soon(waiting)
            assert task_of(lease) == f"rollouter-{number}"
            hub.acknowledge([await soon(offer)])
            waiting = asyncio.ensure_future(hub.lease())
        for task in (waiting, losses):
            task.cancel()


async def test_what_a_producer_offered_arrives_although_it_left_at_once(place: Place) -> None:
    """B127: leaving in good order sends what is under way; what the window held back comes with the next process."""
    async with place.hub(max_queued_samples=512) as hub:
        async with place.link() as link:
            await soon(asyncio.gather(*(link.offer(sample(number, size=2000)) for number in range(128))))
        async with place.link() as again:
            assert await lease_tasks(hub, 128) == tasks(range(128))
            await until(lambda: again.producer_statistics().acknowledged == 128)


async def test_stream_is_drained_when_everything_offered_is_acknowledged(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        hub.handle("anything", Accepted, _accept)
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(40)]
        assert await lease_tasks(hub, 40) == tasks(range(40))
        await soon(asyncio.gather(*offers))
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 40)
        end = link.producer_statistics()
        assert (end.offered, end.acknowledged, end.unsettled, end.waiting, end.kept_bytes) == (40, 40, 0, 0, 0)
        start = hub.consumer_statistics()
        assert (start.received, start.queued, start.queued_bytes, start.rejected) == (40, 0, 0, 0)
        assert await soon(link.request("anything", Accepted(), Accepted)) == Accepted()


async def _accept(_body: object) -> Accepted:
    return Accepted()
