"""Limits that several packages share."""

from __future__ import annotations

MAX_REWARD = 1e12
"""The largest size of a reward: its square, summed over a batch, is still far below what a float32 holds (3.4e38)."""
