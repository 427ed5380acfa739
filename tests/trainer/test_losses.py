"""The loss against a NumPy re-derivation and finite differences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.losses import token_losses
from trainer.metrics import TokenSums
from trainer.policy import LossOptions, Proximal

STEP = LossOptions(clip_low=0.2, clip_high=0.28, max_importance_weight=2.0, proximal=Proximal.STEP)
BEHAVIOR = LossOptions(clip_low=0.2, clip_high=0.28, max_importance_weight=2.0, proximal=Proximal.BEHAVIOR)
logprob = st.floats(-8, 0, width=32)
tokens = st.lists(st.tuples(logprob, logprob, logprob, st.floats(-3, 3, width=32)), min_size=1, max_size=12)


def derived(
    policy: npt.NDArray[np.float64],
    proximal: npt.NDArray[np.float64],
    behavior: npt.NDArray[np.float64],
    advantages: npt.NDArray[np.float64],
    options: LossOptions,
) -> npt.NDArray[np.float64]:
    if options.proximal is Proximal.BEHAVIOR:
        ratio, weight = np.exp(policy - behavior), np.ones_like(policy)
        ratio = np.where(advantages < 0, np.minimum(ratio, options.max_importance_weight), ratio)
    else:
        ratio = np.exp(policy - proximal)
        weight = np.minimum(np.exp(proximal - behavior), options.max_importance_weight)
    bounded = np.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
    return -weight * np.minimum(ratio * advantages, bounded * advantages)


@given(tokens, st.sampled_from([STEP, BEHAVIOR]))
def test_losses_are_those_of_the_formula(rows: list[tuple[float, float, float, float]], options: LossOptions) -> None:
    policy, proximal, behavior, advantages = np.array(rows, dtype=np.float64).T
    got = token_losses(
        torch.tensor(policy, dtype=torch.float32),
        torch.tensor(behavior, dtype=torch.float32),
        torch.tensor(advantages, dtype=torch.float32),
        options=options,
        proximal=torch.tensor(proximal, dtype=torch.float32),
    ).losses.numpy()
    np.testing.assert_allclose(got, derived(policy, proximal, behavior, advantages, options), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("options", [STEP, BEHAVIOR])
def test_gradients_are_those_of_finite_differences(options: LossOptions) -> None:
    policy = np.array([-1.0, -1.0, -1.0, -1.0, -0.2, -3.0])
    proximal = np.array([-1.1, -0.9, -2.0, -2.0, -1.9, -2.0])
    behavior = np.array([-1.05, -0.95, -2.1, -2.1, -4.0, -2.2])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, -0.5, 0.7])
    leaf = torch.tensor(policy, dtype=torch.float32, requires_grad=True)
    result = token_losses(
        leaf,
        torch.tensor(behavior, dtype=torch.float32),
        torch.tensor(advantages, dtype=torch.float32),
        options=options,
        proximal=torch.tensor(proximal, dtype=torch.float32),
    )
    torch.autograd.backward(result.losses.sum())
    step = 1e-6
    numeric = (
        derived(policy + step, proximal, behavior, advantages, options)
        - derived(policy - step, proximal, behavior, advantages, options)
    ) / (2 * step)
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), numeric, rtol=1e-4, atol=1e-5)
    assert (leaf.grad[result.clipped] == 0).all()


def test_on_the_first_pass_the_loss_is_the_weighted_policy_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    behavior = torch.tensor([-1.0, -2.5, -4.0])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    result = token_losses(policy, behavior, advantages, options=STEP)
    torch.autograd.backward(result.losses.sum())
    assert policy.grad is not None
    np.testing.assert_allclose(policy.grad.numpy(), [-1.0, np.exp(0.5), -2.0], rtol=1e-6)
    assert result.capped.tolist() == [False, False, True]
    assert not result.clipped.any()


def test_no_trained_token_gives_an_empty_loss_and_zero_sums() -> None:
    """B80"""
    nothing = torch.zeros(0)
    result = token_losses(nothing, nothing, nothing, options=STEP)
    sums = TokenSums.of(
        losses=result.losses,
        policy=nothing,
        behavior=nothing,
        entropies=nothing,
        clipped=result.clipped,
        capped=result.capped,
        num_computed_tokens=1,
    )
    assert sums.mean(sums.loss) == 0.0
    assert sums.mean(sums.entropy) == 0.0


def test_columns_of_unlike_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got shapes \[2\], \[3\] and \[2\]"):
        token_losses(torch.zeros(2), torch.zeros(3), torch.zeros(2), options=STEP)
