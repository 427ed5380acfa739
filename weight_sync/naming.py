"""What the trainer calls a tensor, and what the engine calls it.

Invariant: two tensors never get one name; a tensor may be left out only by saying so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator

import torch

from weight_sync.errors import WeightSyncError

NameMap = Callable[[str], str | None]
"""The engine's name of a tensor; None: it is not sent."""


def load_name_map(path: str | None) -> NameMap | None:
    """The function at `module:function`. Raises WeightSyncError when there is none."""
    if path is None:
        return None
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise WeightSyncError(f"weight_sync.name_map={path} cannot be loaded: {error}") from error
    if not callable(found):
        raise WeightSyncError(f"weight_sync.name_map={path} is {type(found).__name__}, expected a function of a name")
    mapped: NameMap = found
    return mapped


def renamed(named_tensors: Iterable[tuple[str, torch.Tensor]], name_map: NameMap | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the engine's names. Raises WeightSyncError when two get the same one."""
    sources: dict[str, str] = {}
    for name, tensor in named_tensors:
        new = name if name_map is None else name_map(name)
        if new is None:
            continue
        if new in sources:
            raise WeightSyncError(f"weight_sync.name_map gives {sources[new]!r} and {name!r} the same name, {new!r}")
        sources[new] = name
        yield new, tensor
