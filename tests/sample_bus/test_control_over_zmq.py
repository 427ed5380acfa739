from __future__ import annotations

import asyncio
import contextlib

import pytest

from sample_bus.errors import BusError, RequestFailed, WireError
from sample_bus.frames import Reply, Request, TopicValue, Welcome
from sample_bus.messages import (
    Accepted,
    ChangeSettings,
    EvaluationRequest,
    Failed,
    Message,
    RollouterState,
    RollouterStatus,
    SettingsChanged,
    TrainerState,
    TrainerStatus,
)
from sample_bus.topics import encode_body
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import RawClient, hub_at, link_to, pair, soon, until


def trainer_at(step: int) -> TrainerStatus:
    return TrainerStatus(state=TrainerState.TRAINING, incarnation="first", step=step)


async def accept(_body: Message) -> Accepted:
    return Accepted()


async def test_late_joiner_gets_every_topic_at_once(address: str) -> None:
    async with hub_at(address) as hub:
        await hub.publish("trainer", trainer_at(3))
        await hub.publish("evaluate", EvaluationRequest(incarnation="t1", request_id=1, policy_version=2))
        async with link_to(address) as link:
            await link.wait_connected(30)
            assert link.get("trainer", TrainerStatus) == trainer_at(3)
            assert link.get("evaluate", EvaluationRequest) == EvaluationRequest(
                incarnation="t1", request_id=1, policy_version=2
            )
            assert link.get("round", TrainerStatus) is None


async def test_watcher_sees_rising_values_and_the_last_one(address: str) -> None:
    async with pair(address) as (hub, link):

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
        assert hub.get("trainer", TrainerStatus) == trainer_at(199)


async def test_rollouters_topic_reaches_the_trainer_and_every_console(address: str) -> None:
    status = RollouterStatus(state=RollouterState.GENERATING, policy_version=4)
    async with pair(address) as (hub, link), link_to(address, name="a", role="console") as early:
        await early.wait_connected(30)
        await link.publish("rollouter", status)
        assert link.get("rollouter", RollouterStatus) == status
        for watcher in (hub.watch("rollouter", RollouterStatus), early.watch("rollouter", RollouterStatus)):
            assert await soon(anext(watcher)) == status
        async with link_to(address, name="b", role="console") as late:
            await late.wait_connected(30)
            assert late.get("rollouter", RollouterStatus) == status


async def test_value_published_while_the_trainer_is_away_reaches_it_when_it_comes(address: str) -> None:
    async with link_to(address) as link:
        for version in range(3):
            await link.publish("rollouter", RollouterStatus(state=RollouterState.STARTING, policy_version=version))
        async with hub_at(address) as hub:
            first = await soon(anext(hub.watch("rollouter", RollouterStatus)))
            assert first.policy_version == 2


async def test_console_publishes_nothing_and_offers_nothing(address: str) -> None:
    async with hub_at(address), link_to(address, name="top", role="console") as console:
        await console.wait_connected(30)
        with pytest.raises(BusError, match="top is a console"):
            await console.publish("rollouter", Accepted())
        with pytest.raises(BusError, match="top is a console"):
            await console.offer(make_sample())


async def test_client_cannot_overwrite_the_trainers_topics(address: str) -> None:
    forged = TopicValue(name="trainer", revision=99, value=encode_body(trainer_at(99)))
    async with hub_at(address) as hub:
        await hub.publish("trainer", trainer_at(1))
        for role in ("rollouter", "console"):
            with RawClient(address, epoch=len(role)) as client:
                await client.greet(role=role)
                await client.next(Welcome)
                await client.say(forged)
                await client.say(Request(id=1, name="round trip", body=b""))
                await client.next(Reply)
                assert hub.get("trainer", TrainerStatus) == trainer_at(1)


async def test_topic_of_the_wrong_kind_is_an_error_that_names_it(address: str) -> None:
    async with pair(address) as (hub, link):
        await hub.publish("trainer", Failed(message="no status"))
        with pytest.raises(WireError, match=r"topic trainer: TrainerStatus\.state"):
            await soon(anext(link.watch("trainer", TrainerStatus)))


async def test_request_is_answered_with_the_handlers_reply(address: str) -> None:
    async def change(body: ChangeSettings) -> SettingsChanged:
        assert body.values == {"staleness_threshold": 1.5}
        return SettingsChanged(revision=8, changes=())

    async with pair(address) as (hub, link):
        hub.handle("settings.set", ChangeSettings, change)
        body = ChangeSettings(values={"staleness_threshold": 1.5}, author="test")
        assert (await soon(link.request("settings.set", body, SettingsChanged))).revision == 8
        assert (await soon(hub.request("settings.set", body, SettingsChanged))).revision == 8


