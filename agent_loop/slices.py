"""How much of a turn is asked for at once, so that its tokens are recorded at bounded intervals. Pure but for the clock.

Invariant: a slice is what an engine was typically seen to generate for one request within the interval, and at least MIN_TOKENS
tokens; it ends where the next one finds all but its last token in the prefix cache. With an interval of 0 a turn is asked for
whole. Where a slice ends changes no token at temperature 0; above it each slice draws with a seed of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

FIRST_TOKENS = 32
"""Of a slice while no speed has been seen."""
MIN_TOKENS = 16
"""Each slice is a request: shorter ones would cost more than they save."""
BLOCK_TOKENS = 32
"""Engines cache whole blocks of 16 (GPU) or 32 (CPU) tokens, and compute a prompt's last token anew in any case: a context of a
multiple of these and one token more is continued at the cost of one."""
_REMEMBERED = 32
_MOST_TOKENS = 1 << 30
"""No turn is as long."""


class Slices:
    """Shared by the sessions of a process; belongs to the event loop."""

    def __init__(self, interval_s: Callable[[], float], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_s` is asked before each slice."""
        self._interval_s = interval_s
        self._seconds_per_token: deque[float] = deque(maxlen=_REMEMBERED)
        self.clock = clock

    def next_size(self, context: int) -> int | None:
        """Tokens to ask for at most behind a context of so many; None: no bound."""
        interval_s = self._interval_s()
        if interval_s <= 0:
            return None
        wanted = FIRST_TOKENS
        if self._seconds_per_token:
            typical = median(
                self._seconds_per_token
            )  # a pause for new weights, a wait for a seat: they say nothing of the next
            if typical * _MOST_TOKENS <= interval_s:
                return None
            wanted = int(interval_s / typical)
        end = _aligned(context + wanted)
        if end - context < MIN_TOKENS:
            end = _aligned(context + MIN_TOKENS + BLOCK_TOKENS - 1)
        return end - context

    def took(self, num_tokens: int, seconds: float) -> None:
        """A request brought so many tokens in so many seconds."""
        if num_tokens > 0:
            self._seconds_per_token.append(max(0.0, seconds) / num_tokens)


def _aligned(length: int) -> int:
    """The longest context up to `length` that ends a token behind a block."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS + 1
