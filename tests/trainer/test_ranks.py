"""FSDP2 over real gloo ranks, in processes that are started once for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.tiny_models import TinyModel, checkpoint_tensors, make_tiny_model
from tests.trainer.rank_program import LOSS, OPTIONS, SETTINGS, batch, trained_adapters
from trainer.fsdp import FsdpPolicy
from trainer.update import train_step

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 240


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of the models and of what the ranks wrote."""
    models, results = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("results")
    for kind in TinyModel:
        make_tiny_model(models / kind, kind, seed=1)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "tests.trainer.rank_program"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(models), str(results)],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, said, strict=True):
        assert rank.returncode == 0, output[-4000:]
    return models, results


@pytest.fixture(scope="module")
def alone(ran: tuple[Path, Path]) -> dict[TinyModel, tuple[dict[str, torch.Tensor], Any, list[Any], float]]:
    """The same batch on one rank: gradients, sums, logprobs, and the gradient norm of the small batch."""
    found = {}
    samples, advantages = batch()
    for kind in TinyModel:
        policy = FsdpPolicy(ran[0] / kind, SETTINGS, dtype=torch.float32)
        sums = policy.accumulate(samples, advantages, denominator=sum(s.num_trained_tokens for s in samples), options=LOSS)
        gradients = {name: gradient.clone() for name, gradient in policy.gradients()}
        small = train_step(FsdpPolicy(ran[0] / kind, SETTINGS, dtype=torch.float32), samples[:1], advantages[:1], OPTIONS)
        found[kind] = gradients, sums, policy.logprobs(samples), small.grad_norm
    return found


@pytest.mark.parametrize("kind", list(TinyModel))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_and_sums_do_not_depend_on_the_number_of_ranks(
    ran: tuple[Path, Path], alone: dict[TinyModel, Any], kind: TinyModel, num_ranks: int
) -> None:
    """B73, B82; B20, B21: every rank makes as many passes, empty ones where it has nothing; B80: in the small batch all
    ranks but one have nothing to train."""
    expected, sums, logprobs, small_norm = alone[kind]
    got = load_file(ran[1] / f"{num_ranks}_{kind}.safetensors")
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((got[name] - gradient).abs().max()) <= 1e-5 * scale, name
    facts = json.loads((ran[1] / f"{num_ranks}.json").read_text())[kind]
    for name in ("loss", "mismatch_abs", "mismatch_max_abs", "importance", "kl_behavior_policy", "entropy"):
        np.testing.assert_allclose(facts[name], getattr(sums, name), rtol=1e-4, atol=1e-4)
    assert facts["num_tokens"] == sums.num_tokens
    for scores, reference in zip(facts["logprobs"], logprobs, strict=True):
        np.testing.assert_allclose(scores, reference, atol=2e-5)
    np.testing.assert_allclose(facts["small_grad_norm"], small_norm, rtol=1e-4)


@pytest.mark.parametrize("kind", list(TinyModel))
def test_sharded_weights_are_exported_whole(ran: tuple[Path, Path], kind: TinyModel) -> None:
    """B139"""
    exported = load_file(ran[1] / f"export_4_{kind}.safetensors")
    published = checkpoint_tensors(ran[0] / kind)
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_run_has_the_same_bits_on_every_rank(ran: tuple[Path, Path], rank: int) -> None:
    """B97"""
    facts = json.loads((ran[1] / f"resume_{rank}.json").read_text())
    assert facts == {"differing": [], "moved": True, "steps": 10}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_adapters_trained_by_several_ranks_are_merged_and_saved_as_by_one(ran: tuple[Path, Path], num_ranks: int) -> None:
    """B73, B141: shards of base and adapters are gathered before they are added."""
    models, results = ran
    expected = dict(trained_adapters(models / TinyModel.TIED).export_weights())
    got = load_file(results / f"merged_{num_ranks}.safetensors")
    initial = checkpoint_tensors(models / TinyModel.TIED)
    assert got.keys() == expected.keys()
    assert any(not torch.equal(tensor, initial[name]) for name, tensor in got.items())
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
