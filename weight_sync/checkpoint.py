"""What an engine's model expects to be given: the tensors of the checkpoint that it was started from.

Invariant: weights whose names, shapes or dtype are not the engine's are refused before one byte of them moves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from weight_sync.errors import ManifestMismatch
from weight_sync.manifest import CAST_DTYPES, Manifest, dtype_name

_MAX_HEADER_BYTES = 100 << 20
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_SHOWN = 10


def checkpoint_shapes(model_dir: Path) -> dict[str, tuple[int, ...]] | None:
    """Name to shape of all tensors in the directory's safetensors files, from their headers; None where there are none."""
    files = sorted(model_dir.glob("*.safetensors")) if model_dir.is_dir() else []
    if not files:
        return None
    return {name: shape for file in files for name, shape in _header_shapes(file)}


def _header_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        (num_bytes,) = struct.unpack("<Q", stream.read(8))
        if num_bytes > _MAX_HEADER_BYTES:
            raise ManifestMismatch(f"{file} has a header of {num_bytes} bytes, which is no safetensors file")
        header = json.loads(stream.read(num_bytes))
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith(_NOT_WEIGHTS):
            yield name, tuple(entry["shape"])


def check_against_checkpoint(
    manifest: Manifest, expected: dict[str, tuple[int, ...]] | None, *, dtype: torch.dtype, tied_heads: frozenset[str]
) -> None:
    """Refuse a manifest that does not fit the model.

    Args:
        expected: as `checkpoint_shapes` gives it; None: names and shapes are unknown and pass.
        dtype: the engine's compute type, in which floating tensors have to arrive.
        tied_heads: names that the model ties to its embedding; they may be missing on either side, and must not differ from
            the embedding where they are offered.

    Raises:
        ManifestMismatch: with the first ten differences.
    """
    differences = [
        f"{spec.name}: got {dtype_name(spec.dtype)}, the engine computes in {dtype_name(dtype)}"
        for spec in manifest.specs
        if spec.dtype in CAST_DTYPES and spec.dtype != dtype
    ]
    differences += _untied_heads(manifest, tied_heads)
    if expected is not None:
        differences += _differences(manifest, expected, tied_heads)
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ManifestMismatch(f"{len(differences)} differences: " + "; ".join(differences[:_SHOWN]) + more)


def _untied_heads(manifest: Manifest, tied_heads: frozenset[str]) -> Iterator[str]:
    """Heads that arrive with other bytes than any other tensor, though the engine has one tensor for both."""
    for spec, checksum in manifest:
        if spec.name in tied_heads and manifest.checksums.count(checksum) == 1:
            yield f"{spec.name}: got weights of its own, the engine ties it to its embedding"


def _differences(manifest: Manifest, expected: dict[str, tuple[int, ...]], tied_heads: frozenset[str]) -> Iterator[str]:
    offered = {spec.name: spec.shape for spec in manifest.specs}
    tied_to = dict(manifest.aliases)
    for name in sorted((expected.keys() | offered.keys() | tied_to.keys()) - tied_heads):
        got, wanted = offered.get(name), expected.get(name)
        if wanted is None:
            shape = offered[tied_to[name]] if got is None else got
            yield f"{name}: got {list(shape)}, the engine's model has no such tensor"
        elif name in tied_to:
            yield f"{name}: got it tied to {tied_to[name]}, the engine's model does not tie it"
        elif got is None:
            yield f"{name}: not offered, the engine's model has {list(wanted)}"
        elif got != wanted:
            yield f"{name}: got {list(got)}, the engine's model has {list(wanted)}"
