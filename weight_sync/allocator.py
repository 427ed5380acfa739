"""Keep memory that was freed, for the next reload, which needs the same amounts again.

A reload on a CPU frees and allocates about twice the model. By default the C library gives large blocks back to the system,
so every reload pays for fresh pages, at about a tenth of the speed of a copy, while generation is paused.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 1 << 30
_LARGEST_INT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Make this process keep what it frees, from now on; False where the C library has no such setting.

    Memory in use does not grow: what is kept is what was in use at the highest point.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
