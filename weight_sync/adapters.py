"""The worker's side of adapters: a staged set of low-rank matrices becomes vLLM's adapter number 1, in memory and in place.

Invariant: every staged tensor belongs to a layer that takes it, and after a load each layer's slot holds exactly its tensors,
read back and compared where one worker holds the whole layer; what is not matched is an error before the engine is touched.

Names are those of PEFT's files: `base_model.model.PATH.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.effective import Comparison
from weight_sync.errors import ManifestMismatch, WeightLoadError
from weight_sync.manifest import Manifest, dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADAPTER_ID = 1
"""The first one that the server knows of, which is the one that it was started with."""
SCALE_KEY = "headrace_lora_scale"
"""In vLLM's additional config: alpha / rank."""
_NAME = re.compile(r"^base_model\.model\.(?P<path>.+)\.(?P<part>lora_A|lora_B)\.weight$")
_SHOWN = 10


def _unwrap_head(model: torch.nn.Module, manager: Any) -> None:
    """Take adapters out of the way of the language head, which never gets one.

    On a CPU vLLM 0.32 computes a head that could have one for as many rows as the batch samples, and its process ends at the
    first request for prompt logprobs beside others; and every step would pay for two products with zeros.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA

    for path, module in list(model.named_modules()):
        if isinstance(module, LogitsProcessorWithLoRA):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.base_layer)
            for name in [name for name, wrapped in manager.modules.items() if wrapped is module]:
                del manager.modules[name]


class AdapterLoader:
    """Loads staged adapters into one worker's model."""

    def __init__(self, manager: Any, *, scale: float, dtype: torch.dtype, max_rank: int) -> None:
        """`manager` is vLLM's LoRA model manager; `dtype` that of its slots."""
        self._manager = manager
        self.scale = scale
        self._dtype = dtype
        self._max_rank = max_rank

    @classmethod
    def of(cls, model: torch.nn.Module, vllm_config: VllmConfig) -> AdapterLoader | None:
        """None: the engine was started to be given whole weights."""
        options = vllm_config.additional_config
        if not isinstance(options, dict) or SCALE_KEY not in options:
            return None
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise RuntimeError(f"additional config {SCALE_KEY} without --enable-lora: there is nowhere to put adapters")
        _unwrap_head(model, manager)
        lora = vllm_config.lora_config
        return cls(manager, scale=float(options[SCALE_KEY]), dtype=lora.lora_dtype, max_rank=lora.max_lora_rank)

    def check(self, manifest: Manifest) -> None:
        """Refuse adapters that the model could not take. Raises ManifestMismatch with the first ten differences."""
        problems = list(self._problems(manifest))
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ManifestMismatch(f"{len(problems)} adapter tensors do not fit: " + "; ".join(problems[:_SHOWN]) + more)

    def _problems(self, manifest: Manifest) -> Iterator[str]:
        offered = {spec.name: spec for spec in manifest.specs}
        layers = dict(self._layers())
        if not offered:
            yield "no tensor was offered"
        for name, spec in offered.items():
            match = _NAME.match(name)
            if match is None:
                yield f"{name}: no name of an adapter's tensor"
                continue
            path, part = match["path"], match["part"]
            other = f"base_model.model.{path}.{'lora_B' if part == 'lora_A' else 'lora_A'}.weight"
            if path not in layers:
                yield f"{name}: the engine has no layer {path} that takes an adapter"
            elif other not in offered:
                yield f"{name}: without its other half {other}"
            elif spec.dtype != self._dtype:
                yield f"{name}: got {dtype_name(spec.dtype)}, the engine's adapters are {dtype_name(self._dtype)}"
            elif len(spec.shape) != 2 or (rank := spec.shape[part == "lora_B"]) > self._max_rank:
                yield f"{name}: got {list(spec.shape)}, expected a matrix of rank {self._max_rank} at most"
            elif offered[other].shape[part == "lora_A"] != rank:
                yield f"{name}: got rank {rank}, its other half has {offered[other].shape[part == 'lora_A']}"
            elif (size := spec.shape[part == "lora_A"]) != (expected := self._size(*layers[path], part)):
                yield f"{name}: got {size} {'inputs' if part == 'lora_A' else 'outputs'}, the engine's layer has {expected}"

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put `tensors` in place of the adapter before. Raises WeightLoadError when a slot does not hold what it was given."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        loras: dict[str, Any] = {}
        for path, a, b in self._pairs(tensors):
            rank = a.shape[0]
            loras[path] = LoRALayerWeights(path, rank, rank, a.clone(), self._scaled(b), scaling=1.0)
        self.clear()
        rank = max(layer.rank for layer in loras.values())
        self._manager.add_adapter(LoRAModel(ADAPTER_ID, rank, loras))
        self._manager.activate_adapter(ADAPTER_ID)
        found = self.compare(tensors)
        if found.different:
            raise WeightLoadError(
                f"{len(found.different)} adapter tensors differ in the engine's slots: {', '.join(found.different[:_SHOWN])}"
            )

    def clear(self) -> None:
        """Without an adapter in memory: the next request loads the one that the server was started with."""
        self._manager.remove_adapter(ADAPTER_ID)

    def compare(self, tensors: Mapping[str, torch.Tensor]) -> Comparison:
        """The slots that the engine multiplies with beside `tensors`, bit by bit. Slots that hold a shard are not read."""
        slots: list[int | None] = self._manager.lora_index_to_id
        if ADAPTER_ID not in slots:
            return Comparison(num_equal=0, different=(), unread=tuple(sorted(tensors)))
        slot = slots.index(ADAPTER_ID)
        layers = dict(self._layers())
        equal, different, unread = 0, [], []
        for path, a, b in self._pairs(tensors):
            names = [f"base_model.model.{path}.{part}.weight" for part in ("lora_A", "lora_B")]
            if path not in layers or layers[path][0].tp_size > 1:
                unread += names
                continue
            module, index = layers[path]
            for name, stacked, given in (
                (names[0], module.lora_a_stacked[index], a),
                (names[1], module.lora_b_stacked[index], self._scaled(b)),
            ):
                rows, columns = given.shape
                held = stacked[slot, 0, :rows, :columns]
                rest = stacked[slot, 0, rows:].any() or stacked[slot, 0, :, columns:].any()
                if torch.equal(held.to(given.device), given) and not rest:
                    equal += 1
                else:
                    different.append(name)
        return Comparison(num_equal=equal, different=tuple(different), unread=tuple(unread))

    def _scaled(self, b: torch.Tensor) -> torch.Tensor:
        """vLLM keeps the scale in B."""
        return (b.float() * self.scale).to(self._dtype)

    def _layers(self) -> Iterator[tuple[str, tuple[Any, int]]]:
        """Path in the checkpoint to (vLLM's layer, which of its parts), for linear layers."""
        packed: Mapping[str, list[str]] = self._manager.packed_modules
        for path, module in self._manager.modules.items():
            if not isinstance(getattr(module, "lora_a_stacked", None), tuple):
                continue  # an embedding or the language head
            parts = packed.get(path)
            if parts is None:
                yield path, (module, 0)
            elif len(parts) == len(module.lora_a_stacked):
                yield from ((part, (module, index)) for index, part in enumerate(parts))

    @staticmethod
    def _size(module: Any, index: int, part: str) -> int:
        """Inputs, or outputs over all shards."""
        if part == "lora_A":
            return int(module.base_layer.input_size)
        sizes = getattr(module.base_layer, "output_sizes", None)
        if sizes is not None and len(sizes) == len(module.lora_b_stacked):
            return int(sizes[index])
        return int(module.base_layer.output_size)

    @staticmethod
    def _pairs(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, a in tensors.items():
            match = _NAME.match(name)
            if match is not None and match["part"] == "lora_A":
                yield match["path"], a, tensors[f"base_model.model.{match['path']}.lora_B.weight"]
