"""Who gets the next request: the engine that has the KV cache of what the request goes on from, or the least loaded one that
serves. Those that go on come first, then the others in order of arrival. Pure but for the futures it fills.

Invariant: an engine has at most as many requests as it decodes together, so none waits inside an engine, where it would pass
from one policy version to the next unseen; those beyond wait here. Rollouts that have begun are not held up by those that have
not: however many wait, at most twice as many are under way as there are seats. While engines switch one after another, those
that have not switched serve on, but never a session that has seen the newer version.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

from rollouter.engine_member import EngineState, Held, Member

_REMEMBERED = 4096
"""Sessions of which the engine that served them last is known."""


def least_loaded(
    members: Sequence[Member], held: Held | None, *, before: Member | None = None, also: Held | None = None
) -> Member | None:
    """The serving engine that holds `held` and has a free seat: `before` if it is one, else the one with the smallest share of
    its seats taken. Those that hold `also` count too, unless the engine before holds something else."""
    if before is not None and before.held != also:
        also = None
    free = [
        member
        for member in members
        if member.state is EngineState.SERVING
        and (member.held == held or (also is not None and member.held == also))
        and member.in_flight < member.max_requests
    ]
    if before is not None and before in free:
        return before
    return min(free, key=lambda member: member.in_flight / member.max_requests, default=None)


Waiting = tuple[asyncio.Future[Member], str]
"""And its session."""


class Seats:
    """Hands out seats; `refresh` after any change of an engine's state."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._going_on: deque[Waiting] = deque()
        self._waiting: deque[Waiting] = deque()
        self._served_by: OrderedDict[str, Member] = OrderedDict()
        """By session; the one that was served last comes last."""
        self._lost: Exception | None = None
        self.held: Held | None = None
        """The version that counts: the one committed last. Engines that hold another one get nothing."""
        self.also: Held | None = None
        """The version before, while engines switch one after another: those that hold it serve on until it is their turn."""

    @property
    def num_waiting(self) -> int:
        return len(self._going_on) + len(self._waiting)

    async def take(self, session: str = "") -> Member:
        """A seat for a request of `session`; waits for one. Give it back with `give_back`. Raises what `fail` was told."""
        if self._lost is not None:
            raise self._lost
        queue = self._going_on if session in self._served_by else self._waiting
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        queue.append((future, session))
        self.refresh()
        if future.done():
            return future.result()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            elif (future, session) in queue:
                queue.remove((future, session))
            raise

    def give_back(self, member: Member) -> None:
        member.leave()
        self.refresh()

    def refresh(self) -> None:
        """Hand free seats to those that wait: first those that go on, then the others, each first come first served."""
        while (found := self._next()) is not None:
            queue, entry, member = found
            future, session = entry
            member.enter()
            queue.remove(entry)
            self._remember(session, member)
            future.set_result(member)

    def _next(self) -> tuple[deque[Waiting], Waiting, Member] | None:
        """Whose turn it is, and where. Only while engines switch one after another may one who waits for those that have
        switched be passed by those who need not."""
        for queue in (self._going_on, self._waiting):
            while queue and queue[0][0].done():
                queue.popleft()
            for entry in queue:
                member = least_loaded(self._members, self.held, before=self._served_by.get(entry[1]), also=self.also)
                if member is not None and not entry[0].done():
                    return queue, entry, member
                if self.also is None or self._is_full():
                    return None
        return None

    def _is_full(self) -> bool:
        return least_loaded(self._members, self.held, also=self.also) is None

    def version_at(self, member: Member) -> Held | None:
        """The version with which the engine may serve now."""
        return self.also if self.also is not None and member.held == self.also else self.held

    def fail(self, error: Exception) -> None:
        """No engine will ever serve again: whoever waits, or comes later, gets `error`."""
        self._lost = error
        for queue in (self._going_on, self._waiting):
            for future, _ in queue:
                if not future.done():
                    future.set_exception(error)
            queue.clear()

    def _remember(self, session: str, member: Member) -> None:
        if not session:
            return
        self._served_by[session] = member
        self._served_by.move_to_end(session)
        if len(self._served_by) > _REMEMBERED:
            self._served_by.popitem(last=False)
