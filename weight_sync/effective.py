"""The weights that a running vLLM model really computes with, read back under their checkpoint names.

On a CPU, vLLM repacks Linear and expert weights into kernel layouts and drops the originals, so a parameter says nothing
about what is multiplied. A linear layer is read by pushing an identity matrix through it, which returns each weight exactly
(one product is the weight, all others are 0). Packed expert weights are read by packing tensors that hold their own
positions, which shows where each element went.

A `Sample` reads a few columns of a few layers instead, at about the cost of one token. Works for one worker (no tensor
parallelism). Modules are told apart by what they have, not by their class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

_IDENTITY_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Effective weights beside the ones that were loaded."""

    num_equal: int
    different: tuple[str, ...]
    """Tensors whose effective values are not the loaded ones, as far as they were read."""
    unread: tuple[str, ...]
    """Loaded tensors that were not found in the model under their names; of a sample nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Which weights are read: the same seed chooses the same."""

    seed: int
    num_matrices: int
    """Matrices that are read; vectors all are."""
    num_columns: int
    """Of each matrix, counted along its inputs."""

    def columns(self, num_columns: int, generator: torch.Generator) -> torch.Tensor:
        """int64[k], distinct, rising."""
        order = torch.randperm(num_columns, generator=generator)[: self.num_columns]
        return order.sort().values


def compare_effective(
    model: torch.nn.Module, loaded: Mapping[str, torch.Tensor], *, tied: bool, sample: Sample | None = None
) -> Comparison:
    """Compare bit by bit, but for the sign of zero and for subnormal numbers, which matrix units may flush to zero.

    Args:
        tied: the model computes its logits with the embedding; the head is then compared with that.
        sample: what is read of it; None: everything. Packed expert weights are in no sample.
    """
    equal: set[str] = set()
    different: list[str] = []
    embedding: str | None = None
    for name, effective, is_head, columns in _effective(model, sample):
        if effective.numel() and embedding is None and not is_head and "embed" in name:
            embedding = name
        source = embedding if is_head and tied and embedding is not None and name not in loaded else name
        expected = loaded.get(source)
        if expected is None:
            continue
        if columns is not None:
            expected = expected[:, columns]
        if _same(effective, expected):
            equal.add(name)
        else:
            different.append(name)
    unread = tuple(sorted(loaded.keys() - equal - set(different))) if sample is None else ()
    return Comparison(num_equal=len(equal), different=tuple(different), unread=unread)


def effective_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) for every weight of the model."""
    for name, tensor, *_ in _effective(model, None):
        yield name, tensor


def _same(effective: torch.Tensor, expected: torch.Tensor) -> bool:
    effective = effective.to(device="cpu", dtype=expected.dtype)
    if effective.shape != expected.shape:
        return False
    if torch.equal(effective, expected):
        return True
    if not expected.dtype.is_floating_point:
        return False
    tiny = torch.finfo(expected.dtype).tiny
    return torch.equal(torch.where(effective.abs() < tiny, 0, effective), torch.where(expected.abs() < tiny, 0, expected))


def _effective(model: torch.nn.Module, sample: Sample | None) -> Iterator[tuple[str, torch.Tensor, bool, torch.Tensor | None]]:
    """(name, weight, whether a head, columns that were read or None for all)."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    modules = dict(model.named_modules())
    chosen, generator = _choose(modules, sample)
    for path, module in modules.items():
        parameters = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
        if "w13_weight" in parameters:
            if sample is None:
                yield from ((*found, None) for found in _expert_weights(path, module))
            continue
        is_head = hasattr(module, "tie_weights")
        is_packed = hasattr(module, "cpu_linear") and (is_head or not hasattr(module, "org_vocab_size"))
        for name, parameter in parameters.items():
            tensor, columns = parameter, None
            is_matrix = name == "weight" and (is_packed or parameter.ndim == 2)
            if is_matrix and sample is not None:
                if path not in chosen:
                    continue
                columns = sample.columns(_num_columns(module) if is_packed else parameter.shape[1], generator)
            if is_packed and name == "weight":
                tensor = _push_identity(module, columns)
            elif columns is not None:
                tensor = parameter[:, columns.to(parameter.device)]
            rows = getattr(module, "org_vocab_size", None)
            for full_name, part in _unfused(path, name, tensor if rows is None else tensor[:rows], module, packed):
                yield full_name, part, is_head, columns


