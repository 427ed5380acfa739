"""Reward functions with rewards of turns; loaded by reward processes, by path."""

from __future__ import annotations

from typing import Any

from agent_loop.rewards import Score


def by_turn(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Each turn gets its length."""
    return {"score": 1.0, "turn_rewards": [len(turn) for turn in extra_info["turns"]], "acc": 0.5}


async def by_place(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Each turn gets its number."""
    return Score(value=2.0, turn_rewards=tuple(float(number) for number in range(len(extra_info["turns"]))))


def one_too_many(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    return {"score": 1.0, "turn_rewards": [1.0] * (len(extra_info["turns"]) + 1)}
