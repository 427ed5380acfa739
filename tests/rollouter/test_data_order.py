"""The order of issues: fixed by the seed, as often as weights say, and nothing comes again before all others came as often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.data.lazy import scattered
from rollouter.data.order import Order
from rollouter.errors import DataError

_SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(st.data(), _SIZES, st.integers(0, 99), st.booleans(), st.integers(1, 6))
def test_weights_are_kept_and_rows_of_a_part_come_equally_often(
    data: st.DataObject, sizes: list[int], seed: int, shuffle: bool, epochs: int
) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1, 1.5, 3]), min_size=len(sizes), max_size=len(sizes)))
    order = Order(sizes, seed=seed, shuffle=shuffle, weights=weights)
    counts = Counter(position for epoch in range(epochs) for position in order.epoch(epoch).tolist())
    begin = 0
    for size, weight in zip(sizes, weights, strict=True):
        seen = [counts[position] for position in range(begin, begin + size)]
        assert max(seen) - min(seen) <= 1
        assert sum(seen) == epochs * max(1, round(weight * size))
        begin += size
    assert sum(counts.values()) == epochs * order.epoch_size
    again = Order(sizes, seed=seed, shuffle=shuffle, weights=weights)
    number = data.draw(st.integers(0, epochs * order.epoch_size - 1))
    epoch, position = again.at(number)
    assert position == order.epoch(epoch)[number % order.epoch_size]


def test_weighted_parts_are_mixed_over_the_whole_epoch() -> None:
    for shuffle in (False, True):
        epoch = Order((100, 100), seed=1, shuffle=shuffle, weights=(1, 3)).epoch(0)
        quarters = [sum(position >= 100 for position in epoch[at : at + 100].tolist()) for at in range(0, 400, 100)]
        assert all(60 <= share <= 90 for share in quarters)


def test_curriculum_gives_each_epochs_order() -> None:
    def rising(epoch: int) -> Sequence[int]:
        return [0, 1, 2] if epoch == 0 else [2, 2, 2]

    order = Order((3,), seed=0, shuffle=True, curriculum=rising)
    assert [order.at(number) for number in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("wrong", [[0, 1], [0, 1, 3], [0, 1, -1], "abc", None, [[0, 1, 2]]])
def test_order_that_a_curriculum_must_not_give_is_refused(wrong: object) -> None:
    order = Order((3,), seed=0, shuffle=False, curriculum=lambda epoch: wrong)  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match=r"data\.curriculum: epoch 4: got"):
        order.epoch(4)


@given(st.integers(0, 300), st.integers(0, 50))
def test_scattered_numbers_are_all_of_them_once(size: int, seed: int) -> None:
    assert sorted(scattered(size, seed=seed, at_most=10**6)) == list(range(size))
    assert len(list(scattered(size, seed=seed, at_most=7))) == min(7, size)
