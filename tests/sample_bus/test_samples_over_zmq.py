from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgpack
import numpy as np
import pytest

from sample_bus import wire
from sample_bus.errors import BusError, Ended, SampleTooLarge, WireError
from sample_bus.frames import Ack, Rejected, Reset, Welcome
from sample_bus.messages import EndOfRun, EndReason
from sample_bus.protocols import Leased
from sample_bus.sample import SampleId
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import RawClient, hub_at, lease, link_to, pair, soon, until


async def test_samples_arrive_in_the_order_of_their_offers_and_unchanged(address: str) -> None:
    samples = [make_sample(reply=list(range(1, 2 + index % 40)), reward=index / 7, task_id=f"t{index}") for index in range(300)]
    async with pair(address) as (hub, link):
        offers = [asyncio.create_task(link.offer(sample)) for sample in samples]
        for index, sample in enumerate(samples):
            leased = await lease(hub)
            assert (leased.id.producer, leased.id.seq) == ("rollouter", index)
            for name in ("tokens", "loss_mask", "behavior_logprobs", "version_starts", "versions", "kept_cache"):
                np.testing.assert_array_equal(getattr(leased.sample, name), getattr(sample, name))
            assert (leased.sample.task_id, leased.sample.reward) == (sample.task_id, sample.reward)
            hub.acknowledge([leased.id])
        assert [(await soon(offer)).seq for offer in offers] == list(range(300))


async def test_sample_offered_before_the_trainer_exists_is_the_first_to_arrive(address: str) -> None:
    """B128: a slow joiner loses nothing."""
    async with link_to(address) as link:
        offers = [asyncio.create_task(link.offer(make_sample(task_id=f"t{index}"))) for index in range(5)]
        await asyncio.sleep(0.5)
        assert not any(offer.done() for offer in offers)
        async with hub_at(address) as hub:
            assert [(await lease(hub)).sample.task_id for _ in range(5)] == [f"t{index}" for index in range(5)]
            await soon(asyncio.gather(*offers))


async def test_unsettled_samples_never_exceed_the_limit_and_none_is_dropped(address: str) -> None:
    """B129: ten is the bound, whatever the sockets could hold; a stopped consumer stops the producer."""
    async with pair(address, max_queued_samples=10) as (hub, link):
        offers = [asyncio.create_task(link.offer(make_sample(task_id=f"t{index}"))) for index in range(50)]
        await until(lambda: hub.consumer_statistics().queued == 10)
        await asyncio.sleep(0.3)
        assert hub.consumer_statistics().received == 10
        assert link.producer_statistics().waiting == 40
        assert sum(offer.done() for offer in offers) == 10
        order = []
        while len(order) < 50:
            leased = await lease(hub)
            order.append(leased.sample.task_id)
            assert hub.consumer_statistics().queued <= 10
            assert link.producer_statistics().unsettled <= 10
            hub.acknowledge([leased.id])
        assert order == [f"t{index}" for index in range(50)]
        await soon(asyncio.gather(*offers))


async def test_unsettled_bytes_never_exceed_the_limit(address: str) -> None:
    limit = 1 << 16
    async with pair(address, max_queued_bytes=limit) as (hub, link):
        offers = [asyncio.create_task(link.offer(make_sample(reply=[3] * 1000))) for _ in range(20)]
        for _ in range(20):
            leased = await lease(hub)
            assert leased.nbytes <= hub.consumer_statistics().queued_bytes <= limit
            assert link.producer_statistics().waiting + hub.consumer_statistics().received <= 20
            hub.acknowledge([leased.id])
        await soon(asyncio.gather(*offers))
        assert hub.consumer_statistics().queued_bytes == 0


async def test_credit_returns_whatever_the_order_of_acknowledgements(address: str) -> None:
    shuffle = random.Random(0)
    async with pair(address, max_queued_samples=64) as (hub, link):
        offers = [asyncio.create_task(link.offer(make_sample())) for _ in range(1000)]
        held: list[Leased] = []
        for _ in range(1000):
            held.append(await lease(hub))
            if len(held) == 64 or shuffle.random() < 0.1:
                shuffle.shuffle(held)
                settled, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
                hub.acknowledge([leased.id for leased in settled])
        hub.acknowledge([leased.id for leased in held])
        await soon(asyncio.gather(*offers))
        await until(lambda: link.producer_statistics().acknowledged == 1000)
        assert (hub.consumer_statistics().queued, link.producer_statistics().unsettled) == (0, 0)


