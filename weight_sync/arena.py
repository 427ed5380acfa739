"""Memory for one set of weights, faulted in once and reused from version to version.

Fresh pages cost about ten times as much as a copy into pages that are there, so an arena never gives memory back while it is
in use: after the first round of a model it allocates nothing.
"""

from __future__ import annotations

import mmap

import torch

_ALIGNMENT = 64
_MIN_SEGMENT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 64 << 20
"""Segments grow with what is held, so that little of the last one is wasted."""


class Arena:
    """A bump allocator over private mapped memory."""

    def __init__(self) -> None:
        self._segments: list[torch.Tensor] = []
        self._segment = 0
        self._used = 0

    @property
    def capacity_bytes(self) -> int:
        """Memory held, in use or not."""
        return sum(segment.numel() for segment in self._segments)

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
        while self._segment < len(self._segments):
            segment = self._segments[self._segment]
            start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
            if start + num_bytes <= segment.numel():
                self._used = start + num_bytes
                return segment[start : start + num_bytes]
            self._segment += 1
            self._used = 0
        self._map(max(num_bytes, min(_MAX_SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, self.capacity_bytes))))
        return self.take(num_bytes)

    def _map(self, num_bytes: int) -> None:
        size = max(num_bytes, mmap.PAGESIZE)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        self._segments.append(torch.frombuffer(memory, dtype=torch.uint8))
