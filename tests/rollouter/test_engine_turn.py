"""Engines that switch one after another: whose turn it is, and for how long at most."""

from __future__ import annotations

import asyncio

from rollouter.engine_turn import Turn

WAIT_S = 30.0


async def test_the_next_engine_has_its_turn_when_the_switch_before_has_ended() -> None:
    lock = asyncio.Lock()
    order: list[str] = []

    async def switch(name: str) -> None:
        async with Turn(lock) as turn:
            turn.end_in(3600.0)
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(switch("a"), switch("b"))
    assert order == ["a begins", "a ends", "b begins", "b ends"]
    assert not lock.locked()


async def test_a_turn_is_passed_on_at_its_deadline_and_only_once() -> None:
    """The engine that was late ends while the next one switches: it does not take that one's turn away."""
    lock = asyncio.Lock()
    async with asyncio.timeout(WAIT_S):
        late, on_time = Turn(lock), Turn(lock)
        await late.__aenter__()
        late.end_in(0.01)
        async with on_time:
            await late.__aexit__(None, None, None)
            assert lock.locked()
        assert not lock.locked()


async def test_engines_that_switch_together_wait_for_nobody() -> None:
    async with asyncio.timeout(WAIT_S), Turn(None) as first, Turn(None) as second:
        first.end_in(3600.0)
        second.end_in(3600.0)
