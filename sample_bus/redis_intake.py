"""One producer's stream as its consumer reads it: what is read, what may be handed over, what is missing. Pure.

Invariant: records are handed over in order, each once, no number left out, and within the room that was given; what is read
beyond the room is held, and nothing more is read meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sample_bus.redis_entries import READ_BYTES

FIRST_COUNT = 8
LARGEST_COUNT = 256


@dataclass(frozen=True, slots=True)
class Entry:
    seq: int
    fields: Sequence[bytes] | None
    """Fields and values; None: the stream has no such entry any more."""

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.fields[1::2])) if self.fields is not None else 0


class Intake:
    def __init__(self, producer: str, key: str, epoch: int, first: int, *, max_bytes: int | None = None) -> None:
        """`max_bytes`: of a record; a larger one will be refused, so it needs no room."""
        self._max_bytes = max_bytes
        self.producer = producer
        self.key = key
        self.epoch = epoch
        self.reads_pending = True
        """Entries that were delivered before and are not acknowledged come first."""
        self._next_read = self._next = first
        self._held: deque[Entry] = deque()
        self._limit = self._received = first
        self._room_bytes = 0
        self._flying: deque[int] = deque()
        """Bytes of the records handed over, from `received` on."""
        self._flying_bytes = 0
        self._mean_bytes = 0.0

    @property
    def next_read(self) -> int:
        return self._next_read

    def open_room(self, *, received: int, limit: int, room_bytes: int) -> None:
        """The consumer holds everything below `received`; it takes records below `limit`, and `room_bytes` from there on."""
        while self._received < received and self._flying:
            self._flying_bytes -= self._flying.popleft()
            self._received += 1
        self._received = max(self._received, received)
        self._limit, self._room_bytes = limit, room_bytes

    def count(self) -> int:
        """How many entries to read now; 0: none."""
        room = self._limit - self._next_read
        if self._held or room <= 0 or self._flying_bytes >= self._room_bytes:
            return 0
        if not self._mean_bytes:
            return min(room, FIRST_COUNT)
        fitting = min(READ_BYTES, self._room_bytes - self._flying_bytes) / self._mean_bytes
        return max(1, min(room, LARGEST_COUNT, int(fitting)))

    def gap_before(self, seq: int) -> range:
        """Numbers that should have come before the entry `seq`, which was read."""
        return range(self._next_read, seq)

    def take(self, entry: Entry) -> None:
        """An entry was read; one that was read before is passed over."""
        if entry.seq < self._next_read:
            return
        assert entry.seq == self._next_read, f"{self.key}: entry {entry.seq}, expected {self._next_read}"
        self._next_read += 1
        self._held.append(entry)
        if entry.fields is not None:
            self._mean_bytes = entry.nbytes if not self._mean_bytes else 0.8 * self._mean_bytes + 0.2 * max(1, entry.nbytes)

    def hand_over(self) -> Entry | None:
        """The next record that may be handed over."""
        if not self._held or self._next >= self._limit:
            return None
        nbytes = self._held[0].nbytes
        is_refused = self._max_bytes is not None and nbytes > self._max_bytes
        if not is_refused and self._flying_bytes + nbytes > self._room_bytes:
            return None
        self._next += 1
        self._flying.append(nbytes)
        self._flying_bytes += nbytes
        return self._held.popleft()
