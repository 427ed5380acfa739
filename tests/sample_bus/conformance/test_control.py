"""The control channel is the same over every transport: topics, requests, who is there, and the end of the run."""

from __future__ import annotations

import asyncio

import pytest

from sample_bus.errors import AddressInUse, Ended, PeerLost, Refused, RequestFailed
from sample_bus.messages import (
    Accepted,
    ChangeSettings,
    EndOfRun,
    EndReason,
    Failed,
    Message,
    RollouterState,
    RollouterStatus,
    TrainerState,
    TrainerStatus,
)
from sample_bus.peers import LossReason, PeerState
from tests.sample_bus.conformance.places import Place
from tests.sample_bus.conformance.records import closed_seat, sample
from tests.sample_bus.conformance.remote import remote
from tests.sample_bus.ends import soon, until


def trainer_at(step: int) -> TrainerStatus:
    return TrainerStatus(state=TrainerState.TRAINING, incarnation="first", step=step)


async def test_late_joiner_gets_every_topic_at_once(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:
        await hub.publish("trainer", trainer_at(3))
        await soon(link.wait_connected(30))
        await link.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, policy_version=4))
        assert (await soon(anext(hub.watch("rollouter", RollouterStatus)))).policy_version == 4
        async with place.link("top", role="console") as console:
            await soon(console.wait_connected(30))
            assert console.get("trainer", TrainerStatus) == trainer_at(3)
            status = console.get("rollouter", RollouterStatus)
            assert status is not None
            assert status.policy_version == 4


async def test_watcher_sees_rising_values_and_the_last_one(place: Place) -> None:
    async with place.hub() as hub, place.link() as link:

        async def follow() -> list[int]:
            seen = []
            async for status in link.watch("trainer", TrainerStatus):
                seen.append(status.step)
                if status.step == 199:
                    break
            return seen

        following = asyncio.create_task(follow())
        for step in range(200):
            await hub.publish("trainer", trainer_at(step))
            if step % 20 == 0:
                await asyncio.sleep(0.001)
        seen = await soon(following)
        assert seen == sorted(set(seen))


async def test_value_published_while_the_trainer_is_away_reaches_it_when_it_comes(place: Place) -> None:
    async with place.link() as link:
        for version in range(3):
            await link.publish("rollouter", RollouterStatus(state=RollouterState.STARTING, policy_version=version))
        async with place.hub() as hub:
            assert (await soon(anext(hub.watch("rollouter", RollouterStatus)))).policy_version == 2


async def test_requests_are_answered_each_with_its_own_answer_or_the_handlers_words(place: Place) -> None:
    async def echo(body: Failed) -> Failed:
        return body

    async def refuse(_body: Message) -> Accepted:
        raise ValueError("staleness_threshold: got -1, expected >= 0")

    async with place.hub() as hub, place.link() as link, place.link("top", role="console") as console:
        hub.handle("echo", Failed, echo)
        hub.handle("settings.set", ChangeSettings, refuse)
        for end in (link, console):
            answers = await soon(asyncio.gather(*(end.request("echo", Failed(message=str(n)), Failed) for n in range(100))))
            assert [answer.message for answer in answers] == [str(n) for n in range(100)]
            with pytest.raises(RequestFailed, match=r"^settings\.set: staleness_threshold: got -1, expected >= 0$"):
                await soon(end.request("settings.set", ChangeSettings(values={}, author="test"), Accepted))


async def test_request_made_before_the_trainer_exists_is_answered_when_it_comes(place: Place) -> None:
    async with place.link() as link:
        asked = asyncio.create_task(link.request("quick", Accepted(), Accepted))
        await asyncio.sleep(0.1)
        async with place.hub() as hub:
            hub.handle("quick", Accepted, _accept)
            assert await soon(asked) == Accepted()


async def test_end_of_the_run_reaches_everybody_with_its_reason_and_ends_offers(place: Place) -> None:
    """B15: an end always says why."""
    async with place.hub(max_queued_samples=1) as hub, place.link() as link:
        await soon(link.offer(sample(0)))
        waiting = asyncio.create_task(link.offer(sample(1)))
        await hub.publish("end", EndOfRun(reason=EndReason.FAILED, message="out of memory"))
        with pytest.raises(Ended, match="failed out of memory"):
            await soon(waiting)
        with pytest.raises(Ended, match="failed out of memory"):
            await soon(link.close_seat(closed_seat(2)))
        end = await soon(anext(link.watch("end", EndOfRun)))
        assert end == EndOfRun(reason=EndReason.FAILED, message="out of memory")


async def test_closing_in_good_order_is_told_apart_from_death(place: Place) -> None:
    async with place.link(on_lost="wait") as link:
        async with place.hub() as hub:
            await soon(link.wait_connected(30))
            async with place.link("other") as other:
                await soon(other.wait_connected(30))
                losses = hub.rollouter_lost()
            lost = await soon(anext(losses))
            assert (lost.name, lost.reason) == ("other", LossReason.LEFT)
        await until(lambda: link.peer_state is PeerState.LEFT)


async def test_killed_trainer_is_reported_within_the_heartbeat_limit(place: Place) -> None:
    """B14: whoever waits for it is told, and does not wait for ever."""
    async with remote(place, "hub", "one") as hub, place.link(heartbeat_timeout_s=0.8, on_lost="fail") as link:
        await soon(link.wait_connected(30))
        await hub.kill()
        lost = await soon(link.wait_lost())
        assert lost.silent_s >= 0.5
        assert link.peer_state in (PeerState.LOST, PeerState.DISCONNECTED)


async def test_killed_rollouter_is_reported_by_its_name(place: Place) -> None:
    """B14: the trainer does not poll an empty bus for hours."""
    async with place.hub(heartbeat_timeout_s=0.8) as hub, remote(place, "link", "rollouter") as producer:
        assert await soon(hub.wait_rollouter(30)) == "rollouter"
        await producer.kill()
        lost = await soon(anext(hub.rollouter_lost()))
        assert (lost.name, lost.reason) == ("rollouter", LossReason.SILENT)


async def test_nobody_there_is_an_error_that_names_the_wait(place: Place) -> None:
    async with place.link() as link:
        with pytest.raises(PeerLost, match="trainer"):
            await soon(link.wait_connected(0.2))
    async with place.hub() as hub:
        with pytest.raises(PeerLost, match="rollouter"):
            await soon(hub.wait_rollouter(0.2))


async def test_second_rollouter_of_the_same_name_is_refused_while_the_first_lives(place: Place) -> None:
    elsewhere = place.spool_dir.with_name("other-spool")
    async with place.hub(), place.link() as link:
        await soon(link.wait_connected(30))
        async with place.link(spool_dir=elsewhere) as second:
            with pytest.raises(Refused, match="rollouter"):
                await soon(second.wait_connected(30))
        await soon(link.offer(sample(0)))


async def test_second_trainer_at_the_same_address_is_refused_while_the_first_lives(place: Place) -> None:
    async with place.hub(), place.link() as link:
        await soon(link.wait_connected(30))
        with pytest.raises(AddressInUse):
            async with place.hub(incarnation="second"):
                raise AssertionError("two trainers listen at one address")
        await soon(link.offer(sample(0)))


async def _accept(_body: Message) -> Accepted:
    return Accepted()
