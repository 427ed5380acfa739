"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl
"""Looked up beforehand: between fork and exec nothing is loaded."""


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when the one that started it ends (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of all that is left behind below this process, also in the program that it becomes (prctl(2),
    PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """What a child runs before its program (`preexec_fn`): asks for `number` at the parent's death, and ends if it is dead."""

    def prepare() -> None:
        end_with_parent(number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
