"""Weights under the names of the model's published checkpoint.

Invariant: the names and shapes are those that `from_pretrained` and inference engines read, whatever the model class keeps
inside (mixture-of-experts layers hold their experts fused); each weight comes once, tied ones under their first name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the model's own names, tied ones once, in the model's order."""
    seen: set[int] = set()
    weights = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights.append((name, tensor))
    return weights


def published_weights(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]], *, gather: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (published name, whole tensor), layer by layer, so that at most one layer is held in both forms."""
    for _, layer in groupby(weights, key=lambda item: _layer_of(item[0])):
        with torch.no_grad():
            converted: dict[str, torch.Tensor] = revert_weight_conversion(
                model, {name: gather(tensor).detach() for name, tensor in layer}
            )
        yield from converted.items()


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match.group(1) if match else name
