"""Who is at the other end of the bus, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a client of the bus may do: a rollouter offers samples and publishes its state, a console only asks."""

    ROLLOUTER = "rollouter"
    CONSOLE = "console"


class PeerState(StrEnum):
    """How a client sees the trainer."""

    CONNECTING = "connecting"
    """Not seen yet."""
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    """The connection broke less than the heartbeat timeout ago; it is being made again."""
    LEFT = "left"
    """Said goodbye."""
    LOST = "lost"
    """Silent for longer than the heartbeat timeout."""
    REFUSED = "refused"


class LossReason(StrEnum):
    """Why a peer is gone."""

    SILENT = "silent"
    """Nothing was heard of it for the heartbeat timeout."""
    LEFT = "left"
    """It closed its end in good order."""
    REPLACED = "replaced"
    """Another process took its place: what the old one had in flight will never come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPeer:
    name: str
    reason: LossReason
    silent_s: float
    """Seconds since it was last heard."""
    epoch: int = 0
    """Which life of its name it was: the epoch of its samples; 0 for a trainer."""
    problem: str = ""
    """Why nothing can be heard of it, where that is known: the broker between the two is gone."""

    def __str__(self) -> str:
        why = f": {self.problem}" if self.problem else ""
        return f"{self.name} is gone ({self.reason}), last heard {self.silent_s:.1f} s ago{why}"
