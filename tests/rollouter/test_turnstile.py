"""What becomes due at once passes in portions, in the order in which it came."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import SamplingParams
from agent_loop.errors import EngineUnavailable
from rollouter.turnstile import MAX_WIDTH, TURN_S, PacedEngine, Turnstile, next_width
from tests.fakes.fake_engine import Call
from tests.rollouter.playing import engine_at

WIDTHS = st.integers(1, MAX_WIDTH)


@given(WIDTHS, WIDTHS, st.floats(0, 10))
def test_a_turn_that_took_long_lets_fewer_pass_and_a_full_short_one_lets_more(
    width: int, num_passed: int, took_s: float
) -> None:
    num_passed = min(width, num_passed)
    after = next_width(width, num_passed, took_s)
    assert 1 <= after <= MAX_WIDTH
    if took_s > TURN_S:
        assert after < width or after == width == 1
    else:
        assert after == (min(MAX_WIDTH, width + 1) if num_passed == width else width)


async def turns_of(turnstile: Turnstile, comers: int) -> list[int]:
    """In which turn of the loop each of those who come at once passes."""
    turn, passed = 0, list[int]()

    async def come(number: int) -> None:
        await turnstile.enter()
        order.append(number)
        passed.append(turn)

    order: list[int] = []
    coming = [asyncio.create_task(come(number)) for number in range(comers)]
    while not all(one.done() for one in coming):
        turn += 1
        await asyncio.sleep(0)
    assert order == list(range(comers))
    return passed


async def test_a_few_pass_at_once_and_a_crowd_in_portions() -> None:
    """B160: five hundred rollouts that go on at once take many turns of the loop, not one."""
    turnstile = Turnstile(clock=lambda: 0.0)
    assert len(set(await turns_of(turnstile, 5))) == 1
    passed = Counter(await turns_of(turnstile, 500))
    assert len(passed) > 8
    assert max(passed.values()) <= MAX_WIDTH
    assert turnstile.num_waiting == 0


async def test_slow_turns_make_the_portions_small() -> None:
    clock = iter(range(10_000))
    assert max(Counter((await turns_of(Turnstile(clock=lambda: float(next(clock))), 60))[30:]).values()) == 1


async def test_one_that_is_cancelled_while_it_waits_gives_its_place_away() -> None:
    turnstile = Turnstile(clock=lambda: 0.0)
    coming = [asyncio.create_task(turnstile.enter()) for _ in range(100)]
    await asyncio.sleep(0)
    coming[50].cancel()
    async with asyncio.timeout(30):
        await asyncio.wait(coming)
    assert [number for number, one in enumerate(coming) if one.cancelled()] == [50]


@pytest.mark.parametrize("fails", [False, True])
async def test_requests_and_failures_pass_in_portions_and_replies_at_once(fails: bool) -> None:
    """B38: a reply that waited for its turn would be lost with its process."""
    gate, turn, asked, came = asyncio.Event(), 0, list[int](), list[int]()

    async def hold(call: Call) -> None:
        asked.append(turn)
        await gate.wait()
        if fails:
            raise EngineUnavailable("the test broke it")

    engine = PacedEngine(await engine_at(0, before_reply=hold, reply=lambda *_: [1]), Turnstile(clock=lambda: 0.0))
    prompt = np.array([1], np.int32)

    async def ask(number: int) -> None:
        try:
            await engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=1), request_id=f"r/{number}.0-0")
        except EngineUnavailable:
            assert fails
        came.append(turn)

    asking = [asyncio.create_task(ask(number)) for number in range(200)]
    async with asyncio.timeout(30):
        while not all(one.done() for one in asking):
            turn += 1
            if len(asked) == 200:
                gate.set()
            await asyncio.sleep(0)
    for one in asking:
        one.result()
    assert max(Counter(asked).values()) <= MAX_WIDTH
    assert (max(Counter(came).values()) <= MAX_WIDTH) == fails
