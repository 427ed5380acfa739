"""One of four gloo ranks: trains as four, then, in its first two, as two, and writes what it found.

Arguments: rank, directory of the models, directory of the results. Rank 0 writes `N_KIND.safetensors` (gradients), `N.json`
(sums), `export_KIND.safetensors` and `merged_N.safetensors` (weights with trained adapters); each rank writes what a resumed
run differs in, as `resume_RANK.json`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from configs.schema import TrainerSettings
from tests.fakes.tiny_models import TinyModel
from tests.trainer.sequences import siblings
from trainer.fsdp import FsdpPolicy
from trainer.policy import LossOptions
from trainer.update import UpdateOptions, train_step

TIMEOUT = timedelta(seconds=120)
SETTINGS = TrainerSettings(max_tokens_per_microbatch=24)
ADAPTED = TrainerSettings(max_tokens_per_microbatch=24, lora_rank=4)
LOSS = LossOptions()
OPTIONS = UpdateOptions(learning_rate=1e-3, warmup_steps=2, loss=LOSS)


def batch(seed: int = 0) -> tuple[list[Any], np.ndarray]:
    samples = siblings(seed=seed)
    return samples, np.linspace(-1, 1, len(samples)).astype(np.float32)


def compare_gradients(rank: int, num_ranks: int, models: Path, results: Path) -> None:
    """Gradients, sums and logprobs of one batch, and of a batch that is too small for all ranks."""
    facts: dict[str, Any] = {}
    for kind in TinyModel:
        policy = FsdpPolicy(models / kind, SETTINGS, dtype=torch.float32)
        samples, advantages = batch()
        sums = policy.accumulate(samples, advantages, denominator=sum(s.num_trained_tokens for s in samples), options=LOSS)
        gradients = {name: gradient.contiguous() for name, gradient in policy.gradients()}
        facts[kind] = asdict(sums) | {"logprobs": [scores.tolist() for scores in policy.logprobs(samples)]}
        exported = {name: tensor.contiguous() for name, tensor in policy.export_weights()}
        small = FsdpPolicy(models / kind, SETTINGS, dtype=torch.float32)
        report = train_step(small, samples[:1], advantages[:1], OPTIONS)
        facts[kind]["small_grad_norm"] = report.grad_norm
        if rank == 0:
            save_file(gradients, results / f"{num_ranks}_{kind}.safetensors")
            save_file(exported, results / f"export_{num_ranks}_{kind}.safetensors")
    if rank == 0:
        (results / f"{num_ranks}.json").write_text(json.dumps(facts))


def compare_resumed(rank: int, models: Path, results: Path) -> None:
    """Ten steps straight against five, save, load into a new policy, five."""
    saved = results / "saved"
    straight = FsdpPolicy(models / TinyModel.TIED, SETTINGS, dtype=torch.bfloat16)
    for step in range(10):
        train_step(straight, *batch(step), OPTIONS)
        if step == 4:
            saved.mkdir(exist_ok=True)
            straight.save(saved)
    resumed = FsdpPolicy(models / TinyModel.TIED, SETTINGS, dtype=torch.bfloat16)
    resumed.load(saved)
    for step in range(5, 10):
        train_step(resumed, *batch(step), OPTIONS)
    one, other = straight._optimizer, resumed._optimizer
    differing = [
        f"{kind} {name}"
        for kind in ("weights", "first_moments", "second_moments")
        for name, left, right in zip(straight._names, getattr(one, kind), getattr(other, kind), strict=True)
        if not torch.equal(left, right)
    ]
    moved = any(bool(moment.any()) for moment in other.first_moments)
    (results / f"resume_{rank}.json").write_text(
        json.dumps({"differing": differing, "moved": moved, "steps": other.steps_taken})
    )


def trained_adapters(model: Path, *, steps: int = 3) -> FsdpPolicy:
    """A policy whose adapters have taken some steps."""
    policy = FsdpPolicy(model, ADAPTED, dtype=torch.float32)
    for step in range(steps):
        train_step(policy, *batch(step), OPTIONS)
    return policy


def compare_adapters(rank: int, num_ranks: int, models: Path, results: Path) -> None:
    """Merged weights after some steps, and whether saved adapters come back."""
    policy = trained_adapters(models / TinyModel.TIED)
    merged = {name: tensor.contiguous() for name, tensor in policy.export_weights()}
    saved = results / f"adapters_{num_ranks}"
    saved.mkdir(exist_ok=True)
    policy.save(saved)
    again = FsdpPolicy(models / TinyModel.TIED, ADAPTED, dtype=torch.float32, seed=5)
    again.load(saved)
    for name, tensor in again.export_weights():
        assert torch.equal(tensor, merged[name]), name
    if rank == 0:
        save_file(merged, results / f"merged_{num_ranks}.safetensors")


def main() -> None:
    rank, models, results = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    for num_ranks in (4, 2):
        if rank >= num_ranks:
            break
        store = dist.FileStore(str(results / f"store_{num_ranks}"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        compare_gradients(rank, num_ranks, models, results)
        compare_adapters(rank, num_ranks, models, results)
        if num_ranks == 2:
            compare_resumed(rank, models, results)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
