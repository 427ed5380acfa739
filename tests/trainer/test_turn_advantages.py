"""Rewards of turns against a plain re-derivation, and what they change in a step."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import TrainerSettings
from sample_bus.sample import Sample
from tests.fakes.samples import end_to_end, make_sample
from tests.fakes.tiny_models import TinyModel, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.advantages import EPSILON, turn_advantages
from trainer.fsdp import FsdpPolicy
from trainer.loop import advantages_of, dense_of
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step

OPTIONS = UpdateOptions(learning_rate=1e-3, warmup_steps=0, loss=LossOptions())
TURN_LENGTH = 2
PROMPT_LENGTH = 3

groups = st.lists(
    st.lists(st.lists(st.integers(-4, 4), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=3
)


def sample_of(rewards: list[int], *, group: int = 0) -> Sample:
    """As many turns as rewards, each after an observation; a turn's reward stands at its last token."""
    one = make_sample(reply=range(8, 8 + TURN_LENGTH), group_id=f"task-{group}/0")
    dense = np.zeros((len(rewards), PROMPT_LENGTH + TURN_LENGTH), np.float32)
    dense[:, -1] = rewards
    return end_to_end([one] * len(rewards), token_rewards=dense.reshape(-1))


def derived(group: list[list[int]], discount: float) -> list[list[float]]:
    """Advantages [member][turn]."""
    to_go = [[sum(discount ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in group]
    result = [[0.0] * len(r) for r in group]
    for k in range(max(map(len, group))):
        values = [one[k] for one in to_go if len(one) > k]
        if len(values) < 2 or max(values) == min(values):
            continue
        for member, one in enumerate(to_go):
            if len(one) > k:
                result[member][k] = (one[k] - statistics.fmean(values)) / (statistics.stdev(values) + EPSILON)
    return result


@given(groups, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0]))
def test_each_token_gets_the_relative_reward_to_go_of_its_turn(
    drawn: list[list[list[int]]], discount: float, weight: float
) -> None:
    samples = [sample_of(rewards, group=index) for index, group in enumerate(drawn) for rewards in group]
    expected = [turns for group in drawn for turns in derived(group, discount)]
    got = turn_advantages(samples, discount=discount, weight=weight, normalize_by_std=True)
    if got is None:
        assert not any(any(turns) for turns in expected)
        return
    for sample, column, turns in zip(samples, got, expected, strict=True):
        wanted = np.repeat(np.array(turns) * weight, TURN_LENGTH)
        np.testing.assert_allclose(column[sample.loss_mask != 0], wanted, rtol=1e-5, atol=1e-5)
        assert not column[sample.loss_mask == 0].any()


def test_rewards_of_tokens_count_for_the_turn_they_stand_in() -> None:
    first = make_sample(reply=[8, 9], token_rewards=np.array([0, 0, 0, 0.25, 0.75], np.float32))
    second = make_sample(reply=[8, 9])
    got = turn_advantages([first, second], discount=1.0, weight=1.0, normalize_by_std=False)
    assert got is not None
    assert [one.tolist() for one in got] == [[0, 0, 0, 0.5, 0.5], [0, 0, 0, -0.5, -0.5]]


@pytest.mark.parametrize(("weight", "rewards"), [(1.0, [0, 0]), (0.0, [1, 0])])
def test_no_rewards_of_turns_or_no_weight_add_nothing(weight: float, rewards: list[int]) -> None:
    samples = [sample_of([reward]) for reward in rewards]
    assert turn_advantages(samples, discount=1.0, weight=weight, normalize_by_std=True) is None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied", TinyModel.TIED, seed=1)


def figures(model_dir: Path, samples: list[Sample], **changes: float) -> tuple[float, float, bool]:
    settings = TrainerSettings().model_copy(update=changes)
    policy = FsdpPolicy(model_dir, settings, dtype=torch.float32)
    report = train_step(policy, samples, advantages_of(samples, settings), OPTIONS, dense=dense_of(samples, settings))
    return report.loss, report.grad_norm, report.skipped


def test_zero_rewards_of_turns_change_no_bit_of_a_step(model_dir: Path) -> None:
    samples = siblings()
    zeros = [replace(one, token_rewards=np.zeros(one.num_tokens, np.float32)) for one in samples]
    assert figures(model_dir, zeros) == figures(model_dir, samples)


def test_rewards_of_turns_alone_teach_what_equal_rewards_of_samples_would(model_dir: Path) -> None:
    samples = siblings()
    dense = []
    for one in samples:
        column = np.zeros(one.num_tokens, np.float32)
        column[-1] = one.reward
        dense.append(replace(one, reward=0.0, token_rewards=column))
    loss, norm, skipped = figures(model_dir, samples)
    assert not skipped
    assert figures(model_dir, dense)[:2] == pytest.approx((loss, norm), rel=1e-5)
    assert figures(model_dir, dense, dense_weight=0.0)[2]


def test_a_column_of_another_length_is_refused(model_dir: Path) -> None:
    samples = siblings()
    policy = FsdpPolicy(model_dir, TrainerSettings(), dtype=torch.float32)
    with pytest.raises(ValueError, match="dense: expected one float32"):
        train_step(policy, samples, np.ones(len(samples), np.float32), OPTIONS, dense=[np.ones(1, np.float32)] * len(samples))
