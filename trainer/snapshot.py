"""A policy's state on disk: float32 masters, both moments and the number of steps.

Invariant: reading gives back the bits that were written. Each rank writes its own shards; a description says for how many ranks
and which parameters, and reading refuses any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.durable import fsync
from trainer.errors import CheckpointError
from trainer.optimizer import AdamW
from trainer.ranks import Ranks

FORMAT = 1
_DESCRIPTION = "policy.json"
NO_FACTS: Mapping[str, object] = {}


def write(
    directory: Path,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    optimizer: AdamW,
    ranks: Ranks,
    *,
    facts: Mapping[str, object] = NO_FACTS,
) -> None:
    """Write into `directory`, which exists; returns when every rank's file is on disk. `facts` are plain values that `read`
    must be given alike."""
    tensors: dict[str, torch.Tensor] = {}
    for kind, parts in _kinds(optimizer):
        tensors |= {f"{kind}/{name}": part.contiguous() for name, part in zip(names, parts, strict=True)}
    path = directory / _file_name(ranks)
    save_file(tensors, path)
    fsync(path)
    if ranks.rank == 0:
        description = _description(names, parameters, ranks) | dict(facts) | {"optimizer_steps": optimizer.steps_taken}
        (directory / _DESCRIPTION).write_text(json.dumps(description, indent=1))
        fsync(directory / _DESCRIPTION)
    ranks.barrier()


def read(
    directory: Path,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    optimizer: AdamW,
    ranks: Ranks,
    *,
    facts: Mapping[str, object] = NO_FACTS,
) -> None:
    """Fill the optimizer's masters and moments in place. Raises CheckpointError, with nothing changed, when they do not fit."""
    path = directory / _DESCRIPTION
    try:
        found = json.loads(path.read_text())
        steps = int(found.pop("optimizer_steps"))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    expected = _description(names, parameters, ranks) | (dict(facts) if ranks.rank == 0 else {})
    for key, value in expected.items():
        if found.get(key) != value:
            raise CheckpointError(f"{path}: {_difference(key, found.get(key), value)}")
    path = directory / _file_name(ranks)
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for kind, parts in _kinds(optimizer):
                for name, part in zip(names, parts, strict=True):
                    part.copy_(file.get_tensor(f"{kind}/{name}"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    optimizer.steps_taken = steps


def shapes_in(directory: Path) -> dict[str, list[int]]:
    """Name to shape of what was written there. Raises CheckpointError."""
    path = directory / _DESCRIPTION
    try:
        shapes: dict[str, list[int]] = json.loads(path.read_text())["parameters"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return shapes


def _kinds(optimizer: AdamW) -> tuple[tuple[str, list[torch.Tensor]], ...]:
    return ("master", optimizer.weights), ("first_moment", optimizer.first_moments), ("second_moment", optimizer.second_moments)


def _file_name(ranks: Ranks) -> str:
    return f"rank_{ranks.rank}_of_{ranks.num_ranks}.safetensors"


def _description(names: Sequence[str], parameters: Sequence[torch.Tensor], ranks: Ranks) -> dict[str, object]:
    return {
        "format": FORMAT,
        "num_ranks": ranks.num_ranks,
        "parameters": {name: list(parameter.shape) for name, parameter in zip(names, parameters, strict=True)},
    }


def _difference(key: str, got: object, expected: object) -> str:
    if not isinstance(got, dict) or not isinstance(expected, dict):
        return f"{key}: got {got}, expected {expected}"
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            return f"parameter {name}: got shape {got.get(name, 'none')}, expected {expected.get(name, 'none')}"
    return f"{key}: parameters come in another order than the model's"
