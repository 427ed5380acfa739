"""Scoring: a rollout's reply as text, its reward, and what its length costs.

Invariant: a reward is a finite number that the reward function (or the agent loop itself) gave for exactly this reply, plus
shaping that is at most 0, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent_loop.errors import RewardError
from agent_loop.rewards import Score, Scoring, score_of
from agent_loop.rewards.shaping import length_penalty, overlong_penalty
from agent_loop.rewards.weighted import Part, Weighted
from agent_loop.session import TextCodec, Trajectory
from agent_loop.task import Task
from configs.errors import ConfigError
from configs.schema import Settings
from rollouter.reward_facts import RewardFacts

_UNNAMED = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What the length of a rollout costs."""

    max_tokens: int
    """Sampled tokens at which it is overlong."""
    buffer_tokens: int = 0
    overlong_factor: float = 1.0
    length_coefficient: float = 0.0

    @staticmethod
    def of(settings: Settings) -> Shaping:
        reward = settings.reward
        return Shaping(
            max_tokens=reward.overlong_max_tokens or settings.sampling.max_tokens,
            buffer_tokens=reward.overlong_buffer_tokens,
            overlong_factor=reward.overlong_penalty,
            length_coefficient=reward.length_penalty,
        )

    def parts(self, num_tokens: int) -> Mapping[str, float]:
        """What is added, by name; nothing where it is switched off."""
        parts = {}
        if self.buffer_tokens:
            penalty = overlong_penalty(num_tokens, max_tokens=self.max_tokens, buffer_tokens=self.buffer_tokens)
            parts["overlong_penalty"] = self.overlong_factor * penalty
        if self.length_coefficient:
            parts["length_penalty"] = length_penalty(
                num_tokens, max_tokens=self.max_tokens, coefficient=self.length_coefficient
            )
        return MappingProxyType(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout's reward."""

    reward: float
    """What is trained on, shaping included."""
    unshaped: float
    """What the reward gave: what an evaluation reports."""
    parts: Mapping[str, float]
    """Numbers to log beside it, shaping included."""
    trajectory: Trajectory
    """The one that was scored, with the rewards that its turns were given."""


class Scorer:
    """Rewards of single rollouts."""

    def __init__(self, reward: Scoring, codec: TextCodec, shaping: Callable[[], Shaping] | None = None) -> None:
        """`shaping` is asked at each score; None: no shaping."""
        self._reward = reward
        self._codec = codec
        self._shaping = shaping

    async def score(self, task: Task, trajectory: Trajectory) -> Scored:
        """The reward of everything after the prompt, as text without special tokens, unless the agent loop gave its own.

        The reward's extra_info is the task's, with those of `RewardFacts` where it has none of these names. Raises RewardError.
        """
        if trajectory.reward is not None:
            score = score_of(Score(value=trajectory.reward, parts=trajectory.reward_parts), path="of the agent loop")
        else:
            text = self._codec.decode(trajectory.response_ids.tolist())
            score = await self._reward.score(
                data_source=task.data_source,
                solution_str=text,
                ground_truth=task.ground_truth,
                extra_info=RewardFacts(task, trajectory, self._codec, solution_str=text),
            )
        if score.turn_rewards is not None:
            try:
                trajectory = trajectory.with_turn_rewards(score.turn_rewards)
            except RewardError as error:
                raise RewardError(f"reward of task {task.task_id} (data source {task.data_source}): {error}") from error
        shaping = {} if self._shaping is None else self._shaping().parts(int(trajectory.loss_mask.sum()))
        return Scored(
            reward=score.value + sum(shaping.values()),
            unshaped=score.value,
            parts={**score.parts, **shaping},
            trajectory=trajectory,
        )


def reward_of(settings: Settings) -> Scoring:
    """What scores the rollouts of a run; nothing runs yet. Raises ConfigError when a function does not load or fails its
    self test: those that will run in processes of their own are tried in one."""
    reward = settings.reward
    if not reward.parts:
        parts = {_UNNAMED: Part(function=settings.data.reward, arguments=reward.arguments)}
    else:
        parts = {
            name: Part(function=part.function, weight=part.weight, arguments=part.arguments)
            for name, part in reward.parts.items()
        }
    try:
        return Weighted.open(parts, reward)
    except RewardError as error:
        raise ConfigError(str(error)) from error
