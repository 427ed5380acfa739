"""Who gets the next request: the engine that has the KV cache of what the request goes on from, the one that has read the same
prompt for a sibling, unless it is loaded beyond its share, or the least loaded one that serves. Those that go on come first,
then the others in order of arrival. Pure but for the futures it fills.

Invariant: an engine has at most as many requests as it decodes together, so none waits inside an engine, where it would pass
from one policy version to the next unseen; those beyond wait here. Rollouts that have begun are not held up by those that have
not: however many wait, at most twice as many are under way as there are seats. While engines switch one after another, those
that have not switched serve on, but never a session that has seen the newer version.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from fractions import Fraction

from rollouter.engine_member import EngineState, Held, Member

_REMEMBERED = 4096
"""Sessions, and prompts, of which the engine that served them last is known."""
_SHARE = Fraction(5, 4)
"""How far beyond its even share an engine may be loaded by prompts that it has read already. Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018): the bound is ceil(c m / n) with c > 1."""


def least_loaded(
    members: Sequence[Member],
    held: Held | None,
    *,
    before: Member | None = None,
    also: Held | None = None,
    home: Member | None = None,
) -> Member | None:
    """The serving engine that holds `held` and has a free seat: `before` if it is one, else `home` if that is one and not
    loaded beyond its share, else the one with the smallest share of its seats taken. Those that hold `also` count too, unless
    the engine before holds something else."""
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
    if home is not None and home in free and home.in_flight < _bound(home, members):
        return home
    return min(free, key=lambda member: member.in_flight / member.max_requests, default=None)


def _bound(home: Member, members: Sequence[Member]) -> int:
    """Requests that `home` may have, this one included, before its prompts' siblings go elsewhere."""
    serving = [member for member in members if member.state is EngineState.SERVING]
    load = sum(member.in_flight for member in serving) + 1
    return math.ceil(_SHARE * load * home.max_requests / sum(member.max_requests for member in serving))


Waiting = tuple[asyncio.Future[Member], str, int | None]
"""Its session, and which prompt it begins with."""


class Seats:
    """Hands out seats; `refresh` after any change of an engine's state."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._going_on: deque[Waiting] = deque()
        self._waiting: deque[Waiting] = deque()
        self._served_by: OrderedDict[str, Member] = OrderedDict()
        """By session; the one that was served last comes last."""
        self._homes: OrderedDict[int, tuple[Member, Held | None]] = OrderedDict()
        """By prompt: who read it last, and under which weights."""
        self._lost: Exception | None = None
        self.held: Held | None = None
        """The version that counts: the one committed last. Engines that hold another one get nothing."""
        self.also: Held | None = None
        """The version before, while engines switch one after another: those that hold it serve on until it is their turn."""

    @property
    def num_waiting(self) -> int:
        return len(self._going_on) + len(self._waiting)

    async def take(self, session: str = "", *, prompt: int | None = None) -> Member:
        """A seat for a request of `session`; waits for one. Give it back with `give_back`. `prompt` tells equal prompts of
        different sessions. Raises what `fail` was told."""
        if self._lost is not None:
            raise self._lost
        queue = self._going_on if session in self._served_by else self._waiting
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        entry = (future, session, prompt)
        queue.append(entry)
        self.refresh()
        if future.done():
            return future.result()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            elif entry in queue:
                queue.remove(entry)
            raise

    def give_back(self, member: Member) -> None:
        member.leave()
        self.refresh()

    def refresh(self) -> None:
        """Hand free seats to those that wait: first those that go on, then the others, each first come first served."""
        while (found := self._next()) is not None:
            queue, entry, member = found
            future, session, prompt = entry
            member.enter()
            queue.remove(entry)
            self._remember(session, prompt, member)
            future.set_result(member)

    def _next(self) -> tuple[deque[Waiting], Waiting, Member] | None:
        """Whose turn it is, and where. Only while engines switch one after another may one who waits for those that have
        switched be passed by those who need not."""
        for queue in (self._going_on, self._waiting):
            while queue and queue[0][0].done():
                queue.popleft()
            for entry in queue:
                before = self._served_by.get(entry[1])
                home = None if before is not None or entry[2] is None else self._home_of(entry[2])
                member = least_loaded(self._members, self.held, before=before, also=self.also, home=home)
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
            for future, _, _ in queue:
                if not future.done():
                    future.set_exception(error)
            queue.clear()

    def _home_of(self, prompt: int) -> Member | None:
        """The engine whose cache still holds the prompt as its weights read it."""
        member, held = self._homes.get(prompt, (None, None))
        return member if member is not None and member.held == held else None

    def _remember(self, session: str, prompt: int | None, member: Member) -> None:
        if prompt is not None:
            self._homes[prompt] = (member, member.held)
            self._homes.move_to_end(prompt)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        if not session:
            return
        self._served_by[session] = member
        self._served_by.move_to_end(session)
        if len(self._served_by) > _REMEMBERED:
            self._served_by.popitem(last=False)
