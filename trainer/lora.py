"""Low-rank adapters on a frozen causal model: put in, named, merged and written as other programs read them.

Invariant: what an engine is given computes what the trainer computes: either the adapters themselves, under the names of PEFT's
own files, or each adapted weight as W + (alpha / rank) B A, summed in float32 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from configs.schema import TrainerSettings
from trainer.durable import fsync
from trainer.errors import CheckpointError, ModelError
from trainer.ranks import local

PEFT_PREFIX = "base_model.model."
"""What PEFT's files put before a module's path."""
_NAME = "default"
_BASE = re.compile(r"\.base_layer(?=\.)")
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """One linear layer with its adapter."""

    path: str
    """Of the layer in the model, as its checkpoint names it."""
    base: torch.Tensor
    """[out, in], frozen."""
    a: torch.Tensor
    """[rank, in]."""
    b: torch.Tensor
    """[out, rank]; zeros at first, so that the model begins as it was."""
    scale: float
    """alpha / rank."""

    def merged(self, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """float32 [out, in] of these whole tensors. Lora (Hu et al. 2021, arXiv 2106.09685, section 4.1)."""
        return torch.addmm(base.float(), b.float(), a.float(), alpha=self.scale)


def add_adapters(model: Any, settings: TrainerSettings, *, seed: int) -> None:
    """Freeze `model` and put an adapter beside each linear layer that `lora_targets` names, in place.

    The same seed gives the same adapters. Raises ModelError where a target names no layer.
    """
    from peft import inject_adapter_in_model

    leaves = _linear_leaves(model)
    if unknown := [target for target in settings.lora_targets if target not in leaves]:
        raise ModelError(f"trainer.lora_targets: got {', '.join(unknown)}, expected some of {', '.join(sorted(leaves))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_config(settings, list(settings.lora_targets) or sorted(leaves)), model)


def adapted_layers(model: Any) -> list[Adapted]:
    """Every adapted layer, in the model's order. Tensors are those that the model holds now."""
    return [
        Adapted(
            path=path,
            base=module.base_layer.weight,
            a=module.lora_A[_NAME].weight,
            b=module.lora_B[_NAME].weight,
            scale=float(module.scaling[_NAME]),
        )
        for path, module in model.named_modules()
        if _NAME in getattr(module, "lora_A", {})
    ]


def without_adapters(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's weights alone, under the names that they have in a model without adapters."""
    for name, tensor in weights:
        if f".{_NAME}." not in name:
            yield _BASE.sub("", name), tensor


def peft_name(path: str, part: str) -> str:
    """Name in PEFT's files of `lora_A` or `lora_B` of the layer at `path`."""
    return f"{PEFT_PREFIX}{path}.{part}.weight"


def check_adapters(got: Mapping[str, Sequence[int]], settings: TrainerSettings, *, expected: Iterable[str]) -> None:
    """Raise CheckpointError naming the setting where parameters of a checkpoint, by name to shape, have no or other adapters.

    expected: names of the model's own parameters.
    """
    ranks = {shape[0] for name, shape in got.items() if f".lora_A.{_NAME}." in name}
    rank = max(ranks, default=0)
    if rank != settings.lora_rank:
        raise CheckpointError(f"trainer.lora_rank: got {settings.lora_rank}, expected {rank}, with which it was written")
    theirs, ours = _adapted_leaves(got), _adapted_leaves(expected)
    if theirs != ours:
        raise CheckpointError(
            f"trainer.lora_targets: got {', '.join(ours)}, expected {', '.join(theirs)}, with which it was written"
        )


def _adapted_leaves(names: Iterable[str]) -> list[str]:
    marker = f".lora_A.{_NAME}."
    return sorted({name.partition(marker)[0].rpartition(".")[2] for name in names if marker in name})


def write_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], settings: TrainerSettings, *, base_dir: Path | None
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT and engines read them, durably.

    tensors: by `peft_name`.
    """
    leaves = sorted({name.removesuffix(".weight").rsplit(".", 2)[-2] for name in tensors})
    config = _config(settings, leaves)
    config.base_model_name_or_path = None if base_dir is None else str(base_dir)
    config.save_pretrained(str(directory))
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, directory / _FILES[1])
    for name in _FILES:
        fsync(directory / name)


def base_digest(model: Any) -> str:
    """xxh3_64 over this rank's part of the frozen weights: adapters belong to these and no others."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(_BASE.sub("", name).encode())
            digest.update(local(parameter).contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config(settings: TrainerSettings, targets: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _linear_leaves(model: Any) -> frozenset[str]:
    """Last names of the model's linear layers, the language head left out."""
    head = model.get_output_embeddings()
    linear = (path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head)
    return frozenset(path.rpartition(".")[2] for path in linear)
