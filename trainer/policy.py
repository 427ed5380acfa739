"""The seam between the training loop and the model being trained.

Invariant: a `Policy` owns model, optimizer and step count, and nothing of the run around them. Gradients and every reported
sum are global: they do not depend on how a batch was cut into micro-batches or spread over ranks. On one CPU thread the same
calls give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sample_bus.sample import Sample
from trainer.metrics import TokenSums


class Proximal(StrEnum):
    """Which policy the clipped ratio is taken against."""

    STEP = "step"
    """The weights at the start of this optimizer step; behavior is corrected by a truncated importance weight."""
    BEHAVIOR = "behavior"
    """The weights that sampled the token (PPO's own ratio); no importance weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What the clipped loss needs beside the samples; see `trainer.losses`."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped above at 1 + clip_high."""
    max_importance_weight: float = 2.0
    """Cap of exp(proximal - behavior) per token."""
    proximal: Proximal = Proximal.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one `train_step` did. All means are over the trained tokens of the whole batch; logprobs are in nats."""

    optimizer_steps: int
    """Optimizer steps that the policy has taken, this one included; a skipped one does not count."""
    loss: float
    """Clipped surrogate loss per trained token."""
    grad_norm: float
    """Global L2 norm before clipping; 0.0 when skipped."""
    learning_rate: float
    """The rate that was applied, warm-up included; 0.0 when skipped."""
    mismatch_mean_abs: float
    """Mean |policy - behavior logprob|; at the sampling version this is engine against trainer."""
    mismatch_max_abs: float
    importance_mean: float
    """Mean of exp(policy - behavior), before any cap."""
    importance_max: float
    effective_sample_size: float
    """(sum w)^2 / (n sum w^2) of these weights, before any cap: 1 where all are equal, 1/n where one outweighs all."""
    importance_capped_fraction: float
    """Share of tokens whose importance weight met its cap."""
    kl_behavior_policy: float
    """k3 estimate of KL(behavior || policy): mean of ratio - 1 - log ratio."""
    entropy: float
    """Mean entropy of the distribution that the token was drawn from, at its sampling temperature."""
    clip_fraction: float
    """Share of tokens where the clip removed the gradient."""
    num_samples: int
    num_tokens: int
    """Tokens of the batch, prompts included."""
    num_trained_tokens: int
    num_computed_tokens: int
    """Tokens that went through the model: shared prefixes count once."""
    num_microbatches: int
    """Forward passes over all ranks."""
    skipped: bool
    """True when no sample had both trained tokens and an advantage: nothing was changed."""
    forward_backward_s: float
    optimizer_s: float
    stale_weight_mean: float = 1.0
    """Mean factor of the trained tokens' losses for their age; 1.0 where none was beyond max_staleness."""


class Policy(Protocol):
    """A causal language model under training.

    `save`, `load`, `logprobs`, `accumulate`, `step` and `export_weights` are collective: with several ranks each calls them
    with equal arguments, in the same order. Not thread-safe; one thread drives it.
    """

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken since the initial weights, restored by `load`."""
        ...

    @property
    def num_parameters(self) -> int:
        """Trained numbers, tied ones counted once."""
        ...

    def logprobs(self, samples: Sequence[Sample]) -> list[npt.NDArray[np.float32]]:
        """Score the samples with the current weights.

        Returns per sample a float32 [T] of log-probabilities in nats at the sample's own temperature, aligned to its tokens;
        0.0 where the loss mask is 0.
        """
        ...

    def accumulate(
        self,
        samples: Sequence[Sample],
        advantages: npt.NDArray[np.float32],
        *,
        denominator: float,
        options: LossOptions,
        weights: Sequence[npt.NDArray[np.float32]] | None = None,
        dense: Sequence[npt.NDArray[np.float32]] | None = None,
    ) -> TokenSums:
        """Add the gradient of sum(token losses) / denominator to what is accumulated.

        advantages: float32 [n], one per sample. denominator: trained tokens of the whole step, over all calls and ranks.
        weights: per sample a float32 [T] that multiplies its tokens' losses and leaves the denominator alone; None: all 1.
        dense: per sample a float32 [T] that is added to its advantage, token by token; None: nothing.
        Samples whose advantages are all 0 are scored for the metrics, without a backward pass. Returns sums over all ranks.
        Raises NonFiniteError when a loss is not finite; the accumulated gradient is then dropped.
        """
        ...

    def step(self, *, learning_rate: float, max_grad_norm: float | None = None) -> float:
        """Apply the accumulated gradient, clipped to `max_grad_norm` (None: the configured one), and clear it.

        Returns the norm before clipping.

        Raises NonFiniteError, with weights unchanged, when the norm is not finite.
        """
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, whole tensor) for each weight, tied ones once, in a fixed order.

        Tensors are of the compute type, detached, and may alias the model: read them before the next `step`.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write model, optimizer and step count into an existing empty directory, durably (fsync)."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, bit for bit. Raises CheckpointError when it does not fit this model."""
        ...
