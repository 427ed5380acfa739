"""The state is published on changes, not more often than needed, and the token rate is over a sliding window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from rollouter.status import MIN_INTERVAL_S, Rate, StatusBoard
from sample_bus.messages import Message, RollouterState, RollouterStatus
from tests.fakes.fake_clock import FakeClock

M = TypeVar("M", bound=Message)


class RecordingControl:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.published: list[Message] = []
        self.changed = asyncio.Condition()

    def get(self, topic: str, kind: type[M]) -> M | None:
        return None

    def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        raise NotImplementedError

    async def publish(self, topic: str, value: Message) -> None:
        assert topic == "rollouter"
        async with self.changed:
            self.published.append(value)
            self.changed.notify_all()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: len(self.published) >= count)

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        raise NotImplementedError


def test_rate_is_the_growth_over_the_window() -> None:
    clock, rate = FakeClock(), Rate(window_s=10.0)
    assert rate.per_s() == 0.0
    for second in range(31):
        rate.take(clock(), 100 * second if second <= 20 else 2000)
        clock.advance(1.0)
    assert rate.per_s() == 0.0
    rate.take(clock(), 2110)
    assert rate.per_s() == pytest.approx(110 / 10, rel=0.1)


def test_rate_of_many_points_keeps_few() -> None:
    clock, rate = FakeClock(), Rate(window_s=10.0)
    for number in range(10_000):
        rate.take(clock(), number)
        clock.advance(0.001)
    assert rate.per_s() == pytest.approx(1000, rel=0.01)
    assert len(rate._points) <= 10.0 / MIN_INTERVAL_S + 2


async def test_burst_of_changes_is_one_message() -> None:
    control = RecordingControl()
    board = StatusBoard(control, lambda: RollouterStatus(state=RollouterState.GENERATING), heartbeat_interval_s=60.0)
    running = asyncio.create_task(board.run())
    for _ in range(100):
        board.change()
    await asyncio.sleep(0.02)
    board.change()
    await asyncio.sleep(0.02)
    assert len(control.published) == 1
    await control.wait(2)
    running.cancel()


async def test_state_is_published_at_each_heartbeat_without_a_change() -> None:
    control = RecordingControl()
    board = StatusBoard(control, lambda: RollouterStatus(state=RollouterState.AT_LIMIT), heartbeat_interval_s=0.01)
    running = asyncio.create_task(board.run())
    await control.wait(3)
    running.cancel()
