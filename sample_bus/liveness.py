"""When a peer counts as silent. Pure: time is an argument.

Invariant: only time in which this process was able to listen counts as silence. A process that was stopped, suspended or
starved finds a large gap between two of its own ticks; such a gap is taken out of every peer's silence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Silence:
    """One peer."""

    last_heard: float
    reported: bool = False
    """`expired` has named it since it was last heard."""


class Liveness:
    def __init__(self, *, timeout_s: float, longest_tick_s: float, now: float) -> None:
        """`longest_tick_s`: two ticks further apart than that mean that this process did not run."""
        self._timeout_s = timeout_s
        self._longest_tick_s = longest_tick_s
        self._last_tick = now
        self._peers: dict[bytes, Silence] = {}

    def track(self, peer: bytes, now: float) -> None:
        self._peers[peer] = Silence(now)

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def heard(self, peer: bytes, now: float) -> bool:
        """Note a sign of life; True if the peer had been reported as silent."""
        silence = self._peers.get(peer)
        if silence is None:
            return False
        silence.last_heard = now
        was_silent, silence.reported = silence.reported, False
        return was_silent

    def silent_s(self, peer: bytes, now: float) -> float:
        silence = self._peers.get(peer)
        return 0.0 if silence is None else max(0.0, now - silence.last_heard)

    def tick(self, now: float) -> None:
        """Tell that this process ran; call it before `heard` and `expired` of the same moment."""
        gap = now - self._last_tick
        self._last_tick = now
        if gap > self._longest_tick_s:
            for silence in self._peers.values():
                silence.last_heard += gap

    def expired(self, now: float) -> list[tuple[bytes, float]]:
        """Peers newly silent beyond the timeout, each with its seconds of silence; each is named once."""
        found = []
        for peer, silence in self._peers.items():
            silent_s = now - silence.last_heard
            if silent_s > self._timeout_s and not silence.reported:
                silence.reported = True
                found.append((peer, silent_s))
        return found
