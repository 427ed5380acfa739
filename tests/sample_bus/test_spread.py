"""The running histogram against the numbers themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.messages import Spread
from sample_bus.spread import MAX_BINS, Histogram, mean, quantile

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def spread_of(values: list[float]) -> Spread:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram.spread()


@given(numbers)
def test_count_and_total_are_exact_and_the_bins_few_and_rising(values: list[float]) -> None:
    spread = spread_of(values)
    assert (spread.count, sum(spread.counts)) == (len(values), len(values))
    assert spread.total == pytest.approx(math.fsum(values), abs=1e-3)
    assert len(spread.centers) <= MAX_BINS
    assert list(spread.centers) == sorted(set(spread.centers))
    assert min(values) <= spread.centers[0]
    assert spread.centers[-1] <= max(values)


@given(st.lists(st.integers(0, MAX_BINS - 1), min_size=1, max_size=300), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_quantiles_of_few_distinct_values_are_exact(values: list[int], share: float) -> None:
    expected = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert quantile(spread_of([float(value) for value in values]), share) == expected


def test_quantiles_of_many_values_are_near() -> None:
    draw = np.random.default_rng(0)
    values = draw.lognormal(4, 1, 5000).tolist()
    spread = spread_of(values)
    for share in (0.5, 0.9):
        assert quantile(spread, share) == pytest.approx(np.quantile(values, share), rel=0.25)


@given(numbers, st.integers(0, 200))
def test_a_stored_histogram_goes_on_as_if_it_had_never_been_stored(values: list[float], at: int) -> None:
    first = spread_of(values[:at])
    stored = Histogram(Spread.model_validate(first.model_dump(mode="json")))
    for value in values[at:]:
        stored.add(value)
    assert stored.spread() == spread_of(values)


def test_no_number_has_no_mean() -> None:
    assert mean(Spread()) is None
    assert quantile(Spread(), 0.5) is None
