"""Scoring: a rollout's reply as text, and its reward within a deadline.

Invariant: a reward is a finite number that the reward function gave for exactly this reply, or an error.
"""

from __future__ import annotations

from agent_loop.errors import RewardError
from agent_loop.rewards import Reward, load_reward
from agent_loop.session import TextCodec, Trajectory
from agent_loop.task import Task
from configs.errors import ConfigError


class Scorer:
    """Rewards of single rollouts."""

    def __init__(self, reward: Reward, codec: TextCodec) -> None:
        self._reward = reward
        self._codec = codec

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        """The reward of everything after the prompt, as text without special tokens. Raises RewardError."""
        return await self._reward.score(
            data_source=task.data_source,
            solution_str=self._codec.decode(trajectory.response_ids.tolist()),
            ground_truth=task.ground_truth,
            extra_info=task.extra_info,
        )


def reward_of(path: str) -> Reward:
    """The reward function at `path`. Raises ConfigError."""
    try:
        return load_reward(path)
    except RewardError as error:
        raise ConfigError(str(error)) from error
