"""Group-relative advantages.

Invariant: an advantage depends only on the rewards of the sample's own group, not on their order nor on other groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EPSILON = 1e-4
"""Added to the standard deviation, in units of reward."""
MIN_SPREAD = 1e-8
"""A group whose rewards lie closer together than this, relative to their size, has no signal."""


def has_spread(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether the rewards of one group, [n], give advantages that are not all 0."""
    return len(rewards) >= 2 and float(np.ptp(rewards)) > MIN_SPREAD * float(np.abs(rewards).max())


def group_advantages(rewards: npt.ArrayLike, group_ids: Sequence[str], *, normalize_by_std: bool) -> npt.NDArray[np.float32]:
    """Advantages of GRPO (Shao et al. 2024, DeepSeekMath, section 4.1.2), in each group:

        A_i = (r_i - mean(r)) / (std(r) + EPSILON)

    rewards: [n] finite numbers, reward of sample i. group_ids: n names; equal ones form a group. std is the sample standard
    deviation (n - 1). With normalize_by_std false it is left out (Liu et al. 2025, Dr. GRPO). A group of one, and one whose
    rewards are all equal, gets exactly 0. Returns float32 [n]. Raises ValueError for lengths that differ or for rewards
    that are not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(group_ids),):
        raise ValueError(f"rewards: got shape {values.shape}, expected [{len(group_ids)}], one per group id")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"rewards[{at}]: got {values[at]}, expected a finite number (group {group_ids[at]})")
    advantages = np.zeros(values.shape, dtype=np.float64)
    members: dict[str, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        group_rewards = values[indices]
        if not has_spread(group_rewards):
            continue
        ordered = np.sort(group_rewards)
        centered = group_rewards - ordered.mean()
        advantages[indices] = centered / (ordered.std(ddof=1) + EPSILON) if normalize_by_std else centered
    return advantages.astype(np.float32)
