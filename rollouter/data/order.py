"""The order of issues: which position of the data comes as number n, over all epochs. Pure.

Invariant: the order is a function of (sizes, weights, seed, shuffle, curriculum) alone, every epoch has as many issues as any
other, and within one part no row comes again before all others of it have come as often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from rollouter.errors import DataError

Positions = npt.NDArray[np.int64]
Curriculum = Callable[[int], Sequence[int]]
"""Epoch → positions in the order in which they come; as many as there are, some perhaps more than once."""


class Order:
    """Over `sum(sizes)` positions, part behind part."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] = (),
        curriculum: Curriculum | None = None,
    ) -> None:
        """weights: how often each position of each part comes in an epoch; empty: once."""
        self._sizes = tuple(sizes)
        self._weights = tuple(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._kept: dict[int, Positions] = {}
        self._counts = self._sizes
        if weights:
            pairs = zip(weights, sizes, strict=True)
            self._counts = tuple(max(1, round(weight * size)) if size else 0 for weight, size in pairs)

    @property
    def epoch_size(self) -> int:
        """Issues of one epoch."""
        return sum(self._counts)

    def at(self, number: int) -> tuple[int, int]:
        """(epoch, position) of issue `number`."""
        epoch, place = divmod(number, self.epoch_size)
        return epoch, int(self.epoch(epoch)[place])

    def epoch(self, epoch: int) -> Positions:
        """[epoch_size] positions of the epoch. Raises DataError when the curriculum gives no such order."""
        order = self._kept.get(epoch)
        if order is None:
            order = self._order(epoch)
            kept = self._kept  # replaced whole, never changed: another thread may be reading it
            self._kept = {epoch: order, **{one: kept[one] for one in (epoch - 1, epoch + 1) if one in kept}}
        return order

    def prepare(self, epoch: int) -> None:
        """Make the epoch's order, in a thread, for `epoch` to find. An error is left to the one who needs the order."""
        with suppress(DataError):
            self.epoch(epoch)

    def _order(self, epoch: int) -> Positions:
        if self._curriculum is not None:
            return self._checked(self._curriculum(epoch), epoch)
        if not self._weights:
            count = sum(self._sizes)
            return np.random.default_rng([self._seed, epoch]).permutation(count) if self._shuffle else np.arange(count)
        parts = [self._part(number, epoch) for number in range(len(self._sizes))]
        mixed = np.concatenate(parts)
        if self._shuffle:
            return np.random.default_rng([self._seed, epoch]).permutation(mixed)
        ranks = np.concatenate([(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts])
        return mixed[np.argsort(ranks, kind="stable")]  # parts interleaved evenly

    def _part(self, number: int, epoch: int) -> Positions:
        """What the epoch takes of a part: the next piece of the part's passes behind each other."""
        size, count = self._sizes[number], self._counts[number]
        begin = sum(self._sizes[:number])
        if not count:
            return np.zeros(0, np.int64)
        first, last = epoch * count, (epoch + 1) * count
        passes = [self._pass(number, one) for one in range(first // size, (last - 1) // size + 1)]
        joined = np.concatenate(passes)[first % size : first % size + count]
        return joined + begin

    def _pass(self, number: int, which: int) -> Positions:
        size = self._sizes[number]
        return np.random.default_rng([self._seed, number, which]).permutation(size) if self._shuffle else np.arange(size)

    def _checked(self, order: Sequence[int], epoch: int) -> Positions:
        size = self.epoch_size
        try:
            positions = np.asarray(order, np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"data.curriculum: epoch {epoch}: got no list of numbers: {error}") from error
        if positions.shape != (size,) or (size and not (positions.min() >= 0 and positions.max() < size)):
            raise DataError(
                f"data.curriculum: epoch {epoch}: got {positions.size} positions"
                + (f" from {positions.min()} to {positions.max()}" if positions.size else "")
                + f", expected {size} from 0 to {size - 1}"
            )
        return positions
