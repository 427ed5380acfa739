"""The environment of reasoning-gym's tasks: several attempts at one question, each scored by the family's own scorer.

Invariant: the rewards of an episode's steps add up to its best attempt, each discounted by how late it came; an episode that is
cut off keeps what it had reached. What may be attempted is the row's (`extra_info["episode"]`) and checked where rows are made.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from agent_loop.environment import Step
from agent_loop.errors import LoopError
from agent_loop.rewards.scoring_thread import ScoringThread
from agent_loop.rewards.weighted import Part, Weighted
from agent_loop.task import Task
from configs.schema import RewardSettings

MAX_ATTEMPTS = 1000
SCORE_TIMEOUT_S = 10.0
"""Of one answer; shorter than a step's (`tools.timeout_s`), so that a scorer that spins is told from other delays."""
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


@dataclass(slots=True, kw_only=True)
class Standing:
    """How far an episode has come. Pure."""

    episode: Episode
    attempt: int = 0
    best: float = 0.0
    """Of the attempts so far, each discounted."""

    def take(self, score: float) -> Step:
        """What the next attempt, of this score, led to: over when the score is 1 or no attempt is left."""
        self.attempt += 1
        is_solved = score >= 1.0
        gained = max(0.0, score * self.episode.discount ** (self.attempt - 1) - self.best)
        self.best += gained
        is_over = is_solved or self.attempt == self.episode.attempts
        parts = {"attempts": float(self.attempt), "solved": float(is_solved), "score": score}
        if self.attempt == 1:
            parts["first_score"] = score
        return Step(observation="" if is_over else self.episode.says(self.attempt), reward=gained, done=is_over, parts=parts)


class ReasoningGym:
    """Implements Environment: `rollouter.environment=agent_loop.gym_environment:ReasoningGym`."""

    def __init__(self) -> None:
        """Raises LoopError where reasoning-gym is not installed."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise LoopError("rollouter.environment: reasoning_gym is not installed")
        self._scorers = _scorers()

    def reset(self, task: Task) -> str:
        """Nothing is added to the question in the messages. Raises LoopError for a row that asks for what is not."""
        told = task.extra_info.get(_ENTRY_KEY) or {}
        if not isinstance(told, Mapping):
            raise LoopError(f"task {task.task_id}: extra_info.{_ENTRY_KEY}: got {told!r}, expected a mapping")
        self._standing = Standing(episode=Episode.of(told))
        self._task = task
        return ""

    async def step(self, action: str) -> Step:
        """Raises RewardError, BadGroundTruth."""
        task = self._task
        score = await self._scorers.score(
            data_source=task.data_source, solution_str=action, ground_truth=task.ground_truth, extra_info=task.extra_info
        )
        return self._standing.take(score.value)


@functools.lru_cache(maxsize=1)
def _scorers() -> ScoringThread:
    """Scorers evaluate what a model wrote, which may spin or fill the memory: they run in the processes of rewards."""
    settings = RewardSettings(timeout_s=SCORE_TIMEOUT_S)
    part = Part(function="agent_loop.rewards.gym_scorer:score")
    return ScoringThread(lambda: Weighted.open({"": part}, settings), name="reasoning-gym")
