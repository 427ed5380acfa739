"""Checksums of tensors as they lie in memory, to be compared with those of the trainer.

Invariant: computed over the same bytes as a manifest's (row-major, in the dtype that travelled), at the moment of asking.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name to xxh3_64 as 16 hex digits."""
    return {name: checksum_of(tensor) for name, tensor in tensors.items()}


def checksum_of(tensor: torch.Tensor) -> str:
    """xxh3_64 of one tensor's bytes."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else xxhash.xxh3_64_hexdigest(b"")
