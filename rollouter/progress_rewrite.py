"""The progress log written anew beside itself, in portions, while it goes on being written.

Invariant: until it is done the log before it is whole and the only one that counts; when it is done, the new one tells of every
seat that has not ended what the old one did.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouter.progress_records import Asked, Began, Entry, Over, Place
from sample_bus.record_log import HEAD_BYTES, RecordLog


@dataclass(slots=True)
class Kept:
    """A seat's records in a log."""

    offsets: list[int] = field(default_factory=list)
    num_bytes: int = 0


def note(seats: dict[Place, Kept], place: Place, entry: Entry, *, offset: int, num_bytes: int) -> None:
    """An entry of so many bytes stands at `offset`: what of it is kept when the log is written anew."""
    match entry:
        case Began():
            seats[place] = Kept([offset], HEAD_BYTES + num_bytes)
        case Over():
            seats.pop(place, None)
        case Asked():
            pass
        case _ if place in seats:
            seats[place].offsets.append(offset)
            seats[place].num_bytes += HEAD_BYTES + num_bytes
        case _:
            pass


class Rewrite:
    """One new log in the making."""

    def __init__(
        self, old: RecordLog, seats: Mapping[Place, Kept], path: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seats`: what `old` keeps, as it changes. Raises OSError, JournalError."""
        path.unlink(missing_ok=True)
        self.log = RecordLog(path)
        self.seats: dict[Place, Kept] = {}
        """Seats that have come over, or have begun since."""
        self._old = old
        self._old_seats = seats
        self._todo = deque(seats)
        self._clock = clock

    def take(self, place: Place, entry: Entry, payload: bytes) -> None:
        """What was appended to the old log just now. Raises OSError."""
        if isinstance(entry, Began) or place in self.seats:
            note(self.seats, place, entry, offset=self.log.append(payload), num_bytes=len(payload))

    def copy(self, for_s: float) -> bool:
        """Copy seats for so long, one at least; whether that was all. Raises OSError, JournalDamaged."""
        until = self._clock() + for_s
        while self._todo:
            place = self._todo.popleft()
            kept = self._old_seats.get(place)
            if kept is not None and place not in self.seats:
                offsets = self.log.append_all([self._old.read(offset) for offset in kept.offsets])
                self.seats[place] = Kept(offsets, kept.num_bytes)
                if self._clock() >= until:
                    break
        return not self._todo

    def abandon(self) -> None:
        """It comes to nothing."""
        self.log.close()
        self.log.path.unlink(missing_ok=True)
