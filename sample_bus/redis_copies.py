"""A producer's records in memory: those that the server has not taken, and those that the trainer has not received. Pure.

Invariant: what the server loses of the records that the trainer does not hold can be added again, in order; so an offer that
ended survives the death of the server even where the server keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Frames = Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Records that the server had taken and has no more."""

    first: int
    last: int
    """Numbers first … last - 1."""
    first_again: int
    """From here on they are added again; those before it are with the trainer, or nowhere."""


class Copies:
    def __init__(self, next_seq: int) -> None:
        """The stream as it was opened: the server has everything below `next_seq`."""
        self._frames: dict[int, Frames] = {}
        self._next_seq = next_seq
        self._stored = next_seq
        self._received = 0

    @property
    def stored(self) -> int:
        """The server has taken every record below it."""
        return self._stored

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @property
    def has_waiting(self) -> bool:
        return self._stored < self._next_seq

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(frame).nbytes for frames in self._frames.values() for frame in frames)

    def add(self, seq: int, frames: Frames) -> None:
        """The next record. Raises AssertionError for any other number."""
        assert seq == self._next_seq, f"record {seq}, expected {self._next_seq}"
        self._frames[seq] = frames
        self._next_seq = seq + 1

    def get(self, seq: int) -> Frames | None:
        return self._frames.get(seq)

    def batch(self, max_bytes: int) -> list[tuple[int, Frames]]:
        """The next records for the server: as many as fit into `max_bytes`, at least one."""
        batch: list[tuple[int, Frames]] = []
        size = 0
        for seq in range(self._stored, self._next_seq):
            frames = self._frames[seq]
            size += sum(memoryview(frame).nbytes for frame in frames)
            if batch and size > max_bytes:
                break
            batch.append((seq, frames))
        return batch

    def note_stored(self, upto: int) -> None:
        before, self._stored = self._stored, max(self._stored, upto)
        self._forget(range(before, min(self._stored, self._received)))

    def note_received(self, upto: int) -> None:
        """The trainer holds every record below `upto`."""
        if upto > self._received:
            before, self._received = self._received, upto
            self._forget(range(max(before, min(self._frames, default=0)), min(upto, self._stored)))

    def resume(self, top: int) -> Lost | None:
        """The server is there again and has had every record below `top`: what it lost waits again."""
        if top >= self._stored:
            self.note_stored(min(top, self._next_seq))
            return None
        before, first_copy = self._stored, min(self._frames, default=self._next_seq)
        self._stored = max(top, min(first_copy, before))
        return Lost(first=top, last=before, first_again=self._stored)

    def _forget(self, seqs: range) -> None:
        for seq in seqs:
            self._frames.pop(seq, None)
