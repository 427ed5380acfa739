"""Which adapters a model takes, told from the layers that vLLM's manager has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_sync.adapters import AdapterLoader
from weight_sync.errors import ManifestMismatch
from weight_sync.manifest import Manifest, TensorSpec

HIDDEN, HEADS = 8, 4


def layer(inputs: int, *outputs: int) -> SimpleNamespace:
    """As vLLM wraps a linear layer, of one part or of several."""
    base = SimpleNamespace(input_size=inputs, output_size=sum(outputs), output_sizes=list(outputs))
    slots = tuple(torch.zeros(1, 1, 4, inputs) for _ in outputs)
    return SimpleNamespace(base_layer=base, lora_a_stacked=slots, lora_b_stacked=slots, tp_size=1)


def loader(dtype: torch.dtype = torch.bfloat16) -> AdapterLoader:
    """Of a model with fused queries and keys, an output projection and an embedding."""
    modules: dict[str, Any] = {
        "model.layers.0.self_attn.qk_proj": layer(HIDDEN, HIDDEN, HEADS),
        "model.layers.0.self_attn.o_proj": layer(HIDDEN, HIDDEN),
        "model.embed_tokens": SimpleNamespace(lora_a_stacked=torch.zeros(1, 300, 4)),
    }
    packed = {"model.layers.0.self_attn.qk_proj": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]}
    return AdapterLoader(SimpleNamespace(modules=modules, packed_modules=packed), scale=2.0, dtype=dtype, max_rank=4)


def manifest(changes: dict[str, tuple[int, ...] | None] | None = None, *, dtype: torch.dtype = torch.bfloat16) -> Manifest:
    """Adapters of rank 2 for every layer; `changes` give other shapes, or leave a tensor out."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, outputs in (("q_proj", HIDDEN), ("k_proj", HEADS), ("o_proj", HIDDEN)):
        shapes[f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight"] = (2, HIDDEN)
        shapes[f"base_model.model.model.layers.0.self_attn.{name}.lora_B.weight"] = (outputs, 2)
    shapes |= changes or {}
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items() if shape is not None)
    return Manifest(specs=specs, checksums=tuple(range(len(specs))))


def test_adapters_of_every_linear_layer_pass_fused_or_not() -> None:
    loader().check(manifest())


K = "base_model.model.model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{K}.lora_A.weight": None}, f"{K}.lora_B.weight: without its other half"),
        ({f"{K}.lora_A.weight": (2, HIDDEN + 1)}, "got 9 inputs, the engine's layer has 8"),
        ({f"{K}.lora_B.weight": (HEADS + 1, 2)}, "got 5 outputs, the engine's layer has 4"),
        ({f"{K}.lora_A.weight": (5, HIDDEN), f"{K}.lora_B.weight": (HEADS, 5)}, "expected a matrix of rank 4 at most"),
        ({f"{K}.lora_A.weight": (3, HIDDEN)}, "got rank 3, its other half has 2"),
        ({"base_model.model.lm_head.lora_A.weight": (2, HIDDEN)}, "the engine has no layer lm_head that takes an adapter"),
        ({"base_model.model.model.embed_tokens.lora_A.weight": (2, 300)}, "no layer model.embed_tokens that takes an adapter"),
        ({"model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN)}, "no name of an adapter's tensor"),
    ],
)
def test_what_fits_no_layer_is_refused_by_name(changes: dict[str, tuple[int, ...] | None], words: str) -> None:
    """B141, B148: before a byte of it moves."""
    with pytest.raises(ManifestMismatch) as refusal:
        loader().check(manifest(changes))
    assert words in str(refusal.value)


def test_adapters_of_another_type_than_the_engines_are_refused() -> None:
    """B148: the cast is the sender's, by the agreed type; nothing is cast in silence here."""
    with pytest.raises(ManifestMismatch, match="got float32, the engine's adapters are bfloat16"):
        loader().check(manifest(dtype=torch.float32))


def test_no_adapter_at_all_is_refused() -> None:
    with pytest.raises(ManifestMismatch, match="no tensor was offered"):
        loader().check(Manifest(specs=(), checksums=()))
