"""One optimizer step, composed from a policy's small methods.

Invariant: the loss denominator is the number of trained tokens of the whole step, and a step without a signal changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sample_bus.sample import Sample
from trainer.metrics import TokenSums
from trainer.optimizer import warm_up
from trainer.policy import LossOptions, Policy, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """What holds for one step; the daemon reads it from the live settings at the start of the step."""

    learning_rate: float
    """Peak rate; the warm-up scales it."""
    warmup_steps: int
    loss: LossOptions
    max_grad_norm: float | None = None
    """None: the one that the policy was made with."""


def train_step(
    policy: Policy,
    samples: Sequence[Sample],
    advantages: npt.NDArray[np.float32],
    options: UpdateOptions,
    *,
    weights: Sequence[npt.NDArray[np.float32]] | None = None,
    dense: Sequence[npt.NDArray[np.float32]] | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> StepReport:
    """Take one optimizer step on `samples` with one advantage each (float32 [n]).

    weights: per sample a float32 [T] that multiplies its tokens' losses; the denominator stays the number of trained tokens.
    dense: per sample a float32 [T] that is added to its advantage, token by token.
    before_change: called once the gradient is there, before the model's weights change; not for a step without a signal.

    The order of samples does not change which gradient is computed, only its rounding. Raises NonFiniteError (weights
    unchanged) and PackingError (naming the rollout).
    """
    if advantages.shape != (len(samples),):
        raise ValueError(f"advantages: got shape {advantages.shape}, expected [{len(samples)}], one per sample")
    if weights is not None and [one.shape for one in weights] != [(sample.num_tokens,) for sample in samples]:
        raise ValueError("weights: expected one float32 [T] per sample, of its own length")
    if dense is not None and [one.shape for one in dense] != [(sample.num_tokens,) for sample in samples]:
        raise ValueError("dense: expected one float32 [T] per sample, of its own length")
    num_trained = sum(sample.num_trained_tokens for sample in samples)
    has_signal = any(a != 0 and sample.num_trained_tokens for sample, a in zip(samples, advantages, strict=True))
    if dense is not None:
        has_signal |= any((one * sample.loss_mask).any() for sample, one in zip(samples, dense, strict=True))
    started = time.perf_counter()
    sums = (
        policy.accumulate(
            samples, advantages, denominator=max(num_trained, 1), options=options.loss, weights=weights, dense=dense
        )
        if num_trained
        else TokenSums()
    )
    accumulated = time.perf_counter()
    learning_rate = grad_norm = 0.0
    if has_signal:
        learning_rate = options.learning_rate * warm_up(policy.optimizer_steps, options.warmup_steps)
        before_change()
        grad_norm = policy.step(learning_rate=learning_rate, max_grad_norm=options.max_grad_norm)
    finished = time.perf_counter()
    return StepReport(
        optimizer_steps=policy.optimizer_steps,
        loss=sums.mean(sums.loss),
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        mismatch_mean_abs=sums.mean(sums.mismatch_abs),
        mismatch_max_abs=sums.mismatch_max_abs,
        importance_mean=sums.mean(sums.importance),
        importance_max=sums.importance_max,
        effective_sample_size=sums.effective_sample_size,
        importance_capped_fraction=sums.mean(sums.num_importance_capped),
        kl_behavior_policy=sums.mean(sums.kl_behavior_policy),
        entropy=sums.mean(sums.entropy),
        clip_fraction=sums.mean(sums.num_clipped),
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_trained_tokens=num_trained,
        num_computed_tokens=sums.num_computed_tokens,
        num_microbatches=sums.num_microbatches,
        skipped=not has_signal,
        forward_backward_s=accumulated - started,
        optimizer_s=finished - accumulated,
        stale_weight_mean=_mean_weight(samples, weights, num_trained),
    )


def _mean_weight(samples: Sequence[Sample], weights: Sequence[npt.NDArray[np.float32]] | None, num_trained: int) -> float:
    if weights is None or not num_trained:
        return 1.0
    total = sum(float(one[sample.loss_mask != 0].sum(dtype=np.float64)) for sample, one in zip(samples, weights, strict=True))
    return total / num_trained
