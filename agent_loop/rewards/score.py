"""What a reward says of one reply.

Invariant: a score is a finite float with finite parts, or an error; what cannot be read as a number never becomes 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.errors import USER_CODE_FAILURES, RewardError, Unscored
from configs.limits import MAX_REWARD

MAX_TURN_REWARDS = 1 << 20
"""More turns than any rollout has."""
MAX_PARTS = 100
"""Numbers that are logged beside a score; more of them are left out."""
MAX_PART_NAME = 100
_NO_PARTS = ("score", "turn_rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward and what it is made of."""

    value: float
    """What is trained on."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log beside it, by name: the parts of a weighted sum before their weights, or the numbers that a reward
    returned beside `score`."""
    turn_rewards: tuple[float, ...] | None = None
    """A reward of each turn's own, in the order of `extra_info["turns"]`; None: there are none."""


def score_of(value: Any, *, path: str) -> Score:
    """What a reward returned, as a score: a number, or a dict with `score` and perhaps `turn_rewards`, whose other numbers
    become parts.

    Raises Unscored for None, RewardError for anything else that is no finite number.
    """
    if isinstance(value, Score):
        return Score(
            value=_number(value.value, path),
            parts={_name(name): _number(part, path) for name, part in value.parts.items()},
            turn_rewards=_turn_rewards(value.turn_rewards, path),
        )
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardError(f"reward {path}: got a dict with keys {sorted(map(str, value))}, expected one with `score`")
        return Score(
            value=_number(value["score"], path),
            parts=_parts(value),
            turn_rewards=_turn_rewards(value.get("turn_rewards"), path),
        )
    return Score(value=_number(value, path))


def checked_score(value: Any, *, path: str) -> float:
    """`value` as a finite float; of a dict, its `score`. Raises RewardError."""
    return score_of(value, path=path).value


def _turn_rewards(value: Any, path: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise RewardError(f"reward {path}: got turn_rewards of type {type(value).__name__}, expected a list of numbers")
    if len(value) > MAX_TURN_REWARDS:
        raise RewardError(f"reward {path}: got {len(value)} turn_rewards, expected one for each turn")
    rewards = []
    for turn, reward in enumerate(value):
        try:
            rewards.append(_number(reward, path))
        except RewardError as error:  # one that is None is no reason to say that the reply was not scored
            raise RewardError(f"turn_rewards[{turn}]: {error}") from error
    return tuple(rewards)


def _number(value: Any, path: str) -> float:
    if value is None:
        raise Unscored(f"reward {path}: got None: not scored")
    if isinstance(value, (str, bytes)):
        raise RewardError(f"reward {path}: got {value!r}, expected a number")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"reward {path}: got {type(value).__name__}, expected a number") from error
    if not abs(score) <= MAX_REWARD:  # nor is nan
        raise RewardError(f"reward {path}: got {score}, expected a finite number of at most {MAX_REWARD:g} in size")
    return score


def _parts(value: Mapping[Any, Any]) -> dict[str, float]:
    """The numbers that may be logged: what a reward returns beside its score is no reason to fail."""
    parts: dict[str, float] = {}
    for name, part in value.items():
        if len(parts) == MAX_PARTS:
            break
        if name in _NO_PARTS or part is None or isinstance(part, (str, bytes, Mapping)):
            continue
        try:
            number, called = float(part), _name(name)
        except USER_CODE_FAILURES:  # a tensor of several numbers, say
            continue
        if math.isfinite(number):
            parts[called] = number
    return parts


def _name(name: Any) -> str:
    return str(name)[:MAX_PART_NAME].encode(errors="backslashreplace").decode()
