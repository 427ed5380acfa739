"""The clipped policy-gradient loss with a behavior correction.

Invariant: pure functions of one value per trained token; masked tokens never get here, so no placeholder can leak into a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.policy import LossOptions, Proximal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """Of P trained tokens."""

    losses: torch.Tensor
    """[P] float32, differentiable in the policy logprobs."""
    clipped: torch.Tensor
    """[P] bool: the clip removed this token's gradient."""
    capped: torch.Tensor
    """[P] bool: the importance weight met its cap."""


def token_losses(
    policy: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    *,
    options: LossOptions,
    proximal: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> TokenLosses:
    """Decoupled clipped surrogate, per token (Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 3; the
    weight truncated as in Espeholt et al. 2018, IMPALA, section 4.1):

        loss = -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        r = exp(policy - proximal),  w = min(exp(proximal - behavior), max_importance_weight), without gradient

    policy, behavior: [P] logprobs in nats; advantages: [P]. proximal: [P] logprobs at the start of the update; None takes the
    policy's own value, which is exact for the first pass over a batch. With `Proximal.BEHAVIOR` r = exp(policy - behavior) and
    w = 1: PPO's loss (Schulman et al. 2017, eq. 7). There the min leaves r unbounded where A < 0; beyond max_importance_weight
    such a token is held at the cap, without gradient.

    weights: [P] factors of the losses, constants (`trainer.aged`: tokens count less the older they are); None: all 1.
    """
    if not policy.shape == behavior.shape == advantages.shape or policy.ndim != 1:
        raise ValueError(
            f"token losses: got shapes {list(policy.shape)}, {list(behavior.shape)} and {list(advantages.shape)}, "
            "expected [P] thrice"
        )
    policy = policy.float()
    start = policy.detach() if proximal is None else proximal.detach()
    match options.proximal:
        case Proximal.STEP:
            raw_weight = (start - behavior).exp()
            weight = raw_weight.clamp(max=options.max_importance_weight)
            capped = raw_weight > options.max_importance_weight
            ratio = (policy - start).exp()
        case Proximal.BEHAVIOR:
            weight = torch.ones_like(behavior)
            raw_ratio = (policy - behavior).exp()
            capped = (raw_ratio > options.max_importance_weight).detach() & (advantages < 0)
            ratio = torch.where(capped, raw_ratio.detach().clamp(max=options.max_importance_weight), raw_ratio)
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = (bounded * advantages < ratio * advantages).detach()
    if weights is not None:
        if weights.shape != policy.shape:
            raise ValueError(f"token weights: got shape {list(weights.shape)}, expected {list(policy.shape)}")
        weight = weight * weights
    return TokenLosses(losses=-weight * surrogate, clipped=clipped, capped=capped)
