"""How many groups the next batch takes while `samples_per_step` may change. Pure.

Invariant: a batch is of the size in force when it is taken. One exception: after the size was raised, batches are of the
smaller size for as long as the bus is full of what was admitted under it. Admission keeps room for a step of the size that it
knew, so what is under way may fill the bus before a larger step is whole, and only a step could make room.
"""

from __future__ import annotations


class BatchSize:
    def __init__(self, groups: int) -> None:
        self._smallest = groups
        """In force since the last batch of full size: what is under way was admitted under this size or a larger one."""

    def note(self, groups: int) -> None:
        """The size in force is another one now."""
        self._smallest = min(self._smallest, groups)

    def is_raised(self, groups: int) -> bool:
        """Whether a batch may have to be smaller than the size in force."""
        return self._smallest < groups

    def choose(self, groups: int, *, ready: int, is_full: bool) -> int | None:
        """How many of the `ready` groups make the next batch; None: it waits. `is_full`: the bus takes no more records."""
        self.note(groups)
        if ready >= groups:
            self._smallest = groups
            return groups
        return self._smallest if is_full and ready >= self._smallest else None
