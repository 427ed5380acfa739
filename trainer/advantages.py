"""Group-relative advantages, of samples and, where turns have rewards of their own, of turns.

Invariant: an advantage depends only on the rewards of the sample's own group, not on their order nor on other groups.
Without rewards of turns there are no advantages of turns: nothing is added, not even a zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sample_bus.sample import Sample

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


def turn_advantages(
    samples: Sequence[Sample], *, discount: float, weight: float, normalize_by_std: bool
) -> list[npt.NDArray[np.float32]] | None:
    """What rewards of turns add to the advantage of each token: per sample a float32 [T]; None: they add nothing.

    A turn is an unbroken run of trained tokens; its reward R_k is the sum of `token_rewards` from its first token to the next
    turn. Each of its tokens gets `weight` times the group-relative advantage of its discounted reward-to-go

        G_k = R_k + discount * G_(k+1)

    among those members of the group that have a k-th turn (turn-level advantages beside the outcome's: Zeng et al. 2025, arXiv
    2505.11821, MT-GRPO; with the reward-to-go in place of the turn's own reward, so that a turn answers for what it leads to).
    A member that alone has a k-th turn gets 0 there. Segments follow one another in the sample's order.
    """
    if weight == 0 or not any(sample.token_rewards.any() for sample in samples):
        return None
    turns = [_turns_of(sample) for sample in samples]
    returns = [_returns(sample, starts, discount) for sample, (starts, _) in zip(samples, turns, strict=True)]
    names = [f"turn {k} of {one.group_id}" for one, (starts, _) in zip(samples, turns, strict=True) for k in range(starts.size)]
    flat = group_advantages(np.concatenate(returns), names, normalize_by_std=normalize_by_std) * np.float32(weight)
    if not flat.any():
        return None
    dense, at = [], 0
    for sample, (starts, ends) in zip(samples, turns, strict=True):
        column = np.zeros(sample.num_tokens, np.float32)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            column[start:end] = flat[at]
            at += 1
        dense.append(column)
    return dense


def _turns_of(sample: Sample) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """([K], [K]) first token of each turn, and the one after its last."""
    edges = np.diff(np.concatenate(([0], (sample.loss_mask != 0).astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _returns(sample: Sample, starts: npt.NDArray[np.int64], discount: float) -> npt.NDArray[np.float64]:
    """[K] discounted reward-to-go of each turn."""
    returns = np.zeros(starts.size, np.float64)
    if not starts.size or not sample.token_rewards.size:
        return returns
    returns += np.add.reduceat(sample.token_rewards.astype(np.float64), starts)
    for k in range(starts.size - 2, -1, -1):
        returns[k] += discount * returns[k + 1]
    return returns
