"""Weights of tokens multiply their losses, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TrainerSettings
from sample_bus.sample import Sample
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.fsdp import FsdpPolicy
from trainer.losses import token_losses
from trainer.packing import empty, pack
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step

Weights = list[npt.NDArray[np.float32]]
STEP = LossOptions()
OPTIONS = UpdateOptions(learning_rate=1e-3, warmup_steps=0, loss=STEP)


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FsdpPolicy]:
    directory = make_tiny_model(tmp_path_factory.mktemp("model") / "tied", TinyModel.TIED, seed=1)

    def policy(**changes: int) -> FsdpPolicy:
        return FsdpPolicy(directory, TrainerSettings().model_copy(update=changes), dtype=torch.float32)

    return policy


def batch() -> tuple[list[Sample], npt.NDArray[np.float32]]:
    samples = siblings()
    return samples, np.linspace(-1, 1, len(samples)).astype(np.float32)


def drawn(samples: list[Sample], seed: int) -> Weights:
    draw = np.random.default_rng(seed)
    return [draw.random(sample.num_tokens).astype(np.float32) for sample in samples]


def gradients(policy: FsdpPolicy, weights: Weights | None) -> dict[str, torch.Tensor]:
    samples, advantages = batch()
    policy.accumulate(samples, advantages, denominator=100.0, options=STEP, weights=weights)
    return dict(policy.gradients())


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(-3, 0, width=32), st.floats(-2, 2, width=32)), max_size=8))
def test_a_tokens_loss_is_its_weight_times_its_loss(rows: list[tuple[float, float, float]]) -> None:
    weights, policy, advantages = (torch.tensor(column) for column in np.array(rows, np.float32).reshape(-1, 3).T)
    behavior = policy - 0.1
    plain = token_losses(policy, behavior, advantages, options=STEP)
    weighted = token_losses(policy, behavior, advantages, options=STEP, weights=weights)
    torch.testing.assert_close(weighted.losses, plain.losses * weights)
    assert weighted.clipped.equal(plain.clipped)
    assert weighted.capped.equal(plain.capped)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token weights: got shape \[2\], expected \[3\]"):
        token_losses(torch.zeros(3), torch.zeros(3), torch.zeros(3), options=STEP, weights=torch.zeros(2))


def test_each_trained_token_gets_its_own_weight() -> None:
    samples, _ = batch()
    weights = [np.arange(sample.num_tokens, dtype=np.float32) + 100 * index for index, sample in enumerate(samples)]
    for micro in pack(samples, max_tokens=16, max_rows=1000):
        expected = micro.token_positions + 100 * micro.token_samples
        np.testing.assert_array_equal(micro.of_tokens(weights), expected.astype(np.float32))
    assert empty().of_tokens(weights).shape == (0,)


def test_gradients_are_linear_in_the_weights_however_the_step_is_cut(policy_of: Callable[..., FsdpPolicy]) -> None:
    samples, _ = batch()
    first, second = drawn(samples, 1), drawn(samples, 2)
    both = [one + two for one, two in zip(first, second, strict=True)]
    whole = gradients(policy_of(), both)
    cut = gradients(policy_of(max_tokens_per_microbatch=16), both)
    parts = gradients(policy_of(), first), gradients(policy_of(), second)
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, parts[0][name] + parts[1][name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, cut[name], rtol=1e-4, atol=1e-6)


def test_weights_of_one_change_no_bit_and_the_denominator_stays_the_number_of_trained_tokens(
    policy_of: Callable[..., FsdpPolicy],
) -> None:
    samples, advantages = batch()
    ones = [np.ones(sample.num_tokens, np.float32) for sample in samples]
    halves = [one * np.float32(0.5) for one in ones]
    plain = train_step(policy_of(), samples, advantages, OPTIONS)
    same = train_step(policy_of(), samples, advantages, OPTIONS, weights=ones)
    half = train_step(policy_of(), samples, advantages, OPTIONS, weights=halves)
    assert (same.loss, same.grad_norm, same.stale_weight_mean) == (plain.loss, plain.grad_norm, 1.0)
    assert half.loss == pytest.approx(plain.loss / 2)
    assert half.grad_norm == pytest.approx(plain.grad_norm / 2, rel=1e-5)
    assert half.stale_weight_mean == 0.5
    assert half.num_trained_tokens == plain.num_trained_tokens


def test_weights_that_do_not_fit_the_samples_are_refused(policy_of: Callable[..., FsdpPolicy]) -> None:
    samples, advantages = batch()
    with pytest.raises(ValueError, match="expected one float32"):
        train_step(policy_of(), samples, advantages, OPTIONS, weights=[np.ones(1, np.float32)] * len(samples))
