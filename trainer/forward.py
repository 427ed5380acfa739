"""The forward pass of a packed micro-batch through a Hugging Face causal model.

Invariant: log-probabilities are those of the tempered distribution, in float32, and the language head runs only on the rows
that predict a trained token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import ModelError, PackingError
from trainer.packing import PackedBatch

_EXPLICIT_ATTENTION_BYTES = 512 << 20
"""Up to so many bytes kept for the backward pass, plain matrix products beat the blocked CPU kernel, whose backward is slow."""
_MAX_LOGITS = 1 << 26
_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model's configuration decides how it may be run."""

    vocab_size: int
    num_layers: int
    num_heads: int
    window: int | None
    """Tokens that a sliding-window layer sees; None where all layers see all."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read a Hugging Face config. Raises ModelError for layers that a forest of prefixes cannot be run through."""
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if unknown := kinds - _SUPPORTED_LAYERS:
            raise ModelError(
                f"layers of kind {', '.join(sorted(unknown))}: expected only {', '.join(sorted(_SUPPORTED_LAYERS))}"
            )
        window = getattr(text, "sliding_window", None)
        slides = "sliding_attention" in kinds or (window and not hasattr(text, "layer_types"))
        return cls(
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads,
            window=int(window) if slides and window else None,
        )

    @property
    def max_rows(self) -> int:
        """Logit rows of one micro-batch, so that its logits stay within a quarter of a gigabyte."""
        return max(16, _MAX_LOGITS // self.vocab_size)

    def attention_for(self, num_nodes: int, device: torch.device) -> str:
        """The attention implementation for a micro-batch of so many nodes."""
        explicit_bytes = self.num_layers * self.num_heads * num_nodes**2 * 6
        return "eager" if device.type == "cpu" and explicit_bytes <= _EXPLICIT_ATTENTION_BYTES else "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """Of P trained tokens."""

    logprobs: torch.Tensor
    """[P] float32 nats, differentiable."""
    entropies: torch.Tensor
    """[P] float32 nats, of the distribution that the token was drawn from; without gradient."""
    anchor: torch.Tensor | None
    """Only where P is 0: a scalar 0 that depends on the model, to give an empty micro-batch a backward pass."""


def predict(model: Any, batch: PackedBatch, shape: ModelShape, *, device: torch.device, dtype: torch.dtype) -> Predictions:
    """Score the trained tokens of `batch`. Raises PackingError for ids outside the vocabulary, ModelError beyond the window."""
    _check(batch, shape)
    implementation = shape.attention_for(batch.num_nodes, device)
    if getattr(model.config, "_attn_implementation", None) != implementation:
        model.set_attn_implementation(implementation)
    rows = torch.from_numpy(batch.row_nodes).to(device)
    logits = model(
        input_ids=torch.from_numpy(batch.input_ids)[None].to(device),
        position_ids=torch.from_numpy(batch.position_ids)[None].to(device),
        attention_mask=_additive_mask(torch.from_numpy(batch.subtree_ends).to(device), dtype),
        logits_to_keep=rows,
        use_cache=False,
    ).logits[0]
    if not batch.token_ids.size:
        nothing = torch.zeros(0, device=device)
        return Predictions(logprobs=nothing, entropies=nothing, anchor=logits.float().sum() * 0)
    logits = logits.float()
    if (batch.row_temperatures != 1).any():
        logits = logits / torch.from_numpy(batch.row_temperatures).to(device)[:, None]
    row_logprobs = torch.log_softmax(logits, dim=-1)
    token_rows = torch.from_numpy(batch.token_rows).to(device)
    with torch.no_grad():
        entropies = _entropies(row_logprobs)[token_rows]
    logprobs = row_logprobs[token_rows, torch.from_numpy(batch.token_ids).to(device)]
    return Predictions(logprobs=logprobs, entropies=entropies, anchor=None)


def _entropies(row_logprobs: torch.Tensor) -> torch.Tensor:
    """[R] entropy of each row of log-probabilities [R, V], in nats."""
    probabilities = row_logprobs.exp()
    entropies: torch.Tensor = -torch.linalg.vecdot(probabilities, row_logprobs)
    if torch.isnan(entropies).any():  # a model that rules tokens out: 0 * -inf
        entropies = torch.special.entr(probabilities).sum(-1)
    return entropies


def _additive_mask(subtree_ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, N, N]: 0 where the row's node attends to the column's (itself and its ancestors), -inf elsewhere."""
    nodes = torch.arange(subtree_ends.shape[0], device=subtree_ends.device)
    hidden = (nodes[:, None] < nodes[None, :]) | (nodes[:, None] >= subtree_ends[None, :])
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))[None, None]


def _check(batch: PackedBatch, shape: ModelShape) -> None:
    for ids in (batch.input_ids, batch.token_ids):
        if ids.size and ids.max() >= shape.vocab_size:
            raise PackingError(f"token id: got {int(ids.max())}, expected below the vocabulary's {shape.vocab_size}")
    if shape.window is not None and batch.position_ids.max() >= shape.window:
        raise ModelError(
            f"sequence of {int(batch.position_ids.max()) + 1} tokens: "
            f"expected at most the model's sliding window of {shape.window}"
        )
