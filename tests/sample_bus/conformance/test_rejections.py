"""Records that do not decode: rejected by name, kept for whoever looks, told to their producer, and no obstacle to the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest

from sample_bus.errors import SampleTooLarge
from sample_bus.sample import Sample, SampleId
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import sample, task_of
from tests.sample_bus.ends import soon, until


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unchecked(Sample):
    """A sample that its producer offers without a look at it."""

    def validate(self) -> None:
        return


def bad_sample(number: int, **changes: Any) -> Unchecked:
    good = sample(number, **changes)
    fields = {name: getattr(good, name) for name in Sample.__dataclass_fields__}
    fields["behavior_logprobs"] = np.where(good.loss_mask == 1, np.float32("nan"), np.float32(0))
    return Unchecked(**fields)


async def test_bad_sample_is_rejected_by_its_id_and_the_stream_goes_on(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        ids = []
        for number in range(9):
            record = bad_sample(number) if number % 3 == 1 else sample(number)
            ids.append(await soon(link.offer(record)))
        leases = [await soon(hub.lease()) for _ in range(6)]
        assert [task_of(lease) for lease in leases] == [f"rollouter-{n}" for n in (0, 2, 3, 5, 6, 8)]
        rejections = link.rejections()
        told = [await soon(anext(rejections)) for _ in range(3)]
        assert [one.id for one in told] == [ids[1], ids[4], ids[7]]
        assert all("behavior_logprobs" in one.error for one in told)
        hub.acknowledge([lease.id for lease in leases])
        statistics = hub.consumer_statistics()
        assert (statistics.rejected, statistics.queued) == (3, 0)
        (stream,) = hub.position().streams
        assert (stream.watermark, stream.beyond) == (9, ())
        hub.commit(hub.position())
        await until(lambda: link.producer_statistics().committed == 9)


async def test_rejected_messages_are_kept_with_their_reason(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        await soon(link.offer(bad_sample(0)))
        await soon(anext(link.rejections()))
        await until(lambda: any(place.quarantine_dir.glob("*.msgpack")))
        (path,) = place.quarantine_dir.glob("*.msgpack")
        content = msgpack.unpackb(path.read_bytes())
        assert "behavior_logprobs" in content["error"]
        assert b"rollouter-0/0" in b"".join(content["frames"])
        assert hub.consumer_statistics().rejected == 1


async def test_rejection_is_told_to_whoever_asks_later(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        bad = await soon(link.offer(bad_sample(0)))
        await until(lambda: hub.consumer_statistics().rejected == 1)
        for _ in range(2):
            assert (await soon(anext(link.rejections()))).id == bad


async def test_rejected_record_gives_its_credit_back(place: Place) -> None:
    async with place.hub(max_queued_samples=2) as hub, place.link() as link:
        for number in range(12):
            await soon(link.offer(bad_sample(number)))
        last: SampleId = await soon(link.offer(sample(12)))
        assert last.seq == 12
        assert (await soon(hub.lease())).id == last
        assert hub.consumer_statistics().rejected == 12


async def test_rejected_record_is_not_rejected_again_after_its_position_was_stored(place: Place) -> None:
    async with place.link() as link:
        async with place.hub() as hub:
            await soon(link.offer(bad_sample(0)))
            await soon(link.offer(sample(1)))
            lease = await soon(hub.lease())
            hub.acknowledge([lease.id])
            position = hub.position()
            hub.commit(position)
        async with place.hub(incarnation="second") as hub:
            hub.seek(position)
            await soon(link.offer(sample(2)))
            assert task_of(await soon(hub.lease())) == "rollouter-2"
            assert hub.consumer_statistics().rejected == 0


@pytest.mark.parametrize("setting", ["max_sample_bytes", "max_queued_bytes"])
@pytest.mark.parametrize("size", [10_000, 2_500_000])
async def test_record_kept_when_the_bus_carried_more_is_rejected_by_its_id_and_the_stream_goes_on(
    place: Place, setting: str, size: int
) -> None:
    """Below what one message may have, and (22 MB) above it."""
    changes: dict[str, Any] = {setting: 1 << 16}
    async with place.link() as link:
        async with place.hub() as hub:
            ids = [await soon(link.offer(sample(number, size=size if number == 1 else 2))) for number in range(3)]
            for _ in range(3):
                await soon(hub.lease())
        async with place.hub(incarnation="second", **changes) as hub:
            leases = [await soon(hub.lease()) for _ in range(2)]
            assert [task_of(lease) for lease in leases] == ["rollouter-0", "rollouter-2"]
            told = await soon(anext(link.rejections()))
            assert told.id == ids[1]
            assert "at most 65536" in told.error
            hub.acknowledge([lease.id for lease in leases])
            assert hub.position().of("rollouter", ids[0].epoch).watermark == 3
            hub.commit(hub.position())
            await until(lambda: link.producer_statistics().committed == 3)
            with pytest.raises(SampleTooLarge, match="65536"):
                await soon(link.offer(sample(3, size=size)))


async def test_offer_that_waited_for_a_trainer_that_takes_less_is_refused(place: Place) -> None:
    async with place.link() as link:
        async with place.hub(max_queued_samples=1) as hub:
            await soon(link.offer(sample(0)))
            waiting = [asyncio.create_task(link.offer(sample(number, size=size))) for number, size in ((1, 10_000), (2, 2))]
            await until(lambda: link.producer_statistics().waiting == 2)
            await soon(hub.lease())
        async with place.hub(incarnation="second", max_sample_bytes=1 << 16) as hub:
            with pytest.raises(SampleTooLarge, match="65536"):
                await soon(waiting[0])
            assert (await soon(waiting[1])).seq == 1
            assert [task_of(await soon(hub.lease())) for _ in range(2)] == ["rollouter-0", "rollouter-2"]


async def test_producer_reads_back_what_it_kept_when_the_bus_carried_more(place: Place) -> None:
    async with place.hub() as hub:
        async with place.link() as link:
            kept = await soon(link.offer(sample(0, size=10_000)))
            await soon(hub.lease())
        async with place.link(max_sample_bytes=1 << 16) as link:
            await soon(anext(link.resumptions()))
            assert [sample_id async for sample_id, _ in link.stored()] == [kept]
