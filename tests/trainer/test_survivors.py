"""Groups with closed seats: baselines, denominators and the batch are of those that are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import TrainerSettings
from tests.fakes.samples import make_sample
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from trainer.fsdp import FsdpPolicy
from trainer.loop import advantages_of, options_of
from trainer.update import train_step


def test_a_failed_sibling_enters_neither_the_baseline_nor_the_sum() -> None:
    """B85: rewards 1, 3, 2 and a seat that failed: the mean is 2."""
    samples = [make_sample(group_id="g", seat=seat, group_size=4, reward=reward) for seat, reward in enumerate((1.0, 3.0, 2.0))]
    advantages = advantages_of(samples, TrainerSettings(normalize_by_std=False))
    assert advantages.tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize("normalize", [True, False])
def test_groups_of_any_number_of_survivors_give_finite_advantages(normalize: bool) -> None:
    """B76: 4, 3, 2, 1 survivors; one alone has no spread and gets 0; the order of members changes nothing."""
    samples = [
        make_sample(group_id=f"g{size}", seat=seat, group_size=4, reward=float(seat))
        for size in (4, 3, 2, 1)
        for seat in range(size)
    ]
    trainer = TrainerSettings(normalize_by_std=normalize)
    advantages = advantages_of(samples, trainer)
    assert np.isfinite(advantages).all()
    assert advantages[-1] == 0.0
    assert advantages_of(samples[::-1], trainer)[::-1].tolist() == advantages.tolist()


def test_the_loss_is_over_the_tokens_of_the_survivors(tmp_path: Path) -> None:
    """Three survivors are one step of three samples: the same loss and weights as without the mention of a fourth seat."""
    model = make_tiny_model(tmp_path / "model", TinyModel.TIED, seed=1)
    trainer = TrainerSettings(learning_rate=1e-3, warmup_steps=0)

    def step(group_size: int) -> tuple[float, int, list[torch.Tensor]]:
        samples = [
            make_sample(
                group_id="g", seat=seat, group_size=group_size, prompt=(5, 6), reply=range(7, 9 + seat), reward=float(seat % 2)
            )
            for seat in range(3)
        ]
        policy = FsdpPolicy(model, trainer, dtype=torch.float32)
        report = train_step(policy, samples, advantages_of(samples, trainer), options_of(trainer))
        return report.loss, report.num_trained_tokens, [tensor.clone() for _, tensor in policy.export_weights()]

    with_gap, whole = step(4), step(3)
    assert with_gap[:2] == whole[:2]
    assert with_gap[1] == 2 + 3 + 4
    assert all(torch.equal(left, right) for left, right in zip(with_gap[2], whole[2], strict=True))
