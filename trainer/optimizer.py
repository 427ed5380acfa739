"""The learning rate's warm-up.

Invariant: the rate of a step depends only on the peak rate in force and on the number of steps taken before it.
"""

from __future__ import annotations


def warm_up(steps_taken: int, warmup_steps: int) -> float:
    """Factor of the peak learning rate for the next step: (steps_taken + 1) / (warmup_steps + 1), at most 1.

    The first step already moves, and the peak is reached after `warmup_steps` steps.
    """
    return min(1.0, (steps_taken + 1) / (warmup_steps + 1))
