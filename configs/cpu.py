"""How a CPU machine's cores are shared out, so that engine and trainer do not fight over one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShares:
    """Core numbers of each side; disjoint where there are two or more cores."""

    engine: tuple[int, ...]
    trainer: tuple[int, ...]


def core_shares(cores: Sequence[int] | None = None) -> CoreShares:
    """Split the cores that this process may use: the first half to the engines, the rest to the trainer."""
    available = tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))
    if len(available) == 1:
        return CoreShares(engine=available, trainer=available)
    half = len(available) // 2
    return CoreShares(engine=available[:half], trainer=available[half:])


def pin(cores: Sequence[int]) -> None:
    """Run this process and all that it starts on `cores` only."""
    os.sched_setaffinity(0, cores)
