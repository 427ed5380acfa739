"""Work that becomes due all at once, a part of it in each turn of the event loop, so that everything else gets its turns too.

New weights wake every request that waited for them, and a version admits as many rollouts as a step takes: what each of them
does next is short, but hundreds of them in one turn of the loop are a loop that answers nobody meanwhile. Invariant: whoever
comes first passes first; while fewer come than may pass in a turn, nobody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Engine, Generation, SamplingParams

TURN_S = 0.01
"""A turn of the loop that takes longer had too many in it."""
MAX_WIDTH = 64


def next_width(width: int, num_passed: int, took_s: float) -> int:
    """How many may pass in the next turn of the loop, when the last one, in which `num_passed` of `width` did, took so long."""
    if took_s > TURN_S and num_passed:
        return max(1, min(width, num_passed) // 2)
    return min(MAX_WIDTH, width + 1) if num_passed >= width else width


class Turnstile:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._width = MAX_WIDTH // 4
        self._left = self._width
        """That may still pass in this turn."""
        self._queue: deque[asyncio.Future[None]] = deque()
        self._turned_at = 0.0
        self._is_turning = False

    @property
    def num_waiting(self) -> int:
        return sum(not waiting.done() for waiting in self._queue)

    async def enter(self) -> None:
        """Return in this turn of the loop, or in a later one after those who came before."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning, self._turned_at = True, self._clock()
            loop.call_soon(self._turn, loop)
        if self._left and not self._queue:
            self._left -= 1
            return
        place = loop.create_future()
        self._queue.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once in each turn of the loop, as long as anyone comes."""
        now = self._clock()
        num_passed = self._width - self._left
        self._width = self._left = next_width(self._width, num_passed, now - self._turned_at)
        self._turned_at = now
        self._is_turning = bool(num_passed or self._queue)
        while self._queue and self._left:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= 1
        if self._is_turning:
            loop.call_soon(self._turn, loop)


class PacedEngine:
    """An engine whose requests pass a turnstile, and so do failures; replies do not: they are to be recorded at once."""

    def __init__(self, engine: Engine, turnstile: Turnstile) -> None:
        self._engine = engine
        self._turnstile = turnstile

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        """As the engine."""
        await self._turnstile.enter()
        try:
            return await self._engine.generate(prompt_ids, sampling, request_id=request_id)
        except Exception:
            await self._turnstile.enter()
            raise
