"""Death and restart of either end: what a position does not cover comes again, what it covers never, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from sample_bus.position import BusPosition, StreamPosition
from sample_bus.protocols import Hub, Lease, Link
from sample_bus.sample import SampleId
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import sample, task_of, tasks
from tests.sample_bus.conformance.remote import remote
from tests.sample_bus.ends import soon, until


async def take(hub: Hub, number: int) -> list[Lease]:
    return [await soon(hub.lease()) for _ in range(number)]


async def offer_all(link: Link, numbers: Sequence[int], *, producer: str = "rollouter") -> list[SampleId]:
    """Offer in order; each returned before the next."""
    return [await soon(link.offer(sample(number, producer=producer))) for number in numbers]


async def kept(link: Link, number: int) -> list[tuple[int, str]]:
    """Sequence number and task of the first so many records that the producer keeps."""
    found = []
    async with asyncio.timeout(30):
        async for sample_id, record in link.stored():
            found.append((sample_id.seq, record.task_id))
            if len(found) == number:
                break
    return found


async def test_killed_consumers_records_come_again_from_what_it_had_stored_on(place: Place) -> None:
    """B134: settled is not stored: only the position in a checkpoint counts."""
    async with place.link() as link:
        async with remote(place, "hub", "one") as first:
            await offer_all(link, range(12))
            leased = await first.do("lease", number=10)
            assert leased["tasks"] == tasks(range(10))
            await first.do("acknowledge", ids=leased["ids"][:4])
            position = (await first.do("position"))["position"]
            await first.do("commit", position=position)
            await until(lambda: link.producer_statistics().committed == 4)
            await first.do("acknowledge", ids=leased["ids"][4:8])
            await first.kill()
        async with place.hub(incarnation="two") as hub:
            hub.seek(BusPosition.from_plain(position))
            assert [task_of(lease) for lease in await take(hub, 8)] == tasks(range(4, 12))
            await offer_all(link, [12])
            assert [task_of(lease) for lease in await take(hub, 1)] == tasks([12])


async def test_consumer_that_stored_nothing_gets_everything_again(place: Place) -> None:
    async with place.link() as link:
        for life in ("one", "two", "three"):
            async with remote(place, "hub", life) as hub:
                if life == "one":
                    await offer_all(link, range(6))
                leased = await hub.do("lease", number=6)
                assert leased["tasks"] == tasks(range(6))
                await hub.do("acknowledge", ids=leased["ids"])
                await hub.kill()


async def test_records_settled_beyond_the_watermark_do_not_come_again(place: Place) -> None:
    shuffle = random.Random(1)
    async with place.link() as link:
        async with place.hub() as hub:
            await offer_all(link, range(40))
            leases = await take(hub, 40)
            settled = [lease.id for lease in leases if shuffle.random() < 0.5]
            hub.acknowledge(settled)
            position = hub.position()
            assert all(position.covers(one) for one in settled)
            hub.commit(position)
        async with place.hub(incarnation="second") as hub:
            hub.seek(position)
            rest = [lease.id for lease in leases if lease.id not in settled]
            again = await take(hub, len(rest))
            assert [lease.id for lease in again] == rest
            hub.acknowledge(rest)
            (stream,) = hub.position().streams
            assert (stream.watermark, stream.beyond) == (40, ())


async def test_living_consumer_goes_back_to_a_position_and_takes_the_same_records_again(place: Place) -> None:
    async with place.hub(max_queued_samples=10) as hub, place.link() as link:
        offers = [asyncio.create_task(link.offer(sample(number))) for number in range(30)]
        first = await take(hub, 5)
        hub.acknowledge([lease.id for lease in first])
        position = hub.position()
        second = await take(hub, 8)
        hub.acknowledge([lease.id for lease in second[:6]])
        hub.seek(position)
        again = []
        for _ in range(25):
            lease = await soon(hub.lease())
            again.append(task_of(lease))
            hub.acknowledge([lease.id])
        assert again == tasks(range(5, 30))
        await soon(asyncio.gather(*offers))
        assert [task_of(lease) for lease in first + second] == tasks(range(13))


async def test_killed_producers_offers_all_arrive_and_its_next_process_goes_on_where_it_stood(place: Place) -> None:
    """Also what the window held back: it was durable before the offer returned."""
    async with place.hub(max_queued_samples=8) as hub:
        async with remote(place, "link", "rollouter") as producer:
            ids = (await producer.do("offer", numbers=list(range(8))))["ids"]
            await producer.tell("offer", numbers=[8])
            await producer.kill()
        async with place.link() as link:
            await soon(link.wait_connected(30))
            assert link.resumption is not None
            assert [link.resumption.epoch] * 8 == [one[1] for one in ids]
            assert 8 <= link.resumption.next_seq <= 9
            assert (await kept(link, 8)) == list(enumerate(tasks(range(8))))
            next_id = asyncio.create_task(link.offer(sample(100)))
            found = []
            for _ in range(link.resumption.next_seq + 1):
                lease = await soon(hub.lease())
                found.append(task_of(lease))
                hub.acknowledge([lease.id])
            assert found == [*tasks(range(link.resumption.next_seq)), "rollouter-100"]
            assert (await soon(next_id)).seq == link.resumption.next_seq


async def test_records_that_were_kept_are_read_back_from_any_number_on_until_they_are_committed(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        await offer_all(link, range(10))
        assert await kept(link, 10) == list(enumerate(tasks(range(10))))
        found = []
        async for sample_id, record in link.stored(7):
            found.append((sample_id.seq, record.task_id))
            if len(found) == 3:
                break
        assert found == [(7, "rollouter-7"), (8, "rollouter-8"), (9, "rollouter-9")]
        leases = await take(hub, 10)
        hub.acknowledge([lease.id for lease in leases[:6]])
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 6)
        assert await kept(link, 4) == [(number, f"rollouter-{number}") for number in range(6, 10)]


async def test_both_ends_die_at_once_and_nothing_is_lost_or_taken_twice(place: Place) -> None:
    async with remote(place, "hub", "one") as hub, remote(place, "link", "rollouter") as producer:
        ids = (await producer.do("offer", numbers=list(range(9))))["ids"]
        leased = await hub.do("lease", number=5)
        await hub.do("acknowledge", ids=leased["ids"][:3])
        position = (await hub.do("position"))["position"]
        await hub.do("commit", position=position)
        await asyncio.gather(hub.kill(), producer.kill())
    async with place.link() as link, place.hub(incarnation="two") as second:
        second.seek(BusPosition.from_plain(position))
        again = await take(second, 6)
        assert [list(lease.id) for lease in again] == ids[3:]
        assert (await offer_all(link, [9]))[0].seq == 9


@pytest.mark.slow
async def test_many_restarts_of_both_ends_take_every_record_once_in_order(place: Place) -> None:
    """Each process settles what it can, stores its position and is killed; the next one goes on."""
    taken: list[str] = []
    position: list[dict[str, Any]] = []
    offered = 0
    for life in range(4):
        async with remote(place, "hub", f"life {life}") as hub, remote(place, "link", "rollouter") as producer:
            await hub.do("seek", position=position)
            await producer.do("offer", numbers=list(range(offered, offered + 6)))
            offered += 6
            leased = await hub.do("lease", number=4)
            await hub.do("acknowledge", ids=leased["ids"])
            position = (await hub.do("position"))["position"]
            taken += leased["tasks"]
            if life % 2:
                await hub.do("commit", position=position)
            await asyncio.gather(hub.kill(), producer.kill())
    async with place.hub(incarnation="last") as last, place.link():
        last.seek(BusPosition.from_plain(position))
        taken += [task_of(lease) for lease in await take(last, offered - len(taken))]
    assert taken == tasks(range(offered))


async def test_next_process_of_a_producer_is_not_made_to_send_what_the_living_consumer_holds(place: Place) -> None:
    async with place.hub() as hub:
        async with remote(place, "link", "rollouter") as producer:
            await producer.do("offer", numbers=list(range(5)))
            first = await take(hub, 5)
            await producer.kill()
        async with place.link() as link:
            await offer_all(link, [5])
            lease = await soon(hub.lease())
            assert task_of(lease) == "rollouter-5"
            hub.acknowledge([one.id for one in (*first, lease)])
            assert hub.consumer_statistics().queued == 0


async def test_producer_goes_on_after_records_that_were_committed_while_it_was_dead(place: Place) -> None:
    async with place.hub() as hub:
        async with remote(place, "link", "rollouter") as producer:
            await producer.do("offer", numbers=list(range(5)))
            first = await take(hub, 5)
            await producer.kill()
        hub.acknowledge([lease.id for lease in first[:3]])
        hub.commit(hub.position())
        async with place.link() as link:
            await soon(link.wait_connected(30))
            await until(lambda: link.producer_statistics().committed == 3)
            assert await kept(link, 2) == [(3, "rollouter-3"), (4, "rollouter-4")]
            assert (await offer_all(link, [5]))[0].seq == 5
            lease = await soon(hub.lease())
            assert (lease.id.seq, task_of(lease)) == (5, "rollouter-5")


async def test_copies_freed_for_a_checkpoint_that_is_lost_are_reported_as_gone(place: Place) -> None:
    """The trainer comes back without the state that covered them: it is told, and goes on with the rest."""
    async with place.link() as link:
        async with place.hub() as hub:
            await offer_all(link, range(6))
            leases = await take(hub, 6)
            hub.acknowledge([lease.id for lease in leases[:4]])
            hub.commit(hub.position())
            await until(lambda: link.producer_statistics().committed == 4)
        async with place.hub(incarnation="second") as hub:
            gone = await soon(anext(hub.gone()))
            assert (gone.producer, gone.epoch, gone.first, gone.last) == ("rollouter", leases[0].id.epoch, 0, 4)
            assert gone.num_records == 4
            assert [task_of(lease) for lease in await take(hub, 2)] == tasks([4, 5])


async def test_producer_that_lost_its_stream_begins_another_epoch(place: Place) -> None:
    """Numbers begin at 0 again and are never taken for the old ones; what was leased before is still settled as it was."""
    async with place.hub() as hub:
        async with place.link() as link:
            await offer_all(link, range(3))
            old = await take(hub, 3)
            hub.acknowledge([old[0].id])
        await place.lose_streams()
        async with place.link() as link:
            ids = await offer_all(link, range(3, 5))
            assert [one.seq for one in ids] == [0, 1]
            assert ids[0].epoch != old[0].id.epoch
            new = await take(hub, 2)
            assert [lease.id for lease in new] == ids
            assert [task_of(lease) for lease in new] == tasks([3, 4])
            hub.acknowledge([old[1].id, new[0].id, old[2].id])
            position = hub.position()
            assert (position.covers(new[0].id), position.covers(new[1].id)) == (True, False)
            assert hub.consumer_statistics().queued == 1


async def test_fresh_run_sees_nothing_of_an_earlier_one_and_deletes_nothing(place: Place) -> None:
    async with place.link() as link:
        resumptions = link.resumptions()
        async with place.hub(run_id="r1") as hub:
            assert (await soon(anext(resumptions))).run_id == "r1"
            await offer_all(link, range(3))
            await take(hub, 1)
        async with place.hub(run_id="r2", incarnation="fresh") as hub:
            assert (await soon(anext(resumptions))).run_id == "r2"
            ids = await offer_all(link, [3])
            assert ids[0].seq == 0
            assert [task_of(lease) for lease in await take(hub, 1)] == tasks([3])
            assert hub.consumer_statistics().queued == 1
        async with place.hub(run_id="r1", incarnation="back") as hub:
            assert (await soon(anext(resumptions))).run_id == "r1"
            assert [task_of(lease) for lease in await take(hub, 3)] == tasks(range(3))


async def test_position_of_streams_that_never_come_back_does_no_harm(place: Place) -> None:
    """A checkpoint may name producers of long ago."""
    position = BusPosition(streams=(StreamPosition(producer="elsewhere", epoch=5, watermark=100, beyond=((103, 107),)),))
    async with place.hub() as hub, place.link() as link:
        hub.seek(position)
        await offer_all(link, range(2))
        leases = await take(hub, 2)
        hub.acknowledge([lease.id for lease in leases])
        stored = hub.position()
        hub.commit(stored)
        assert all(stored.covers(lease.id) for lease in leases)
        assert stored.of("elsewhere", 5) == position.streams[0]
        await until(lambda: link.producer_statistics().committed == 2)
