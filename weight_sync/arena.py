"""Memory for sets of weights, faulted in once and reused from version to version.

Fresh pages cost about ten times as much as a copy into pages that are there, so an arena never gives memory back while it is
in use: after the first rounds of a model nothing is allocated.

Invariant: memory in which a version lies is written again only after everybody who may read it has let go of it. Who goes away
without a word keeps it: it is written off, and other memory is taken.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
_MIN_SEGMENT_BYTES = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10


@dataclass(slots=True, eq=False)
class Segment:
    """Contiguous memory."""

    memory: torch.Tensor
    """uint8[num_bytes]."""
    fd: int | None = None
    """By which other processes map it; None: private to this one."""
    mapping: mmap.mmap | None = None
    """Of memory that was lent to this process: it lives for as long as any view of `memory`."""

    def close(self) -> None:
        """Close the descriptor; the memory goes when the last view of it does."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


class Arena:
    """A bump allocator over mapped memory, `lendable` to other processes or private."""

    def __init__(self, *, lendable: bool = False) -> None:
        self._lendable = lendable
        self.segments: list[Segment] = []
        self._segment = 0
        self._used = 0

    @property
    def capacity_bytes(self) -> int:
        """Memory held, in use or not."""
        return sum(segment.memory.numel() for segment in self.segments)

    def reset(self) -> None:
        """Make all of the memory free again; what was taken before must no longer be used."""
        self._segment = 0
        self._used = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for `num_bytes` in all, as one piece if nothing is held yet."""
        missing = num_bytes - self.capacity_bytes
        if missing > 0:
            self._map(missing)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], aligned to 64 bytes, contents undefined, valid until `reset`."""
        while self._segment < len(self.segments):
            memory = self.segments[self._segment].memory
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if start + num_bytes <= memory.numel():
                self._used = start + num_bytes
                return memory[start : start + num_bytes]
            self._segment += 1
            self._used = 0
        self._map(max(num_bytes, _MIN_SEGMENT_BYTES, self.capacity_bytes))
        return self.take(num_bytes)

    def close(self) -> None:
        for segment in self.segments:
            segment.close()

    def _map(self, num_bytes: int) -> None:
        """Segments double what is held, so that there are few; pages that are never touched cost nothing."""
        size = max(num_bytes, mmap.PAGESIZE)
        if not self._lendable:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.segments.append(Segment(torch.frombuffer(memory, dtype=torch.uint8)))
            return
        fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | _F_SEAL_FUTURE_WRITE)
        except OSError:
            os.close(fd)
            raise
        self.segments.append(Segment(torch.frombuffer(memory, dtype=torch.uint8), fd))


class Memory:
    """Where one version lies, until the last of its users has let go of it."""

    def __init__(self, segments: Sequence[Segment], on_free: Callable[[bool], None]) -> None:
        """Its first user is the caller. `on_free` is called once, in the thread of the last release, and told whether
        everybody said that it reads no more."""
        self.segments = segments
        self._on_free = on_free
        self._lock = threading.Lock()
        self._num_users = 1
        self._all_said = True

    @property
    def is_lendable(self) -> bool:
        return all(segment.fd is not None for segment in self.segments)

    def retain(self) -> None:
        with self._lock:
            assert self._num_users > 0, "memory that was freed is used again"
            self._num_users += 1

    def release(self, *, said: bool = True) -> None:
        """One user less. `said=False`: it went away without saying that it reads no more."""
        with self._lock:
            assert self._num_users > 0, "memory was released more often than it was retained"
            self._num_users -= 1
            self._all_said &= said
            if self._num_users:
                return
        self._on_free(self._all_said)


class ArenaPool:
    """At most `max_arenas` arenas that are written again and again, and those that were written off."""

    def __init__(self, *, max_arenas: int, lendable: bool) -> None:
        self._max_arenas = max_arenas
        self._lendable = lendable
        self._changed = threading.Condition()
        self._free: list[Arena] = []
        self._out: list[Arena] = []
        """In the order in which they were taken."""

    @property
    def capacity_bytes(self) -> int:
        """Memory held, without what was written off."""
        with self._changed:
            return sum(arena.capacity_bytes for arena in (*self._free, *self._out))

    def missing_bytes(self, num_bytes: int) -> int:
        """Memory that an arena for `num_bytes` takes beyond what the one has that `take` would give out."""
        with self._changed:
            held = self._free[-1].capacity_bytes if self._free else 0
            if not self._free and len(self._out) >= self._max_arenas:
                held = self._out[0].capacity_bytes  # the one that is waited for
            return max(0, num_bytes - held)

    def take(self, *, timeout_s: float = 0.0) -> Arena | None:
        """An arena that nobody reads, empty; None when none came back within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout_s):
                return None
            arena = self._free.pop() if self._free else Arena(lendable=self._lendable)
            self._out.append(arena)
        arena.reset()
        return arena

    def take_anyway(self) -> Arena:
        """As `take`, but the arena that has been out for longest is written off, to those who still read it, if need be."""
        while (arena := self.take()) is None:
            with self._changed:
                if not self._has_room():
                    self._out.pop(0)
        return arena

    def _has_room(self) -> bool:
        return bool(self._free) or len(self._out) < self._max_arenas

    def give_back(self, arena: Arena, unread: bool) -> None:
        """`unread`: whether it may be written again."""
        with self._changed:
            is_known = arena in self._out
            if is_known:
                self._out.remove(arena)
            if is_known and unread:
                self._free.append(arena)
            else:
                arena.close()
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all that is free; what is out goes when it comes back."""
        with self._changed:
            free, self._free = self._free, []
            self._out.clear()
        for arena in free:
            arena.close()
