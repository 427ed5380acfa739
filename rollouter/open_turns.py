"""Turns between two of their requests: a turn that is asked for piece by piece is one piece of work for the engine.

Invariant: such a turn keeps its seat from one request to the next, so that nobody gets in between, a drain waits for its end,
and with `partial_rollout=keep` it goes on with its cache. A rollout that does not come back soon loses the seat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollouter.engine_member import EngineState, Held, Member, PartialRollout

_COMES_BACK_S = 2.0
"""Far more than a rollout needs to note what it has and to ask for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """Where a turn stands."""

    member: Member
    """Its seat is kept."""
    asked: Held
    """The version whose cache salt its last request bore."""
    fresh: Held | None
    """The version for which the engine's prefix cache had been emptied last."""
    num_tokens: int
    """Prompt and reply so far."""


class OpenTurns:
    """By session."""

    def __init__(self, give_back: Callable[[Member], None]) -> None:
        self._give_back = give_back
        self._open: dict[str, tuple[OpenTurn, asyncio.TimerHandle]] = {}

    def leave(self, session: str, turn: OpenTurn) -> None:
        """A request has ended, and the turn has not: its seat is kept."""
        self._drop(session)
        timer = asyncio.get_running_loop().call_later(_COMES_BACK_S, self._drop, session)
        self._open[session] = (turn, timer)

    def take_up(self, session: str, *, num_tokens: int) -> OpenTurn | None:
        """The open turn that a request with `num_tokens` goes on with; its seat is the caller's now. The seat of any other turn
        of this session is given back."""
        entry = self._open.get(session)
        if entry is None or entry[0].num_tokens != num_tokens:
            self._drop(session)
            return None
        turn, timer = self._open.pop(session)
        timer.cancel()
        return turn

    def close(self) -> None:
        """Keep no seat any longer."""
        for session in list(self._open):
            self._drop(session)

    def _drop(self, session: str) -> None:
        entry = self._open.pop(session, None)
        if entry is not None:
            turn, timer = entry
            timer.cancel()
            self._give_back(turn.member)


def goes_on_here(turn: OpenTurn, *, newest: Held | None) -> bool:
    """Whether the next request of a turn may be sent to its engine at once: it serves, or it is being drained of such turns."""
    member = turn.member
    return member.is_draining or (member.state is EngineState.SERVING and member.held == newest)


def salt_of(turn: OpenTurn | None, *, member: Member, held: Held, mode: PartialRollout) -> Held:
    """The version whose cache salt a request bears at an engine that holds `held`: that version, or, with `keep`, the one with
    which its turn went on so far, as long as the engine may still have that cache."""
    if turn is None or mode != "keep" or turn.member is not member:
        return held
    was_emptied = turn.fresh != member.fresh
    return held if was_emptied or turn.asked.incarnation != held.incarnation else turn.asked
