"""The ranks that train one model together.

Invariant: with one rank nothing here communicates, and every function returns what it was given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.errors import ModelError
from trainer.metrics import MAXIMA, TokenSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the ranks of the default process group; alone where there is none."""

    rank: int
    num_ranks: int
    device: torch.device

    @classmethod
    def current(cls) -> Ranks:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not (dist.is_available() and dist.is_initialized()):
            return cls(rank=0, num_ranks=1, device=device)
        return cls(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=device)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; `tensor` may be overwritten."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_arrays(self, arrays: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        """Element-wise sums over ranks of arrays whose shapes are the same on each."""
        if self.num_ranks == 1 or not arrays:
            return list(arrays)
        flat = self.sum_tensor(torch.from_numpy(np.concatenate(arrays)).to(self.device)).cpu().numpy()
        return np.split(flat, np.cumsum([array.shape[0] for array in arrays])[:-1])

    def merge(self, sums: TokenSums) -> TokenSums:
        """The sums of all ranks."""
        if self.num_ranks == 1:
            return sums
        merged: dict[str, Any] = {}
        for names, operation in (
            ([field.name for field in fields(sums) if field.name not in MAXIMA], dist.ReduceOp.SUM),
            (sorted(MAXIMA), dist.ReduceOp.MAX),
        ):
            values = torch.tensor([getattr(sums, name) for name in names], dtype=torch.float64, device=self.device)
            dist.all_reduce(values, op=operation)
            merged |= dict(zip(names, values.tolist(), strict=True))
        return TokenSums(**{name: type(getattr(sums, name))(value) for name, value in merged.items()})

    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.num_ranks > 1:
            self.sum_tensor(torch.zeros((), device=self.device))


def shard(model: Any, ranks: Ranks, *, dtype: torch.dtype) -> None:
    """Shard `model` in place with FSDP2 over all ranks: one unit per decoder layer, one for the rest.

    Parameters become float32 shards; compute is in dtype, gradients are reduced in float32.
    """
    layer_names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in layer_names]
    if not layers:
        raise ModelError(f"{type(model).__name__}: has no decoder layers that it names as units ({sorted(layer_names)})")
    mesh = init_device_mesh(ranks.device.type, (ranks.num_ranks,))
    policy = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if dtype != torch.float32
        else MixedPrecisionPolicy()
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached, sharing memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def whole(part: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which `part` is this rank's, laid out as `like` is. Collective where `like` is sharded."""
    if not isinstance(like, DTensor):
        return part
    sharded = (
        part
        if isinstance(part, DTensor)
        else DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    )
    return sharded.full_tensor()
