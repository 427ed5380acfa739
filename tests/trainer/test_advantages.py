"""Advantages against a plain re-derivation, and what holds for every group."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantages import EPSILON, group_advantages

rewards = st.floats(-100, 100, allow_nan=False, width=32)


def derived(values: list[float], *, normalize_by_std: bool) -> list[float]:
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    scale = statistics.stdev(values) + EPSILON if normalize_by_std else 1.0
    return [(value - mean) / scale for value in values]


@given(st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=8), min_size=1, max_size=5), st.booleans())
def test_advantages_are_those_of_grpo(groups: list[list[int]], normalize_by_std: bool) -> None:
    names = [f"g{index}" for index, group in enumerate(groups) for _ in group]
    got = group_advantages([reward for group in groups for reward in group], names, normalize_by_std=normalize_by_std)
    expected = [value for group in groups for value in derived([float(r) for r in group], normalize_by_std=normalize_by_std)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert got.dtype == np.float32


@given(st.lists(rewards, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(values: list[float], random: object) -> None:
    """B76"""
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = group_advantages(values, ["g"] * len(values), normalize_by_std=True)
    shuffled = group_advantages([values[place] for place in order], ["g"] * len(values), normalize_by_std=True)
    np.testing.assert_array_equal(straight[order], shuffled)


@pytest.mark.parametrize("size", [4, 3, 2, 1, 0])
def test_incomplete_groups_give_finite_advantages_and_a_single_survivor_none(size: int) -> None:
    """B76"""
    got = group_advantages([1.0, 0.0, 0.5, 0.25][:size], ["g"] * size, normalize_by_std=True)
    assert np.isfinite(got).all()
    assert got.shape == (size,)
    if size == 1:
        assert got.tolist() == [0.0]


def test_a_group_without_spread_has_no_advantage_even_where_its_mean_is_not_exact() -> None:
    """B77"""
    assert group_advantages([0.1] * 7, ["g"] * 7, normalize_by_std=True).tolist() == [0.0] * 7


def test_without_normalization_advantages_are_the_centered_rewards() -> None:
    """B85"""
    assert group_advantages([1, 3, 2], ["g"] * 3, normalize_by_std=False).tolist() == [-1.0, 1.0, 0.0]


def test_groups_do_not_touch_one_another() -> None:
    together = group_advantages([1, 0, 5, 9], ["a", "b", "a", "b"], normalize_by_std=True)
    alone = group_advantages([1, 5], ["a", "a"], normalize_by_std=True)
    assert together[[0, 2]].tolist() == alone.tolist()


def test_a_reward_that_is_no_number_is_refused_with_its_group() -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\]: got nan.*group b"):
        group_advantages([1.0, float("nan")], ["a", "b"], normalize_by_std=True)


def test_one_group_id_per_reward_is_demanded() -> None:
    with pytest.raises(ValueError, match=r"expected \[2\]"):
        group_advantages([1.0], ["a", "b"], normalize_by_std=True)