async def test_acknowledging_what_is_not_leased_is_refused_and_settles_nothing(address: str) -> None:
    async with pair(address) as (hub, link):
        await soon(link.offer(make_sample()))
        leased = await lease(hub)
        with pytest.raises(BusError, match="not leased"):
            hub.acknowledge([leased.id, leased.id._replace(seq=1)])
        with pytest.raises(BusError, match="named twice"):
            hub.acknowledge([leased.id, leased.id])
        assert hub.consumer_statistics().queued == 1
        hub.acknowledge([leased.id])
        with pytest.raises(BusError, match="not leased"):
            hub.acknowledge([leased.id])


async def test_sample_beyond_the_limit_is_refused_by_name_and_the_next_one_arrives(address: str) -> None:
    """B125, B126: never a stream that stops in silence."""
    async with pair(address, max_sample_bytes=1 << 16) as (hub, link):
        with pytest.raises(SampleTooLarge, match=r"task-0/0/0: \d+ bytes \(100003 tokens\), the bus carries at most 65536"):
            await soon(link.offer(make_sample(reply=[1] * 100_000)))
        await soon(link.offer(make_sample(task_id="small")))
        assert (await lease(hub)).sample.task_id == "small"


async def test_the_trainers_smaller_limit_holds_at_the_producer(address: str) -> None:
    async with hub_at(address, max_queued_bytes=1 << 17) as hub, link_to(address) as link:
        await link.wait_connected(30)
        with pytest.raises(SampleTooLarge, match="at most 131072"):
            await soon(link.offer(make_sample(reply=[1] * 50_000)))
        await soon(link.offer(make_sample()))
        assert (await lease(hub)).sample.num_tokens == 5


async def test_large_sample_travels_in_frames_of_its_own(address: str) -> None:
    """B126: 27 MB in one sample."""
    sample = make_sample(reply=np.arange(3_000_000), logprobs=np.linspace(-9, 0, 3_000_000))
    async with pair(address) as (hub, link):
        offer = asyncio.create_task(link.offer(sample))
        leased = await lease(hub)
        np.testing.assert_array_equal(leased.sample.behavior_logprobs, sample.behavior_logprobs)
        assert leased.nbytes > 27_000_000
        await soon(offer)


async def test_inconsistent_sample_is_refused_at_the_producer(address: str) -> None:
    async with pair(address) as (hub, link):
        with pytest.raises(WireError, match="behavior_logprobs"):
            await link.offer(make_sample(logprobs=[-1.0, float("nan")]))
        with pytest.raises(WireError, match="attempt: got -1"):
            await link.offer(make_sample(attempt=-1))
        await soon(link.offer(make_sample()))
        assert hub.consumer_statistics().rejected == 0


async def test_cancelled_offer_that_waited_for_credit_never_arrives(address: str) -> None:
    async with pair(address, max_queued_samples=1) as (hub, link):
        await soon(link.offer(make_sample(task_id="first")))
        waiting = asyncio.create_task(link.offer(make_sample(task_id="withdrawn")))
        last = asyncio.create_task(link.offer(make_sample(task_id="last")))
        await until(lambda: link.producer_statistics().waiting == 2)
        waiting.cancel()
        for expected in ("first", "last"):
            leased = await lease(hub)
            assert leased.sample.task_id == expected
            hub.acknowledge([leased.id])
        assert (await soon(last)).seq == 1


async def test_waiting_offers_end_with_the_run(address: str) -> None:
    async with pair(address, max_queued_samples=1) as (hub, link):
        await soon(link.offer(make_sample()))
        waiting = asyncio.create_task(link.offer(make_sample()))
        await until(lambda: link.producer_statistics().waiting == 1)
        await hub.publish("end", EndOfRun(reason=EndReason.FINISHED, message="all steps done"))
        with pytest.raises(Ended, match="finished all steps done"):
            await soon(waiting)
        with pytest.raises(Ended):
            await soon(link.offer(make_sample()))


async def test_lease_that_is_cancelled_takes_no_sample_away(address: str) -> None:
    taken: list[Leased] = []
    async with pair(address) as (hub, link):
        for pauses in range(40):
            impatient = asyncio.create_task(hub.lease())
            offer = asyncio.create_task(link.offer(make_sample()))
            for _ in range(pauses % 8):
                await asyncio.sleep(0.0002)
            impatient.cancel()
            taken += [
                leased for leased in await asyncio.gather(impatient, return_exceptions=True) if isinstance(leased, Leased)
            ]
            await soon(offer)
        while len(taken) < 40:
            taken.append(await lease(hub))
        assert sorted(leased.id.seq for leased in taken) == list(range(40))


async def test_closing_the_hub_ends_a_waiting_lease(address: str) -> None:
    async with hub_at(address) as hub:
        waiting = asyncio.create_task(hub.lease())
        await asyncio.sleep(0)
    with pytest.raises(BusError, match="closed"):
        await soon(waiting)


