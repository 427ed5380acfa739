"""What a session has done so far, piece by piece: enough to take it up again in another process, on any engine.

Invariant: the pieces of a session, in order, are its whole state. A loop that is played again over them sees what it saw, asks
no engine for what was sampled and does no work twice whose result was noted, until the pieces are used up; then it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_loop.engine import Generation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """An observation: prompt, tool output."""

    token_ids: npt.NDArray[np.int32]
    """[n]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """A turn, or a part of one."""

    generation: Generation
    ends_turn: Literal["stop", "length"] | None
    """How the turn ended with this part; None: it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The result of work that must not be done twice (`Session.once`)."""

    value: bytes
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """A new segment began with a part of the context before (`Session.rewind`)."""

    num_tokens: int
    """That were kept."""


Piece = Shown | Sampled | Noted | Rewound


class Recorder(Protocol):
    """Keeps a session's pieces."""

    def asked(self, num_tokens: int) -> None:
        """So many tokens at most are being generated; a `Sampled` piece follows if they arrive."""
        ...

    def add(self, piece: Piece) -> None:
        """Keep the next piece: it survives this process once this returns."""
        ...

    async def add_sampled(self, piece: Sampled) -> None:
        """The same for what an engine sampled; replies that come together are kept together."""
        ...

    def spoil(self) -> None:
        """What follows cannot be played again over the pieces: they are worth nothing any more."""
        ...


class Unrecorded:
    """Keeps nothing."""

    def asked(self, num_tokens: int) -> None:
        return

    def add(self, piece: Piece) -> None:
        return

    async def add_sampled(self, piece: Sampled) -> None:
        return

    def spoil(self) -> None:
        return


def num_sampled(pieces: list[Piece]) -> int:
    """Tokens that an engine sampled."""
    return sum(int(piece.generation.token_ids.size) for piece in pieces if isinstance(piece, Sampled))