def _choose(modules: Mapping[str, torch.nn.Module], sample: Sample | None) -> tuple[frozenset[str], torch.Generator]:
    """Paths of the matrices that a sample reads."""
    generator = torch.Generator().manual_seed(0 if sample is None else sample.seed)
    if sample is None:
        return frozenset(), generator
    paths = [path for path, module in modules.items() if "weight" in dict(module.named_parameters(recurse=False))]
    paths = [path for path in paths if hasattr(modules[path], "cpu_linear") or modules[path].get_parameter("weight").ndim == 2]
    order = torch.randperm(len(paths), generator=generator)[: sample.num_matrices]
    return frozenset(paths[index] for index in order.tolist()), generator


def _unfused(
    path: str, name: str, tensor: torch.Tensor, module: torch.nn.Module, packed: Mapping[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut a fused projection into the checkpoint's; anything else as it is."""
    parent, _, leaf = path.rpartition(".")
    parts = packed.get(leaf)
    sizes = getattr(module, "output_sizes", None)
    if parts is None or sizes is None or len(parts) != len(sizes):
        yield f"{path}.{name}" if path else name, tensor
        return
    for part, rows in zip(parts, torch.split(tensor, list(sizes)), strict=True):
        yield f"{parent}.{part}.{name}" if parent else f"{part}.{name}", rows


def _num_columns(module: torch.nn.Module) -> int:
    columns = getattr(module, "embedding_dim", None) or getattr(module, "input_size_per_partition", None)
    return int(columns if columns is not None else getattr(module, "input_size"))  # noqa: B009  (set by vLLM)


@torch.no_grad()
def _push_identity(module: torch.nn.Module, columns: torch.Tensor | None = None) -> torch.Tensor:
    """The [out, in] matrix by which the layer multiplies, or these columns of it."""
    weight: torch.Tensor = module.get_parameter("weight").detach()
    linear = getattr(module, "cpu_linear")  # noqa: B009  (an attribute that vLLM sets on any module)
    width = _num_columns(module)
    wanted = torch.arange(width) if columns is None else columns
    blocks = []
    for start in range(0, len(wanted), _IDENTITY_ROWS):
        block = wanted[start : start + _IDENTITY_ROWS]
        identity = torch.zeros(len(block), width, dtype=weight.dtype)
        identity[torch.arange(len(block)), block] = 1
        blocks.append(linear(identity, weight, None).clone())
    return torch.cat(blocks).t().contiguous()


def _expert_weights(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    w13, w2 = module.get_parameter("w13_weight").detach(), module.get_parameter("w2_weight").detach()
    method = getattr(module, "quant_method", None)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    isa = getattr(experts, "isa", None)
    if w13.device.type == "cpu" and isa is not None and not getattr(experts, "_use_zentorch", False):
        w13, w2 = _unpack(w13, isa), _unpack(w2, isa)
    config = getattr(module, "moe_config")  # noqa: B009
    padded, size = w13.shape[1] // 2, int(config.intermediate_size_per_partition)
    prefix = getattr(module, "layer_name", None) or path
    names = tuple(getattr(module, f"ckpt_{part}_proj_name") for part in ("gate", "up", "down"))
    for expert in range(w13.shape[0]):
        tensors = (w13[expert, :size], w13[expert, padded : padded + size], w2[expert, :, :size])
        for name, tensor in zip(names, tensors, strict=True):
            yield f"{prefix}.{expert}.{name}.weight", tensor, False


def _unpack(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Undo vLLM's packing of expert weights, whatever order it uses, given that it only moves elements within an expert."""
    elements = packed[0].numel()
    target = torch.zeros(elements, dtype=torch.int64)
    for digit in range(-(-elements.bit_length() // 8)):
        positions = (torch.arange(elements) >> (8 * digit)) & 255  # below 257 every integer is exact in bfloat16
        marked = positions.to(packed.dtype).view_as(packed[0]).unsqueeze(0).contiguous()
        moved = torch.empty_like(marked)
        torch.ops._C.prepack_moe_weight(marked, moved, isa)  # noqa: SLF001  (the namespace is called so)
        target |= moved.view(-1).to(torch.int64) << (8 * digit)
    unpacked = torch.empty_like(packed)
    unpacked.view(packed.shape[0], -1)[:, target] = packed.reshape(packed.shape[0], -1)
    return unpacked
