"""How much of a turn is asked for at once, so that its tokens are recorded at bounded intervals. Pure but for the clock.

Invariant: a slice is what an engine was typically seen to generate for one request within the interval, and at least MIN_TOKENS
tokens; with an interval of 0 a turn is asked for whole. Where a slice ends changes no token at temperature 0; above it each
slice draws with a seed of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

FIRST_TOKENS = 32
"""Of a slice while no speed has been seen."""
MIN_TOKENS = 16
"""Each slice is a request with a prefill of up to a cache block: shorter ones would cost more than they save."""
_REMEMBERED = 32


class Slices:
    """Shared by the sessions of a process; belongs to the event loop."""

    def __init__(self, interval_s: Callable[[], float], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_s` is asked before each slice."""
        self._interval_s = interval_s
        self._seconds_per_token: deque[float] = deque(maxlen=_REMEMBERED)
        self.clock = clock

    def next_size(self) -> int | None:
        """Tokens to ask for at most; None: no bound."""
        interval_s = self._interval_s()
        if interval_s <= 0:
            return None
        if not self._seconds_per_token:
            return FIRST_TOKENS
        typical = median(self._seconds_per_token)  # a pause for new weights or a wait for a seat says nothing of the next slice
        return None if typical <= 0 else max(MIN_TOKENS, int(interval_s / typical))

    def took(self, num_tokens: int, seconds: float) -> None:
        """A request brought so many tokens in so many seconds."""
        if num_tokens > 0:
            self._seconds_per_token.append(max(0.0, seconds) / num_tokens)
