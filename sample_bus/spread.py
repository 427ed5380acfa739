"""A small running histogram: count and total exact, quantiles exact while there are few distinct values. Pure.

Beyond `MAX_BINS` distinct values the two closest neighbours are merged into their mean (Ben-Haim and Tom-Tov 2010, "A streaming
parallel decision tree algorithm", section 2.1). Invariant: the same numbers in the same order give the same histogram.
"""

from __future__ import annotations

from bisect import bisect_left

from sample_bus.messages import Spread

MAX_BINS = 48


class Histogram:
    """Grows by `add`; `spread` is what of it is told and stored."""

    def __init__(self, before: Spread | None = None) -> None:
        before = before or Spread()
        self._count = before.count
        self._total = before.total
        self._centers = list(before.centers)
        self._counts = list(before.counts)

    def add(self, value: float) -> None:
        """`value`: finite."""
        self._count += 1
        self._total += value
        at = bisect_left(self._centers, value)
        if at < len(self._centers) and self._centers[at] == value:
            self._counts[at] += 1
            return
        self._centers.insert(at, float(value))
        self._counts.insert(at, 1)
        if len(self._centers) > MAX_BINS:
            self._merge()

    def spread(self) -> Spread:
        return Spread(count=self._count, total=self._total, centers=tuple(self._centers), counts=tuple(self._counts))

    def _merge(self) -> None:
        gaps = [right - left for left, right in zip(self._centers, self._centers[1:], strict=False)]
        at = gaps.index(min(gaps))
        left, right = self._counts[at], self._counts[at + 1]
        center = self._centers[at] + (self._centers[at + 1] - self._centers[at]) * (right / (left + right))
        self._centers[at : at + 2] = [center]
        self._counts[at : at + 2] = [left + right]


def mean(spread: Spread) -> float | None:
    """None where there is no number."""
    return spread.total / spread.count if spread.count else None


def quantile(spread: Spread, share: float) -> float | None:
    """The smallest center up to which at least `share` of the numbers lie; None where there is none."""
    if not spread.count:
        return None
    reached = 0
    for center, count in zip(spread.centers, spread.counts, strict=True):
        reached += count
        if reached >= share * spread.count:
            return center
    return spread.centers[-1]
