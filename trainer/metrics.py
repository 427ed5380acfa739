"""Sums from which step metrics are made.

Invariant: everything is kept as a sum, a count or a maximum until the whole step is known, so no reported number depends on how
the step was cut into micro-batches or ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Over trained tokens. `a + b` is that of both parts; `TokenSums()` is that of none."""

    num_tokens: int = 0
    """Trained tokens."""
    num_computed_tokens: int = 0
    """Tokens that went through the model, shared prefixes once."""
    num_microbatches: int = 0
    loss: float = 0.0
    """Sum of token losses, undivided."""
    mismatch_abs: float = 0.0
    """Sum of |policy - behavior logprob|."""
    mismatch_max_abs: float = 0.0
    importance: float = 0.0
    """Sum of exp(policy - behavior)."""
    importance_squared: float = 0.0
    """Sum of its squares."""
    importance_max: float = 0.0
    num_importance_capped: int = 0
    kl_behavior_policy: float = 0.0
    """Sum of the k3 estimates."""
    entropy: float = 0.0
    num_clipped: int = 0

    @classmethod
    def of(
        cls,
        *,
        losses: torch.Tensor,
        policy: torch.Tensor,
        behavior: torch.Tensor,
        entropies: torch.Tensor,
        clipped: torch.Tensor,
        capped: torch.Tensor,
        num_computed_tokens: int,
    ) -> TokenSums:
        """Of one micro-batch; each tensor is [P], one value per trained token, without gradient. Sums are taken in float64.

        The k3 estimate of KL(behavior || policy) is ratio - 1 - log ratio with ratio = exp(policy - behavior)
        (Schulman 2020, "Approximating KL divergence").
        """
        log_ratio = policy.double() - behavior.double()
        ratio = log_ratio.exp()
        return cls(
            num_tokens=policy.numel(),
            num_computed_tokens=num_computed_tokens,
            num_microbatches=1,
            loss=float(losses.double().sum()),
            mismatch_abs=float(log_ratio.abs().sum()),
            mismatch_max_abs=float(log_ratio.abs().max()) if policy.numel() else 0.0,
            importance=float(ratio.sum()),
            importance_squared=float(ratio.square().sum()),
            importance_max=float(ratio.max()) if policy.numel() else 0.0,
            num_importance_capped=int(capped.sum()),
            kl_behavior_policy=float((ratio - 1 - log_ratio).sum()),
            entropy=float(entropies.double().sum()),
            num_clipped=int(clipped.sum()),
        )

    def __add__(self, other: TokenSums) -> TokenSums:
        merged = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = max(mine, theirs) if field.name in MAXIMA else mine + theirs
        return TokenSums(**merged)

    def mean(self, total: float) -> float:
        """total / num_tokens; 0.0 when there are no tokens."""
        return total / self.num_tokens if self.num_tokens else 0.0

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / (n sum w^2) of w = exp(policy - behavior), within [1/n, 1]: the share of n tokens of equal weight that
        would estimate as well (Kish 1965, "Survey sampling", section 8.2). 1.0 when there are no tokens."""
        if not self.num_tokens:
            return 1.0
        least = 1 / self.num_tokens
        if not (0 < self.importance_squared < math.inf and self.importance < math.inf):
            return least  # one weight is beyond all numbers, or all are nothing
        return min(1.0, max(least, self.importance * (self.importance / self.importance_squared) / self.num_tokens))


MAXIMA = frozenset({"mismatch_max_abs", "importance_max"})
"""Fields that merge by maximum instead of by sum."""
