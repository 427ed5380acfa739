"""Rewards: user functions with verl's signature, and the ones shipped here.

Invariant: a score is a finite float or an error; a failed reward is never a reward of 0. What may block, spin, fork or leak
runs in processes of its own (`pool`), which are killed at the deadline; only the cheapest are computed where
they are asked for.
"""

from agent_loop.rewards.code import code_tests
from agent_loop.rewards.documents import json_schema
from agent_loop.rewards.gym import reasoning_gym
from agent_loop.rewards.loading import Reward, Scoring, load_reward
from agent_loop.rewards.maths import math_equal
from agent_loop.rewards.score import Score, checked_score, score_of
from agent_loop.rewards.services import judge, reward_model
from agent_loop.rewards.sums import countdown, gsm8k
from agent_loop.rewards.texts import choice, exact_match, numeric_match, regex_match, think_answer_format

__all__ = [
    "Reward",
    "Score",
    "Scoring",
    "checked_score",
    "choice",
    "code_tests",
    "countdown",
    "exact_match",
    "gsm8k",
    "json_schema",
    "judge",
    "load_reward",
    "math_equal",
    "numeric_match",
    "reasoning_gym",
    "regex_match",
    "reward_model",
    "score_of",
    "think_answer_format",
]