async def test_garbage_is_counted_and_kept_and_the_stream_goes_on(address: str) -> None:
    garbage: list[list[bytes]] = [
        [b""],
        [b"\xc1"],
        [b"\x00" * 1000],
        [b"\x91\x0b", b"x"],
        [b"\x92\x0b\x00"],
        [b"\x92\x0b\xff", b"y"],
    ]
    noise = random.Random(1)
    garbage += [[noise.randbytes(noise.randrange(1, 60)) for _ in range(noise.randrange(1, 4))] for _ in range(100)]
    async with pair(address) as (hub, link):
        with RawClient(address) as vandal:
            for frames in garbage:
                await vandal.send(frames)
            await until(lambda: hub.consumer_statistics().rejected >= len(garbage) - 5)
        await soon(link.offer(make_sample(task_id="survivor")))
        assert (await lease(hub)).sample.task_id == "survivor"


async def test_undecodable_sample_gives_its_credit_back_and_its_bytes_are_kept(address: str) -> None:
    good = [wire.encode(make_sample(task_id=f"t{seq}"), SampleId("raw", 7, seq)) for seq in range(3)]
    bad = [bytes(good[1][0]), bytes(good[1][1])[:-1] + b"\x07"]
    async with hub_at(address, max_queued_samples=2) as hub:
        with RawClient(address) as client:
            await client.greet()
            await client.next(Welcome)
            assert (await client.open()).ack.limit_samples == 2
            await client.data(0, good[0])
            await client.data(1, bad)
            ack = await client.next(Ack)
            while ack.received < 2:
                ack = await client.next(Ack)
            assert (ack.settled, ack.limit_samples) == (1, 3)
            await client.data(2, good[2])
            assert [(await lease(hub)).sample.task_id for _ in range(2)] == ["t0", "t2"]
            assert hub.consumer_statistics().rejected == 1
    (path,) = (Path(address.removeprefix("ipc://")).parent / "quarantine").glob("*.msgpack")
    kept = msgpack.unpackb(path.read_bytes())
    assert kept["frames"][1:] == bad
    assert "checksum" in kept["error"]


async def test_repeated_sample_is_leased_once_and_a_gap_asks_for_a_greeting(address: str) -> None:
    frames = [wire.encode(make_sample(task_id=f"t{seq}"), SampleId("raw", 7, seq)) for seq in range(3)]
    async with hub_at(address) as hub:
        with RawClient(address) as client:
            await client.data(0, frames[0])
            await client.next(Reset)
            assert hub.consumer_statistics().received == 0
            await client.greet()
            await client.next(Welcome)
            await client.open()
            await client.data(0, frames[0])
            await client.data(0, frames[0])
            await client.data(2, frames[2])
            await client.next(Reset)
            await client.data(1, frames[1])
            assert [(await lease(hub)).sample.task_id for _ in range(2)] == ["t0", "t1"]
            assert (hub.consumer_statistics().received, hub.consumer_statistics().duplicates) == (2, 1)


async def test_producer_that_ignores_its_credit_is_not_obeyed(address: str) -> None:
    async with hub_at(address, max_queued_samples=2) as hub:
        with RawClient(address) as client:
            await client.greet()
            await client.next(Welcome)
            await client.open()
            for seq in range(4):
                await client.data(seq, wire.encode(make_sample(), SampleId("raw", 7, seq)))
            await client.next(Reset)
            assert hub.consumer_statistics().received == 2


async def test_sample_under_another_producers_name_is_rejected(address: str) -> None:
    async with hub_at(address) as hub:
        with RawClient(address) as client:
            await client.greet()
            await client.next(Welcome)
            await client.open()
            await client.data(0, wire.encode(make_sample(), SampleId("somebody else", 7, 0)))
            await until(lambda: hub.consumer_statistics().rejected == 1)
            assert (await client.next(Ack)).received == 1


async def test_producer_is_told_again_what_was_rejected_whoever_died_since(address: str) -> None:
    """The process that was told may have died before it closed the seat, and so may the trainer."""
    good = wire.encode(make_sample(), SampleId("raw", 7, 0))
    bad = [bytes(good[0]), bytes(good[1])[:-1] + b"\x07"]
    for incarnation in ("first", "second"):
        async with hub_at(address, incarnation=incarnation):
            for life in range(2):
                with RawClient(address) as client:
                    await client.greet(process=life)
                    await client.next(Welcome)
                    opened = await client.open(next_seq=1)
                    if opened.ack.received == 0 and incarnation == "first" and life == 0:
                        await client.data(0, bad)
                    rejected = await client.next(Rejected)
                    assert rejected.seq == 0
                    assert "checksum" in rejected.error
