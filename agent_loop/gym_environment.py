"""The environment of reasoning-gym's tasks: several attempts at one question, each scored by the family's own scorer.

Invariant: the rewards of an episode's steps add up to its best attempt, each discounted by how late it came; an episode that is
cut off keeps what it had reached. What may be attempted is the row's (`extra_info["episode"]`) and checked where rows are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from agent_loop.environment import Step
from agent_loop.errors import LoopError
from agent_loop.rewards.gym import import_reasoning_gym, reasoning_gym
from agent_loop.task import Task

MAX_ATTEMPTS = 1000
_ENTRY_KEY = "episode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a row says of its episode."""

    attempts: int = 3
    """Times that the model may answer; 1: a task without a second chance."""
    discount: float = 0.5
    """0 to 1: attempt k's score counts `discount ** (k - 1)` times."""
    feedback: str = "That is not right. Try again, attempts left: {left}."
    """What the model is told after a wrong attempt; `{left}` and `{attempts}` are put in."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """Raises LoopError naming what is not known, or out of its range."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(str(name) for name in told if name not in known)
        if unknown:
            raise LoopError(f"extra_info.{_ENTRY_KEY}: got {', '.join(unknown)}, expected some of {', '.join(known)}")
        episode = cls(**told)
        attempts, discount, feedback = episode.attempts, episode.discount, episode.feedback
        if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MAX_ATTEMPTS:
            raise LoopError(f"extra_info.{_ENTRY_KEY}.attempts: got {attempts!r}, expected 1 to {MAX_ATTEMPTS}")
        if not isinstance(discount, (int, float)) or not 0 <= discount <= 1:
            raise LoopError(f"extra_info.{_ENTRY_KEY}.discount: got {discount!r}, expected 0 to 1")
        if not isinstance(feedback, str) or not feedback.strip():
            raise LoopError(f"extra_info.{_ENTRY_KEY}.feedback: got {feedback!r}, expected text")
        return episode

    def says(self, attempt: int) -> str:
        """The observation after a wrong attempt, 1 being the first."""
        return self.feedback.replace("{left}", str(self.attempts - attempt)).replace("{attempts}", str(self.attempts))


class ReasoningGym:
    """Implements Environment: `rollouter.environment=agent_loop.gym_environment:ReasoningGym`. Blocking."""

    def __init__(self) -> None:
        """Raises LoopError where reasoning-gym is not installed."""
        try:
            import_reasoning_gym()
        except ImportError as error:
            raise LoopError(f"rollouter.environment: reasoning_gym does not import: {error}") from error

    def reset(self, task: Task) -> str:
        """Nothing is added to the question in the messages. Raises LoopError for a row that asks for what is not."""
        told = task.extra_info.get(_ENTRY_KEY) or {}
        if not isinstance(told, Mapping):
            raise LoopError(f"task {task.task_id}: extra_info.{_ENTRY_KEY}: got {told!r}, expected a mapping")
        self._episode = Episode.of(told)
        self._task = task
        self._attempt = 0
        self._best = 0.0
        return ""

    def step(self, action: str) -> Step:
        """Over when the score is 1 or no attempt is left. Raises RewardError, BadGroundTruth."""
        task, episode = self._task, self._episode
        self._attempt += 1
        score = reasoning_gym(task.data_source, action, task.ground_truth, task.extra_info)
        if not math.isfinite(score):
            raise LoopError(f"task {task.task_id}: got a score of {score} from {task.data_source}, expected a finite number")
        is_solved = score >= 1.0
        gained = max(0.0, score * episode.discount ** (self._attempt - 1) - self._best)
        self._best += gained
        is_over = is_solved or self._attempt == episode.attempts
        parts = {"attempts": float(self._attempt), "solved": float(is_solved), "score": score}
        if self._attempt == 1:
            parts["first_score"] = score
        return Step(observation="" if is_over else episode.says(self._attempt), reward=gained, done=is_over, parts=parts)
