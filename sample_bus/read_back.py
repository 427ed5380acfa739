"""Reading a producer's own copies back through its carrier. Lives in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from sample_bus.errors import BusError
from sample_bus.events import ReadBack

BATCH = 64
"""Records that are in memory at a time."""

Frames = tuple[bytes | memoryview, ...]


class Reader(Protocol):
    def read(self, first: int, last: int) -> None: ...


class ReadsBack:
    """Reads, one at a time."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._answer: asyncio.Future[ReadBack] | None = None
        self._turn = asyncio.Lock()
        self._failure: BusError | None = None

    async def read(self, first: int, last: int) -> AsyncIterator[Frames]:
        """Frames of the kept records first … last - 1, as far as they are still kept. Raises BusError when the bus closes."""
        while first < last:
            answer = await self._ask(first, min(first + BATCH, last))
            for record in answer.records:
                yield record
            reached = answer.first + len(answer.records)
            if reached <= first:
                return
            first = reached

    def take(self, answer: ReadBack) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def fail(self, failure: BusError) -> None:
        self._failure = self._failure or failure
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(failure)

    async def _ask(self, first: int, last: int) -> ReadBack:
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            self._answer = asyncio.get_running_loop().create_future()
            self._reader.read(first, last)
            return await self._answer
