"""AdamW over float32 master weights, and the learning rate's warm-up.

Invariant: an update depends only on the weights, the moments, the number of steps taken and the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

EPSILON = 1e-8


def warm_up(steps_taken: int, warmup_steps: int) -> float:
    """Factor of the peak learning rate for the next step: (steps_taken + 1) / (warmup_steps + 1), at most 1.

    The first step already moves, and the peak is reached after `warmup_steps` steps.
    """
    return min(1.0, (steps_taken + 1) / (warmup_steps + 1))


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2), fused.

    weights: float32 tensors, updated in place. Decay applies to matrices only, not to norms and biases.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], *, num_dimensions: Sequence[int], beta1: float, beta2: float, weight_decay: float
    ) -> None:
        self.weights = list(weights)
        self.first_moments = [torch.zeros_like(weight) for weight in weights]
        self.second_moments = [torch.zeros_like(weight) for weight in weights]
        self.steps_taken = 0
        self._betas = (beta1, beta2)
        self._weight_decay = weight_decay
        decayed = [index for index, ndim in enumerate(num_dimensions) if ndim >= 2]
        others = [index for index, ndim in enumerate(num_dimensions) if ndim < 2]
        self._groups = [(indices, decay) for indices, decay in ((decayed, weight_decay), (others, 0.0)) if indices]

    def apply(self, gradients: Sequence[torch.Tensor], *, learning_rate: float, divisor: float) -> None:
        """Take one step along gradients / divisor. The gradients are overwritten."""
        for indices, decay in self._groups:
            steps = torch.full((len(indices),), float(self.steps_taken), device=self.weights[indices[0]].device).unbind()
            adamw(
                [self.weights[index] for index in indices],
                [gradients[index] for index in indices],
                [self.first_moments[index] for index in indices],
                [self.second_moments[index] for index in indices],
                [],
                list(steps),
                fused=True,
                grad_scale=torch.tensor(divisor, device=steps[0].device),
                found_inf=torch.zeros((), device=steps[0].device),
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=learning_rate,
                weight_decay=decay,
                eps=EPSILON,
                maximize=False,
            )
        self.steps_taken += 1
