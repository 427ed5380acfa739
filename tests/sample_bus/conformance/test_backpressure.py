"""Credit: what is received and not settled never exceeds the limits, nothing is dropped to make room, and offers wait."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from sample_bus.errors import BusError
from sample_bus.protocols import Lease
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import closed_seat, sample, task_of, tasks
from tests.sample_bus.ends import soon, until


async def test_unsettled_records_never_exceed_the_limit_in_number_and_none_is_dropped(place: Place) -> None:
    """B129: ten is the bound, whatever sockets and broker could hold; a stopped consumer stops the producer."""
    async with place.hub(max_queued_samples=10) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(50)]
        await until(lambda: hub.consumer_statistics().queued == 10)
        await asyncio.sleep(0.3)
        assert hub.consumer_statistics().received == 10
        assert link.producer_statistics().waiting == 40
        assert sum(offer.done() for offer in offers) == 10
        found: list[str] = []
        while len(found) < 50:
            lease = await soon(hub.lease())
            assert hub.consumer_statistics().queued <= 10
            assert link.producer_statistics().unsettled <= 10
            found.append(task_of(lease))
            hub.acknowledge([lease.id])
        assert found == tasks(range(50))
        await soon(asyncio.gather(*offers))


async def test_unsettled_records_never_exceed_the_limit_in_bytes(place: Place) -> None:
    limit = 1 << 16
    async with place.hub(max_queued_bytes=limit) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number, size=1000))) for number in range(30)]
        await until(lambda: hub.consumer_statistics().queued_bytes > limit // 2)
        await asyncio.sleep(0.3)
        assert 0 < sum(offer.done() for offer in offers) < 10
        found = []
        for _ in range(30):
            lease = await soon(hub.lease())
            assert lease.nbytes <= hub.consumer_statistics().queued_bytes <= limit
            found.append(task_of(lease))
            hub.acknowledge([lease.id])
        assert found == tasks(range(30))
        await soon(asyncio.gather(*offers))
        assert hub.consumer_statistics().queued_bytes == 0


async def test_record_as_large_as_the_whole_room_passes_alone(place: Place) -> None:
    limit = 1 << 17
    async with place.hub(max_queued_bytes=limit) as hub, place.link() as link:
        sizes = [2, (limit - 2048) // 9, 2, (limit - 2048) // 9]
        offers = [asyncio.create_task(link.offer(sample(number, size=size))) for number, size in enumerate(sizes)]
        for number in range(4):
            lease = await soon(hub.lease())
            assert task_of(lease) == f"rollouter-{number}"
            assert hub.consumer_statistics().queued_bytes <= limit
            hub.acknowledge([lease.id])
        await soon(asyncio.gather(*offers))


async def test_several_producers_share_the_room(place: Place) -> None:
    """None starves; and once each has used what it was given while it was alone, together they keep to the limit."""
    names = ("a", "b", "c")
    async with place.hub(max_queued_samples=12) as hub, AsyncExitStack() as stack:
        links = [await stack.enter_async_context(place.link(name)) for name in names]
        await soon(asyncio.gather(*(link.wait_connected(30) for link in links)))
        offers = [
            asyncio.create_task(link.offer(sample(number, producer=name)))
            for name, link in zip(names, links, strict=True)
            for number in range(40)
        ]
        seen: Counter[str] = Counter()
        for number in range(120):
            lease = await soon(hub.lease())
            seen[lease.id.producer] += 1
            assert hub.consumer_statistics().queued <= (12 if number > 40 else 36)
            hub.acknowledge([lease.id])
        assert seen == dict.fromkeys(names, 40)
        await soon(asyncio.gather(*offers))


async def test_producer_that_has_left_leaves_its_share_of_the_room_to_the_others(place: Place) -> None:
    """Else a step as large as the room could never fill again."""
    async with place.hub(max_queued_samples=12) as hub, place.link("b") as b:
        async with place.link("a") as a:
            await soon(a.offer(sample(0, producer="a")))
            await soon(b.wait_connected(30))
            lease = await soon(hub.lease())
            hub.acknowledge([lease.id])
            hub.commit(hub.position())
            await until(lambda: a.producer_statistics().committed == 1)
        await soon(asyncio.gather(*(b.offer(sample(number, producer="b")) for number in range(12))))
        await until(lambda: hub.consumer_statistics().queued == 12)


async def test_credit_returns_whatever_the_order_of_acknowledgements(place: Place) -> None:
    shuffle = random.Random(0)
    async with place.hub(max_queued_samples=32) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(400)]
        held: list[Lease] = []
        for _ in range(400):
            held.append(await soon(hub.lease()))
            if len(held) == 32 or shuffle.random() < 0.1:
                shuffle.shuffle(held)
                settled, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
                hub.acknowledge([lease.id for lease in settled], dropped=shuffle.random() < 0.5)
        hub.acknowledge([lease.id for lease in held])
        await soon(asyncio.gather(*offers))
        await until(lambda: link.producer_statistics().acknowledged == 400)
        assert (hub.consumer_statistics().queued, link.producer_statistics().unsettled) == (0, 0)
        (stream,) = hub.position().streams
        assert (stream.watermark, stream.beyond) == (400, ())


async def test_closed_seats_wait_for_credit_like_samples(place: Place) -> None:
    async with place.hub(max_queued_samples=3) as hub, place.link() as link:
        offers = [asyncio.create_task(link.close_seat(closed_seat(n)) if n % 2 else link.offer(sample(n))) for n in range(9)]
        await until(lambda: hub.consumer_statistics().queued == 3)
        await asyncio.sleep(0.2)
        assert sum(offer.done() for offer in offers) == 3
        found = []
        for _ in range(9):
            lease = await soon(hub.lease())
            found.append(task_of(lease))
            hub.acknowledge([lease.id])
        assert found == tasks(range(9))
        await soon(asyncio.gather(*offers))


async def test_acknowledging_what_is_not_leased_is_refused_and_settles_nothing(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        await soon(link.offer(sample(0)))
        lease = await soon(hub.lease())
        with pytest.raises(BusError, match="not leased"):
            hub.acknowledge([lease.id, lease.id._replace(seq=1)])
        with pytest.raises(BusError, match="named twice"):
            hub.acknowledge([lease.id, lease.id])
        assert hub.consumer_statistics().queued == 1
        hub.acknowledge([lease.id])
        with pytest.raises(BusError, match="not leased"):
            hub.acknowledge([lease.id])


async def test_commits_free_the_producers_copies_and_nothing_else_does(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        for number in range(20):
            await soon(link.offer(sample(number, size=500)))
        leases = [await soon(hub.lease()) for _ in range(20)]
        hub.acknowledge([lease.id for lease in leases])
        await until(lambda: link.producer_statistics().acknowledged == 20)
        kept = link.producer_statistics()
        assert kept.committed == 0
        assert kept.kept_bytes >= sum(lease.nbytes for lease in leases)
        assert place.num_kept() == 20
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 20)
        await until(lambda: link.producer_statistics().kept_bytes == 0)
        await until(lambda: place.num_kept() == 0)
