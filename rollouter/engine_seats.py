"""Who gets the next request: the least loaded engine that serves, in order of arrival. Pure but for the futures it fills.

Invariant: an engine has at most as many requests as it decodes together, so none waits inside an engine, where it would pass
from one policy version to the next unseen; those beyond wait here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from rollouter.engine_member import EngineState, Held, Member


def least_loaded(members: Sequence[Member], held: Held | None) -> Member | None:
    """The serving engine that holds `held` and has the smallest share of its seats taken, if it has a free one."""
    free = [
        member
        for member in members
        if member.state is EngineState.SERVING and member.held == held and member.in_flight < member.max_requests
    ]
    return min(free, key=lambda member: member.in_flight / member.max_requests, default=None)


class Seats:
    """Hands out seats; `refresh` after any change of an engine's state."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._waiting: deque[asyncio.Future[Member]] = deque()
        self._lost: Exception | None = None
        self.held: Held | None = None
        """The version that counts: the one committed last. Engines that hold another one get nothing."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self) -> Member:
        """A seat; waits for one. Give it back with `give_back`. Raises what `fail` was told."""
        if self._lost is not None:
            raise self._lost
        if not self._waiting:
            member = least_loaded(self._members, self.held)
            if member is not None:
                member.enter()
                return member
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            elif future in self._waiting:
                self._waiting.remove(future)
            raise

    def give_back(self, member: Member) -> None:
        member.leave()
        self.refresh()

    def refresh(self) -> None:
        """Hand free seats to those that wait, first come first served."""
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            member = least_loaded(self._members, self.held)
            if member is None:
                return
            member.enter()
            self._waiting.popleft().set_result(member)

    def fail(self, error: Exception) -> None:
        """No engine will ever serve again: whoever waits, or comes later, gets `error`."""
        self._lost = error
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
