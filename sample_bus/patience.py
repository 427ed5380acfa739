"""Long waits that say what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from sample_bus.feed import Feed

NOTICE_S = 5.0
"""How often a long wait is worth a line."""


async def patient(feed: Feed[Any], timeout_s: float) -> AsyncIterator[float | None]:
    """Yield at once and after each event or pulse of `feed` (None: look again), and every few seconds how long it has been in
    seconds (say so). Ends at the deadline, after a last look.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    yield None
    while (waited_s := loop.time() - started) < timeout_s:
        try:
            async with asyncio.timeout(min(NOTICE_S, timeout_s - waited_s)):
                await feed.wait_next()
        except TimeoutError:
            yield round(loop.time() - started, 1)
        else:
            yield None