async def test_handlers_error_comes_back_in_its_own_words(address: str) -> None:
    async def refuse(_body: Message) -> Accepted:
        raise ValueError("staleness_threshold: got -1, expected >= 0")

    async with pair(address) as (hub, link):
        hub.handle("settings.set", ChangeSettings, refuse)
        body = ChangeSettings(values={}, author="test")
        for end in (link, hub):
            with pytest.raises(RequestFailed, match=r"^settings\.set: staleness_threshold: got -1, expected >= 0$"):
                await soon(end.request("settings.set", body, SettingsChanged))


async def test_unknown_request_and_wrong_body_are_refused_by_name(address: str) -> None:
    async with pair(address) as (hub, link):
        hub.handle("run.failed", Failed, accept)
        with pytest.raises(RequestFailed, match=r"no request 'run\.fialed'; known: run\.failed"):
            await soon(link.request("run.fialed", Failed(message=""), Accepted))
        with pytest.raises(RequestFailed, match=r"request run\.failed: Failed\.message: Field required"):
            await soon(
                link.request("run.failed", EvaluationRequest(incarnation="t1", request_id=1, policy_version=1), Accepted)
            )
        with pytest.raises(RequestFailed, match=r"known: run\.failed"):
            await soon(hub.request("nothing", Accepted(), Accepted))


async def test_slow_request_fails_at_its_deadline_and_does_not_hold_up_others(address: str) -> None:
    release = asyncio.Event()

    async def slow(_body: Message) -> Accepted:
        await release.wait()
        return Accepted()

    async with pair(address) as (hub, link):
        hub.handle("slow", Accepted, slow)
        hub.handle("quick", Accepted, accept)
        waiting = asyncio.create_task(link.request("slow", Accepted(), Accepted, timeout_s=0.2))
        await soon(link.request("quick", Accepted(), Accepted))
        with pytest.raises(RequestFailed, match=r"slow: no answer from the trainer within 0\.2 s \(it is connected\)"):
            await soon(waiting)
        with pytest.raises(RequestFailed, match=r"within 0\.1 s"):
            await soon(hub.request("slow", Accepted(), Accepted, timeout_s=0.1))
        release.set()


async def test_request_made_before_the_trainer_exists_is_answered_when_it_comes(address: str) -> None:
    async with link_to(address) as link:
        asked = asyncio.create_task(link.request("quick", Accepted(), Accepted))
        await asyncio.sleep(0.1)
        async with hub_at(address) as hub:
            hub.handle("quick", Accepted, accept)
            assert await soon(asked) == Accepted()


async def test_request_without_any_trainer_names_the_state_at_its_deadline(address: str) -> None:
    async with link_to(address) as link:
        with pytest.raises(RequestFailed, match=r"within 0\.1 s \(it is connecting\)"):
            await soon(link.request("quick", Accepted(), Accepted, timeout_s=0.1))


async def test_repeated_request_is_carried_out_once_and_answered_again(address: str) -> None:
    calls = 0
    release = asyncio.Event()

    async def count(_body: Message) -> Accepted:
        nonlocal calls
        calls += 1
        await release.wait()
        return Accepted()

    request = Request(id=1, name="count", body=encode_body(Accepted()))
    async with hub_at(address) as hub:
        hub.handle("count", Accepted, count)
        for attempt in range(3):  # the same process over three connections
            with RawClient(address) as client:
                await client.greet()
                await client.next(Welcome)
                await client.say(request)
                await until(lambda: calls == 1)
                if attempt:
                    release.set()
                    assert (await client.next(Reply)).ok
        assert calls == 1


async def test_thousand_requests_at_once_each_get_their_own_answer(address: str) -> None:
    async def echo(body: Failed) -> Failed:
        return body

    async with pair(address) as (hub, link):
        hub.handle("echo", Failed, echo)
        answers = await soon(asyncio.gather(*(link.request("echo", Failed(message=str(n)), Failed) for n in range(1000))))
        assert [answer.message for answer in answers] == [str(n) for n in range(1000)]


async def test_watchers_end_when_their_end_is_closed(address: str) -> None:
    async with hub_at(address) as hub, contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(link_to(address))
        watching = asyncio.ensure_future(anext(link.watch("trainer", TrainerStatus), None))
        await asyncio.sleep(0)
        await stack.aclose()
        assert await soon(watching) is None
        assert hub.get("trainer", TrainerStatus) is None


async def test_a_request_that_will_have_a_handler_waits_for_it(address: str) -> None:
    """A trainer that comes again is asked before its model is loaded."""
    async with pair(address) as (hub, link):
        hub.expect(["round.result"])
        early = asyncio.create_task(link.request("round.result", Accepted(), Accepted))
        with pytest.raises(RequestFailed, match="knows no request 'other'"):
            await link.request("other", Accepted(), Accepted)
        assert not early.done()
        hub.handle("round.result", Accepted, accept)
        assert await soon(early) == Accepted()
