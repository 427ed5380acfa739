"""Shaping of a reward by the length of the reply. Pure.

Invariant: what is added is at most 0 and does not rise with the length.
"""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment, in [-1, 0]: DAPO (arXiv 2503.14476), eq. 13, with L_max = `max_tokens`, L_cache =
    `buffer_tokens` and |y| = `num_tokens`. A buffer of 0 tokens is none: 0."""
    if buffer_tokens <= 0:
        return 0.0
    begins = max_tokens - buffer_tokens
    if num_tokens <= begins:
        return 0.0
    return max(-1.0, (begins - num_tokens) / buffer_tokens)


def length_penalty(num_tokens: int, *, max_tokens: int, coefficient: float) -> float:
    """A price for each token: -coefficient × num_tokens / max_tokens, at most `coefficient` in all."""
    return -coefficient * min(1.0, num_tokens / max_tokens)
