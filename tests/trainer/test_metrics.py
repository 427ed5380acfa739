"""Step metrics do not depend on how the step was cut."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics import TokenSums


def sums_of(values: np.ndarray, entropies: np.ndarray) -> TokenSums:
    policy = torch.from_numpy(values)
    return TokenSums.of(
        losses=policy * 2,
        policy=policy,
        behavior=torch.full_like(policy, -1.0),
        entropies=torch.from_numpy(entropies),
        clipped=policy < -2,
        capped=policy > -1,
        num_computed_tokens=policy.numel(),
    )


@given(st.lists(st.floats(-5, 0, width=32), min_size=1, max_size=30), st.integers(0, 30))
def test_means_over_parts_are_those_over_the_whole(values: list[float], cut: int) -> None:
    """B82"""
    array = np.array(values, dtype=np.float32)
    whole, parts = sums_of(array, array * -1), sums_of(array[:cut], array[:cut] * -1) + sums_of(array[cut:], array[cut:] * -1)
    for name in ("loss", "mismatch_abs", "importance", "kl_behavior_policy", "entropy", "num_clipped"):
        np.testing.assert_allclose(whole.mean(getattr(whole, name)), parts.mean(getattr(parts, name)), rtol=1e-9, atol=1e-12)
    assert whole.mismatch_max_abs == parts.mismatch_max_abs
    assert whole.importance_max == parts.importance_max


def test_the_token_mean_spans_all_microbatches() -> None:
    """B72"""
    heavy = TokenSums(num_tokens=100, loss=100 * 2.0)
    light = TokenSums(num_tokens=900, loss=900 * 0.5)
    both = heavy + light
    assert both.mean(both.loss) == 0.65


def test_sums_are_those_of_numpy() -> None:
    values = np.array([-0.5, -1.0, -3.0], dtype=np.float32)
    sums = sums_of(values, -values)
    difference = values.astype(np.float64) + 1.0
    np.testing.assert_allclose(sums.mismatch_abs, np.abs(difference).sum())
    np.testing.assert_allclose(sums.importance, np.exp(difference).sum())
    np.testing.assert_allclose(sums.kl_behavior_policy, (np.exp(difference) - 1 - difference).sum())
    assert (sums.num_clipped, sums.num_importance_capped, sums.num_tokens) == (1, 1, 3)


@given(st.lists(st.floats(-5, 0, width=32), min_size=1, max_size=30))
def test_the_effective_sample_size_is_that_of_the_weights(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    weights = np.exp(array.astype(np.float64) + 1.0)
    size = sums_of(array, -array).effective_sample_size
    np.testing.assert_allclose(size, weights.sum() ** 2 / (len(values) * (weights**2).sum()), rtol=1e-9)
    assert 1 / len(values) <= size <= 1


def test_equal_weights_count_whole_and_one_that_outweighs_all_counts_alone() -> None:
    assert sums_of(np.full(7, -3.0, np.float32), np.zeros(7)).effective_sample_size == 1.0
    assert abs(sums_of(np.array([50.0] + [-50.0] * 9, np.float32), np.zeros(10)).effective_sample_size - 0.1) < 1e-9
    beyond = sums_of(np.array([1000.0, 0.0], np.float32), np.zeros(2))
    assert beyond.effective_sample_size == 0.5
    assert TokenSums().effective_sample_size == 1.0
