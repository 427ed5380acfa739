"""The FSDP2 policy on one rank against plain forward and backward passes of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import TrainerSettings
from sample_bus.sample import Sample
from tests.fakes.samples import make_sample
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.trainer.sequences import of_lengths, siblings
from trainer.errors import ModelError, NonFiniteError, PackingError
from trainer.forward import _entropies
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions, Proximal
from trainer.update import UpdateOptions, train_step

OPTIONS = LossOptions(max_importance_weight=1e9)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyModel, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(root / kind, kind, seed=1) for kind in TinyModel}


def policy_of(directory: Path, *, dtype: torch.dtype = torch.float32, **settings: object) -> FsdpPolicy:
    return FsdpPolicy(directory, TrainerSettings(**settings), dtype=dtype)  # type: ignore[arg-type]


def options(learning_rate: float = 1e-3, *, loss: LossOptions = OPTIONS) -> UpdateOptions:
    return UpdateOptions(learning_rate=learning_rate, warmup_steps=0, loss=loss)


def reference_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """[trained tokens] by a forward pass of this one sequence."""
    logits = model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0].float() / sample.temperature
    positions = np.flatnonzero(sample.loss_mask)
    ids = torch.from_numpy(sample.tokens[positions].astype(np.int64))
    return torch.log_softmax(logits, -1)[torch.from_numpy(positions - 1), ids]


def reference_gradients(directory: Path, samples: Sequence[Sample], advantages: np.ndarray) -> dict[str, torch.Tensor]:
    """Gradient of -sum(exp(logprob - behavior) A) / tokens, sequence by sequence: the loss's at its first pass."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    denominator = sum(sample.num_trained_tokens for sample in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        behavior = torch.from_numpy(sample.behavior_logprobs[sample.loss_mask != 0])
        ratio = torch.exp(reference_logprobs(model, sample) - behavior)
        torch.autograd.backward(-(ratio * float(advantage)).sum() / denominator)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((got[name] - gradient).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("kind", list(TinyModel))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward_pass(
    directories: dict[TinyModel, Path], kind: TinyModel, temperature: float
) -> None:
    """B50"""
    samples = siblings(temperature=temperature)
    model = AutoModelForCausalLM.from_pretrained(directories[kind], dtype=torch.float32).eval()
    scored = policy_of(directories[kind]).logprobs(samples)
    for sample, logprobs in zip(samples, scored, strict=True):
        trained = sample.loss_mask != 0
        with torch.no_grad():
            np.testing.assert_allclose(logprobs[trained], reference_logprobs(model, sample).numpy(), atol=2e-5)
        assert (logprobs[~trained] == 0).all()


@pytest.mark.parametrize("kind", list(TinyModel))
def test_gradients_are_those_of_separate_sequences(directories: dict[TinyModel, Path], kind: TinyModel) -> None:
    samples = siblings()
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    policy = policy_of(directories[kind])
    policy.accumulate(samples, advantages, denominator=sum(s.num_trained_tokens for s in samples), options=OPTIONS)
    assert_same_gradients(dict(policy.gradients()), reference_gradients(directories[kind], samples, advantages))


@pytest.mark.parametrize("proximal", list(Proximal))
def test_gradients_do_not_depend_on_the_number_of_microbatches(directories: dict[TinyModel, Path], proximal: Proximal) -> None:
    """B73, B74"""
    samples = of_lengths(1, 2, 4, 8, 16, 24, 33, 64)
    advantages = np.array([1, -1, 0.5, 2, -0.3, 0.7, -2, 1], np.float32)
    loss = LossOptions(proximal=proximal)
    results = {}
    for max_tokens in (4096, 100, 36):
        policy = policy_of(directories[TinyModel.TIED], max_tokens_per_microbatch=max_tokens)
        sums = policy.accumulate(samples, advantages, denominator=sum(s.num_trained_tokens for s in samples), options=loss)
        results[sums.num_microbatches] = (dict(policy.gradients()), sums)
    assert sorted(results) == [1, 2, 5]
    gradients, whole = results[1]
    for number in (2, 5):
        assert_same_gradients(results[number][0], gradients)
        np.testing.assert_allclose(results[number][1].loss, whole.loss, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[number][1].entropy, whole.entropy, rtol=1e-5)


def test_gradients_do_not_depend_on_how_a_step_is_split_over_calls(directories: dict[TinyModel, Path]) -> None:
    """B72"""
    samples = siblings()
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    denominator = sum(sample.num_trained_tokens for sample in samples)
    whole, parts = policy_of(directories[TinyModel.UNTIED]), policy_of(directories[TinyModel.UNTIED])
    whole.accumulate(samples, advantages, denominator=denominator, options=OPTIONS)
    for start in range(0, len(samples), 5):
        part = slice(start, start + 5)
        parts.accumulate(samples[part], advantages[part], denominator=denominator, options=OPTIONS)
    assert_same_gradients(dict(parts.gradients()), dict(whole.gradients()))


def test_bfloat16_gradients_are_accumulated_in_float32(directories: dict[TinyModel, Path]) -> None:
    samples = siblings()
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    policy = policy_of(directories[TinyModel.TIED], dtype=torch.bfloat16, max_tokens_per_microbatch=16)
    denominator = sum(s.num_trained_tokens for s in samples)
    sums = policy.accumulate(samples, advantages, denominator=denominator, options=OPTIONS)
    assert sums.num_microbatches > 1
    got = dict(policy.gradients())
    assert {gradient.dtype for gradient in got.values()} == {torch.float32}
    expected = reference_gradients(directories[TinyModel.TIED], samples, advantages)
    for name, gradient in expected.items():
        cosine = torch.nn.functional.cosine_similarity(got[name].flatten(), gradient.flatten(), dim=0)
        assert float(cosine) > 0.98, name


def test_at_learning_rate_zero_scoring_and_training_agree_to_the_bit(directories: dict[TinyModel, Path]) -> None:
    """B70"""
    policy = policy_of(directories[TinyModel.TIED], dtype=torch.bfloat16)
    samples = siblings()
    for sample, logprobs in zip(samples, policy.logprobs(samples), strict=True):
        sample.behavior_logprobs[:] = logprobs
    advantages = np.full(len(samples), 0.5, np.float32)
    for _ in range(2):
        report = train_step(policy, samples, advantages, options(0.0))
        assert report.mismatch_max_abs == 0.0
        assert report.importance_mean == 1.0
    assert report.clip_fraction == 0.0


def test_tokens_sampled_at_a_low_temperature_have_ratio_one(directories: dict[TinyModel, Path]) -> None:
    """B50: the reference sampler draws at temperature 0.6 and gives tempered logprobs."""
    model = AutoModelForCausalLM.from_pretrained(directories[TinyModel.UNTIED], dtype=torch.float32).eval()
    torch.manual_seed(0)
    samples = []
    for seat in range(16):
        tokens = torch.tensor([[5, 6, 7]])
        logprobs = []
        for _ in range(8):
            with torch.no_grad():
                tempered = torch.log_softmax(model(input_ids=tokens).logits[0, -1] / 0.6, -1)
            drawn = torch.multinomial(tempered.exp(), 1)
            logprobs.append(float(tempered[drawn]))
            tokens = torch.cat([tokens, drawn[None]], dim=1)
        samples.append(
            make_sample(
                prompt=[5, 6, 7], reply=tokens[0, 3:].tolist(), logprobs=logprobs, seat=seat, group_size=16, temperature=0.6
            )
        )
    report = train_step(policy_of(directories[TinyModel.UNTIED]), samples, np.ones(16, np.float32), options(0.0))
    assert abs(report.importance_mean - 1) < 1e-3
    assert report.mismatch_max_abs < 1e-4


def test_a_step_lowers_the_loss_that_it_was_taken_on(directories: dict[TinyModel, Path]) -> None:
    policy = policy_of(directories[TinyModel.TIED])
    samples = siblings()
    advantages = np.where(np.arange(len(samples)) % 2, 1, -1).astype(np.float32)
    before, after = (train_step(policy, samples, advantages, options(3e-4)) for _ in range(2))
    assert after.loss < before.loss
    assert (before.optimizer_steps, after.optimizer_steps) == (1, 2)


def test_a_step_without_a_signal_changes_nothing_but_is_measured(directories: dict[TinyModel, Path]) -> None:
    """B77, B80"""
    policy = policy_of(directories[TinyModel.TIED])
    samples = siblings()
    train_step(policy, samples, np.ones(len(samples), np.float32), options())
    before = {name: tensor.clone() for name, tensor in policy.export_weights()}
    report = train_step(policy, samples, np.zeros(len(samples), np.float32), options())
    assert report.skipped
    assert report.mismatch_mean_abs > 0
    masked = siblings()
    for sample in masked:
        sample.loss_mask[:] = 0
    empty = train_step(policy, masked, np.ones(len(masked), np.float32), options())
    assert empty.skipped
    assert (empty.loss, empty.entropy, empty.grad_norm) == (0.0, 0.0, 0.0)
    assert policy.optimizer_steps == 1
    for name, tensor in policy.export_weights():
        assert torch.equal(tensor, before[name]), name


def test_samples_without_advantage_count_in_the_metrics_and_not_in_the_gradient(directories: dict[TinyModel, Path]) -> None:
    samples = siblings()
    advantages = np.zeros(len(samples), np.float32)
    advantages[:4] = [1, -1, 1, -1]
    policy, other = policy_of(directories[TinyModel.TIED]), policy_of(directories[TinyModel.TIED])
    sums = policy.accumulate(samples, advantages, denominator=40, options=OPTIONS)
    other.accumulate(samples[:4], advantages[:4], denominator=40, options=OPTIONS)
    assert sums.num_tokens == sum(sample.num_trained_tokens for sample in samples)
    assert_same_gradients(dict(policy.gradients()), dict(other.gradients()))


@pytest.mark.parametrize("kind", list(TinyModel))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_weights_carry_the_names_and_values_of_the_published_checkpoint(
    directories: dict[TinyModel, Path], kind: TinyModel, dtype: torch.dtype
) -> None:
    """B139"""
    exported = list(policy_of(directories[kind], dtype=dtype).export_weights())
    published = checkpoint_tensors(directories[kind])
    assert len(exported) == len({name for name, _ in exported})
    assert {name for name, _ in exported} == published.keys()
    for name, tensor in exported:
        assert torch.equal(tensor, published[name].to(dtype)), name


def test_steps_are_the_same_to_the_bit_when_repeated(directories: dict[TinyModel, Path]) -> None:
    def run() -> dict[str, torch.Tensor]:
        policy = policy_of(directories[TinyModel.MOE], max_tokens_per_microbatch=24)
        for seed in range(3):
            samples = siblings(seed=seed)
            train_step(policy, samples, np.linspace(-1, 1, len(samples)).astype(np.float32), options())
        return dict(policy.export_weights())

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(directories: dict[TinyModel, Path]) -> None:
    policy = policy_of(directories[TinyModel.TIED])
    before = {name: tensor.clone() for name, tensor in policy.export_weights()}
    samples = siblings()
    with pytest.raises(NonFiniteError, match="loss: got nan"):
        train_step(policy, samples, np.full(len(samples), np.nan, np.float32), options())
    for parameter in policy._parameters:
        parameter.grad = torch.full_like(parameter, np.inf)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        policy.step(learning_rate=1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.export_weights())
    assert policy.optimizer_steps == 0


def test_gradients_are_scaled_down_to_the_norm_and_no_further(directories: dict[TinyModel, Path]) -> None:
    """Adam hides a constant scale, so the first moment is looked at: (1 - beta1) times the clipped gradient."""
    policy = policy_of(directories[TinyModel.TIED], max_grad_norm=0.5)
    samples = siblings()
    report = train_step(policy, samples, np.full(len(samples), 100.0, np.float32), options())
    assert report.grad_norm > 0.5
    moments = torch.cat([moment.flatten() for moment in policy._optimizer.first_moments])
    np.testing.assert_allclose(float(moments.norm()), 0.1 * 0.5, rtol=1e-4)


def test_a_token_outside_the_vocabulary_is_refused(directories: dict[TinyModel, Path]) -> None:
    policy = policy_of(directories[TinyModel.TIED])
    with pytest.raises(PackingError, match="token id: got 300, expected below the vocabulary's 300"):
        policy.logprobs([make_sample(reply=[300])])


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        policy_of(tmp_path)


def test_one_advantage_per_sample_is_demanded(directories: dict[TinyModel, Path]) -> None:
    with pytest.raises(ValueError, match=r"advantages: got shape \(1,\), expected \[12\]"):
        train_step(policy_of(directories[TinyModel.TIED]), siblings(), np.ones(1, np.float32), options())


@pytest.mark.parametrize("ruled_out", [False, True])
def test_entropies_are_those_of_the_distribution_even_where_tokens_are_ruled_out(ruled_out: bool) -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0], [3.0, 3.0, 3.0]])
    if ruled_out:
        logits[0, 2] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits[1:]).entropy().item()
    got = _entropies(torch.log_softmax(logits, -1))
    np.testing.assert_allclose(got[1], expected, rtol=1e-6)
    two = torch.distributions.Categorical(logits=logits[0, : 2 if ruled_out else 3]).entropy()
    np.testing.assert_allclose(got[0], two, rtol=1e-6)
