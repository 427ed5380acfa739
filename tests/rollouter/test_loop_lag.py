"""What blocks the event loop is measured and named."""

from __future__ import annotations

import asyncio
import threading
import time

from rollouter.loop_lag import BEAT_S, LoopLag


def blocking_reward(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_blocking_call_is_measured_and_named() -> None:
    """B162: a blocking call inside async code stalls every agent."""
    told: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
    lag = LoopLag(warn_s=0.1, on_block=lambda lag_s, where: told.put_nowait((lag_s, where)))
    beating = asyncio.create_task(lag.run())
    await asyncio.sleep(5 * BEAT_S)
    blocking_reward(0.6)
    async with asyncio.timeout(30):
        lag_s, where = await told.get()
        while lag_s < 0.4:  # a loaded machine may be late on its own before
            lag_s, where = await told.get()
    beating.cancel()
    await asyncio.wait((beating,))
    assert "blocking_reward" in where
    assert lag.worst_ms > 400
    assert lag.recent_ms > 400


async def test_its_thread_ends_with_it() -> None:
    lag = LoopLag(warn_s=0.05)
    beating = asyncio.create_task(lag.run())
    await asyncio.sleep(3 * BEAT_S)
    beating.cancel()
    await asyncio.wait((beating,))
    for thread in threading.enumerate():
        if thread.name == "loop-lag":
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive()


def test_the_window_forgets_and_the_worst_stays() -> None:
    lag = LoopLag(num_beats=2, on_block=lambda lag_s, where: None)
    for lag_s in (0.4, 0.001, -0.5):
        lag.take(lag_s)
    assert lag.recent_ms == 1.0
    assert lag.worst_ms == 400.0
