"""Adapters in the trainer: what is trained, saved and handed to engines is one model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from configs.schema import TrainerSettings
from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.trainer.sequences import siblings
from trainer.errors import CheckpointError, ModelError
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step

LOSS = LossOptions(max_importance_weight=1e9)
OPTIONS = UpdateOptions(learning_rate=0.05, warmup_steps=0, loss=LOSS)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyModel, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(root / kind, kind, seed=1) for kind in TinyModel}


def policy_of(
    directory: Path, *, dtype: torch.dtype = torch.float32, exports_adapters: bool = False, seed: int = 0, **settings: object
) -> FsdpPolicy:
    trainer = TrainerSettings(**{"lora_rank": 4, "lora_alpha": 8.0, **settings})
    return FsdpPolicy(directory, trainer, dtype=dtype, exports_adapters=exports_adapters, seed=seed)


def trained(policy: FsdpPolicy, *, steps: int = 2) -> FsdpPolicy:
    samples = siblings(seed=0)
    for _ in range(steps):
        train_step(policy, samples, np.linspace(-1, 1, len(samples)).astype(np.float32), OPTIONS)
    return policy


@pytest.mark.parametrize("kind", TinyModel)
def test_before_the_first_step_the_exported_weights_are_the_checkpoints(
    directories: dict[TinyModel, Path], kind: TinyModel
) -> None:
    exported = dict(policy_of(directories[kind]).export_weights())
    expected = checkpoint_tensors(directories[kind])
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", TinyModel)
def test_merged_weights_compute_what_the_trainer_computes(
    directories: dict[TinyModel, Path], kind: TinyModel, tmp_path: Path
) -> None:
    """B141: after a step the merged weight differs from the initial one, and a plain model with it gives the trainer's
    logprobs."""
    policy = trained(policy_of(directories[kind]))
    merged = {name: tensor.clone() for name, tensor in policy.export_weights()}
    initial = checkpoint_tensors(directories[kind])
    changed = {name for name in initial if not torch.equal(initial[name], merged[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    model = AutoModelForCausalLM.from_pretrained(directories[kind], dtype=torch.float32)
    model.save_pretrained(tmp_path, state_dict=merged, save_original_format=False)
    plain = FsdpPolicy(tmp_path, TrainerSettings(), dtype=torch.float32)
    for got, expected in zip(plain.logprobs(siblings(seed=0)), policy.logprobs(siblings(seed=0)), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-4)


def test_only_adapters_are_trained(directories: dict[TinyModel, Path]) -> None:
    policy = policy_of(directories[TinyModel.TIED], lora_targets=("q_proj", "v_proj"))
    layers, hidden, q_out, v_out, rank = 2, 64, 64, 32, 4
    assert policy.num_parameters == layers * rank * (2 * hidden + q_out + v_out)
    frozen = {name: p.detach().clone() for name, p in policy._model.named_parameters() if not p.requires_grad}
    trained(policy)
    now = dict(policy._model.named_parameters())
    assert all(torch.equal(tensor, now[name]) for name, tensor in frozen.items())


def test_adapters_are_exported_under_the_names_of_pefts_files(directories: dict[TinyModel, Path], tmp_path: Path) -> None:
    policy = trained(policy_of(directories[TinyModel.TIED], exports_adapters=True))
    exported = dict(policy.export_weights())
    policy.save_adapter(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directories[TinyModel.TIED]), str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    tokens = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    merged = AutoModelForCausalLM.from_pretrained(directories[TinyModel.TIED])
    whole = policy_of(directories[TinyModel.TIED])
    policy.save(_made(tmp_path / "state"))
    whole.load(tmp_path / "state")
    merged.load_state_dict(dict(whole.export_weights()), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, merged(tokens).logits, atol=1e-3, rtol=1e-3)


def test_a_resumed_run_goes_on_bit_by_bit(directories: dict[TinyModel, Path], tmp_path: Path) -> None:
    directory = directories[TinyModel.TIED]
    straight = trained(policy_of(directory, dtype=torch.bfloat16), steps=4)
    first = trained(policy_of(directory, dtype=torch.bfloat16), steps=2)
    first.save(_made(tmp_path / "state"))
    resumed = policy_of(directory, dtype=torch.bfloat16, seed=9)
    resumed.load(tmp_path / "state")
    trained(resumed, steps=2)
    expected = dict(straight.export_weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.export_weights())


def test_a_checkpoint_of_other_adapters_is_refused_by_the_name_of_the_setting(
    directories: dict[TinyModel, Path], tmp_path: Path
) -> None:
    directory = directories[TinyModel.TIED]
    policy_of(directory, lora_targets=("q_proj",)).save(_made(tmp_path / "state"))
    with pytest.raises(CheckpointError, match=r"state: trainer\.lora_rank: got 0, expected 4"):
        policy_of(directory, lora_rank=0).load(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"trainer\.lora_rank: got 8, expected 4"):
        policy_of(directory, lora_rank=8, lora_targets=("q_proj",)).load(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"trainer\.lora_targets: got q_proj, v_proj, expected q_proj"):
        policy_of(directory, lora_targets=("q_proj", "v_proj")).load(tmp_path / "state")
    policy_of(directory, lora_rank=0).save(_made(tmp_path / "whole"))
    with pytest.raises(CheckpointError, match=r"trainer\.lora_rank: got 4, expected 0"):
        policy_of(directory).load(tmp_path / "whole")


def test_a_checkpoint_of_another_base_or_another_scale_is_refused(directories: dict[TinyModel, Path], tmp_path: Path) -> None:
    policy_of(directories[TinyModel.TIED]).save(_made(tmp_path / "state"))
    with pytest.raises(CheckpointError, match=r"lora_alpha: got 8\.0, expected 16\.0"):
        policy_of(directories[TinyModel.TIED], lora_alpha=16.0).load(tmp_path / "state")
    other = make_tiny_model(tmp_path / "other", TinyModel.TIED, seed=2)
    with pytest.raises(CheckpointError, match="base: got"):
        policy_of(other).load(tmp_path / "state")


def test_the_same_seed_gives_the_same_adapters(directories: dict[TinyModel, Path]) -> None:
    one, same, other = (
        dict(policy_of(directories[TinyModel.TIED], exports_adapters=True, seed=seed).export_weights()) for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_a_target_that_names_no_layer_is_refused_with_those_there_are(directories: dict[TinyModel, Path]) -> None:
    """B141: an adapter that trains nothing must not look like one that does."""
    with pytest.raises(ModelError, match=r"got query_proj, expected some of .*q_proj"):
        policy_of(directories[TinyModel.TIED], lora_targets=("q_proj", "query_proj"))


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
