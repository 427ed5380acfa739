"""How long a reward that knows when to stop may go on: a share of the time after which its process is killed.

Invariant: what stops by then has an answer of its own, which is something else than a reward that was not given in time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SHARE = 0.8
"""Of the deadline; the rest is for starting, killing and telling."""
_ENDS_AT: ContextVar[float] = ContextVar("ends_at", default=math.inf)


@contextmanager
def limited_to(timeout_s: float) -> Iterator[None]:
    """Within, a call that is killed after `timeout_s` is under way."""
    token = _ENDS_AT.set(time.monotonic() + SHARE * timeout_s)
    try:
        yield
    finally:
        _ENDS_AT.reset(token)


def time_left_s() -> float:
    """Seconds, 0 if it is over; infinite outside a reward process."""
    return max(0.0, _ENDS_AT.get() - time.monotonic())
