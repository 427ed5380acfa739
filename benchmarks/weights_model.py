"""Weights of models that nobody trained, for the benchmark of weight sync: the shapes of decoders, random numbers.

Float32, as a trainer's master weights are, or bfloat16, where nothing has to be cast; bytes are counted in bfloat16, in which
they travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_POOL_ELEMENTS = 600_000_000
"""Beyond it tensors are cut from the same memory, one after the other and from its start again: what is read is still
more than any cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A decoder with an embedding that is its head too."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def __iter__(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield f"{prefix}self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}self_attn.k_proj.weight", (self.key_value, self.hidden)
            yield f"{prefix}self_attn.v_proj.weight", (self.key_value, self.hidden)
            yield f"{prefix}self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}input_layernorm.weight", (self.hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (self.hidden,)

    @property
    def num_bytes(self) -> int:
        return 2 * sum(math.prod(shape) for _, shape in self)


SHAPES = {
    "0.03 GB": Shapes(layers=4, hidden=384, intermediate=1024, key_value=128, vocabulary=20_000),
    "0.27 GB": Shapes(layers=30, hidden=576, intermediate=1536, key_value=192, vocabulary=49_152),
    "1 GB": Shapes(layers=24, hidden=896, intermediate=4864, key_value=128, vocabulary=151_936),
    "4 GB": Shapes(layers=34, hidden=2048, intermediate=6144, key_value=1024, vocabulary=151_936),
}


class Model:
    """A trainer's weights, and steps that change some of them."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        sizes = {name: (shape, math.prod(shape)) for name, shape in shapes}
        total = sum(size for _, size in sizes.values())
        largest = max(size for _, size in sizes.values())
        self._pool = torch.empty(min(total, max(MAX_POOL_ELEMENTS, largest + len(sizes))), dtype=dtype)
        self._pool.normal_()
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0
        for number, (name, (shape, size)) in enumerate(sizes.items()):
            if at + size > len(self._pool):
                at = number % (len(self._pool) - size + 1)
            self.tensors[name] = self._pool[at : at + size].view(shape)
            at += size
        self.num_bytes = 2 * total
        self._steps = 0

    @property
    def is_cast(self) -> bool:
        """Whether the weights travel in another dtype than they have."""
        return self._pool.dtype is not torch.bfloat16

    def step(self, share: float = 0.0) -> None:
        """Change one small tensor, and a share of all elements by one part in a hundred."""
        self._steps += 1
        self.tensors["model.norm.weight"] += 1
        if share:
            stride = round(1 / share)
            self._pool[self._steps % stride :: stride] *= 1.01
