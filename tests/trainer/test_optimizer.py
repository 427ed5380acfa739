"""AdamW against a plain re-derivation; the warm-up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optimizer import EPSILON, AdamW, warm_up


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_the_algorithm_and_decay_spares_vectors(weight_decay: float) -> None:
    draw = np.random.default_rng(0)
    weights = [draw.normal(size=(3, 4)).astype(np.float32), draw.normal(size=4).astype(np.float32)]
    held = [torch.from_numpy(weight.copy()) for weight in weights]
    optimizer = AdamW(held, num_dimensions=[2, 1], beta1=0.9, beta2=0.95, weight_decay=weight_decay)
    expected = [weight.astype(np.float64) for weight in weights]
    first, second = ([np.zeros_like(weight) for weight in expected] for _ in range(2))
    for step in range(1, 6):
        gradients = [draw.normal(size=weight.shape).astype(np.float32) for weight in weights]
        optimizer.apply([torch.from_numpy(gradient.copy()) for gradient in gradients], learning_rate=0.01, divisor=2.0)
        for index, gradient in enumerate(gradients):
            scaled = gradient.astype(np.float64) / 2
            first[index] = 0.9 * first[index] + 0.1 * scaled
            second[index] = 0.95 * second[index] + 0.05 * scaled**2
            unbiased = first[index] / (1 - 0.9**step) / (np.sqrt(second[index] / (1 - 0.95**step)) + EPSILON)
            expected[index] -= 0.01 * (unbiased + (weight_decay if index == 0 else 0) * expected[index])
    for got, weight in zip(held, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), weight, rtol=1e-4, atol=1e-6)
    assert optimizer.steps_taken == 5


@given(st.integers(0, 1000), st.integers(0, 100))
def test_the_rate_rises_to_its_peak_and_stays(steps_taken: int, warmup_steps: int) -> None:
    assert 0 < warm_up(steps_taken, warmup_steps) <= warm_up(steps_taken + 1, warmup_steps) <= 1
    assert warm_up(warmup_steps, warmup_steps) == 1


def test_the_first_step_of_a_warm_up_already_moves() -> None:
    assert [warm_up(step, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
