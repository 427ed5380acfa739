"""The rollouter's answers to the question which weights its engines hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_loop.errors import EngineUnavailable
from configs.schema import BusSettings
from rollouter.reports import Reports
from rollouter.weight_check import WeightChecker, unanswered, weights_of, worker_weights
from sample_bus.messages import Accepted, Message
from sample_bus.weight_checks import EngineWeights, WeightCheckRequest
from tests.fakes.fake_control import FakeControl

HELD: dict[str, Any] = {"policy_version": 3, "manifest_digest": "d", "checksums": {"a": "01"}}
FOUND: dict[str, Any] = {"policy_version": 3, "num_equal": 0, "different": ["a"], "unread": []}


class TwoEngines:
    """One that holds weights, and one that is dead."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    async def check_weights(self, *, effective: bool) -> list[EngineWeights]:
        self.asked.append(effective)
        held = unanswered("engine-0", "").model_copy(update={"workers": (worker_weights(HELD, FOUND),)})
        return [held, unanswered("engine-1", "it is dead")]


class Link(FakeControl):
    """A control channel of a link that has one trainer."""

    resumption = None

    async def watch(self, topic: str, kind: type[Any]) -> AsyncIterator[Any]:
        while True:
            self.changed.clear()
            value = self.get(topic, kind)
            if value is not None:
                yield value
            await self.changed.wait()


def request(number: int) -> WeightCheckRequest:
    return WeightCheckRequest(incarnation="i", request_id=number, effective=number == 1)


async def test_each_request_is_answered_once_for_every_engine() -> None:
    link, engines = Link(), TwoEngines()
    answers: asyncio.Queue[EngineWeights] = asyncio.Queue()

    async def take(answer: EngineWeights) -> Message:
        answers.put_nowait(answer)
        return Accepted()

    link.handle("weights.checked", EngineWeights, take)
    checker = WeightChecker(engines=engines, control=link, reports=Reports(link, BusSettings()))  # type: ignore[arg-type]
    running = asyncio.create_task(checker.run())
    try:
        async with asyncio.timeout(30):
            for number in (1, 2):
                await link.publish("weights_check", request(number))
                await link.publish("weights_check", request(number))  # said again, as to one that connects anew
                got = [await answers.get() for _ in range(2)]
                assert [(a.incarnation, a.request_id, a.num_engines, a.engine) for a in got] == [
                    ("i", number, 2, "engine-0"),
                    ("i", number, 2, "engine-1"),
                ]
                assert got[0].workers[0].different == ("a",)
                assert got[1].error == "it is dead"
    finally:
        running.cancel()
    assert engines.asked == [True, False]
    assert answers.empty()


class Client:
    """Answers worker methods, or raises."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        answer = self._answers[method]
        if isinstance(answer, Exception):
            raise answer
        return [answer]


@pytest.mark.parametrize(
    "answers",
    [
        {"headrace_checksums": EngineUnavailable("no answer")},
        {"headrace_checksums": {"policy_version": 3}},
        {"headrace_checksums": HELD, "headrace_verify": EngineUnavailable("no answer")},
        {"headrace_checksums": HELD | {"checksums": ["a"]}, "headrace_verify": FOUND},
    ],
)
async def test_an_engine_that_cannot_be_asked_is_an_answer(answers: dict[str, Any]) -> None:
    got = await weights_of("engine-0", Client(answers), effective=True, lock=asyncio.Lock())  # type: ignore[arg-type]
    assert got.error
    assert got.workers == ()


async def test_what_is_not_read_back_is_not_said_to_be_equal() -> None:
    client = Client({"headrace_checksums": HELD})
    got = await weights_of("engine-0", client, effective=False, lock=asyncio.Lock())  # type: ignore[arg-type]
    assert got.workers[0].checksums == {"a": "01"}
    assert got.workers[0].num_equal is None


async def test_an_engine_is_asked_between_two_rounds() -> None:
    lock = asyncio.Lock()
    client = Client({"headrace_checksums": HELD})
    async with lock:
        asking = asyncio.create_task(weights_of("e", client, effective=False, lock=lock))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not asking.done()
    assert (await asking).workers
