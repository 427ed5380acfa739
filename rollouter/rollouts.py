"""One attempt of one rollout: an agent loop on a task, its reward, and the sample made of both.

Invariant: an attempt yields an episode with a complete trajectory and a real reward, or raises. What it samples depends only on
weights, task and (run seed, rollout, attempt), as far as the engine's arithmetic does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog
import xxhash

from agent_loop.deadline import Deadline
from agent_loop.engine import Engine, SamplingParams
from agent_loop.errors import AgentLoopError, words_of
from agent_loop.loop import AgentLoop, is_resumable
from agent_loop.session import Session, TextCodec, Trajectory
from agent_loop.slices import Slices
from agent_loop.task import Task
from rollouter.errors import LateResult
from rollouter.progress import Recording
from rollouter.scoring import Scorer
from rollouter.turnstile import PacedEngine, Turnstile
from sample_bus.sample import MAX_FIGURE_NAME, MAX_FIGURES, Sample, StopReason

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A rollout as it was admitted; its attempts share it."""

    task: Task
    group_id: str
    seat: int
    group_size: int
    rollout_id: str
    seed_key: str
    """Names the rollout over restarts of this process: task, issue number and seat."""
    sampling: SamplingParams
    settings_revision: int
    incarnation: str
    """Whose versions the engines held at admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What one attempt brought."""

    trajectory: Trajectory
    reward: float
    """What is trained on."""
    unshaped_reward: float
    """Without what its length cost."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)


class Runner:
    """Plays attempts."""

    def __init__(
        self,
        *,
        loop: AgentLoop,
        engine: Engine,
        codec: TextCodec,
        scorer: Scorer,
        max_model_len: int,
        timeout_s: Callable[[], float],
        seed: int,
        progress_interval_s: Callable[[], float] = lambda: 0.0,
        loop_of: Callable[[Task], AgentLoop] | None = None,
    ) -> None:
        """`loop_of` picks each task's loop (None: `loop` plays all); `timeout_s`, asked at its beginning, bounds one attempt,
        reward included; recorded attempts are recorded each `progress_interval_s`, or at the end of each turn if that is 0."""
        self._loop_of = loop_of or (lambda task: loop)
        self.turnstile = Turnstile()
        """What becomes due for many rollouts at once passes it."""
        self._engine = PacedEngine(engine, self.turnstile)
        self._codec = codec
        self._scorer = scorer
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._seed = seed
        self._slices = Slices(progress_interval_s)

    async def attempt(
        self, plan: Plan, number: int, recording: Recording | None = None, deadline: Deadline | None = None
    ) -> Episode:
        """Play attempt `number`, going on from what `recording` has of it, until `deadline` (None: one of its own).

        Raises TimeoutError naming what it was doing (LateResult if it ended well, but too late), AgentLoopError (Diverged if it
        did not repeat what was recorded), or what the loop raised.
        """
        loop = self._loop_of(plan.task)
        deadline = deadline or Deadline(self._timeout_s())
        if recording is not None and not is_resumable(loop):
            recording.spoil()
            recording = None
        session = Session(
            self._engine,
            replace(plan.sampling, seed=request_seed(self._seed, plan.seed_key, number)),
            rollout_id=f"{plan.rollout_id}.{number}",
            max_model_len=self._max_model_len,
            codec=self._codec,
            slices=None if recording is None else self._slices,
            recorder=recording,
            restored=() if recording is None else recording.restored,
            deadline=deadline,
        )
        scoring, timeout_s = False, deadline.timeout_s
        try:
            async with deadline.limit() as limit:
                await loop.run(plan.task, session)
                await self.turnstile.enter()
                trajectory = session.trajectory()
                scoring = True
                scored = await self._scorer.score(plan.task, trajectory)
            if limit.expired():
                raise LateResult(
                    f"rollout {plan.rollout_id} attempt {number} brought a result after its deadline of {timeout_s:g} s"
                )
        except LateResult:
            raise
        except TimeoutError as error:
            doing = "its reward was computed" if scoring else f"turn {session.num_turns + 1} was played"
            when = f"after {timeout_s:g} s" if limit.expired() else "on a deadline of its own"
            raise TimeoutError(
                f"rollout {plan.rollout_id} attempt {number} gave up {when} while {doing} ({session.num_tokens} tokens so far)"
            ) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise AgentLoopError(f"rollout {plan.rollout_id} attempt {number}: something in it was cancelled") from error
        except (Exception, GeneratorExit):  # GeneratorExit: this coroutine is closed, or `rollouter.shelter` sees to it
            raise
        except BaseException as error:  # SystemExit, or what is meant to pass by `except Exception`
            raise AgentLoopError(
                f"rollout {plan.rollout_id} attempt {number}: the agent loop raised {words_of(error)}"
            ) from error
        return Episode(
            trajectory=scored.trajectory,
            reward=scored.reward,
            unshaped_reward=scored.unshaped,
            reward_parts=scored.parts,
        )


def request_seed(run_seed: int, seed_key: str, attempt: int) -> int:
    """Seed of an attempt's requests, below 2^31."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}\0{seed_key}\0{attempt}".encode()) & 0x7FFFFFFF


def sample_of(plan: Plan, attempt: int, episode: Episode, *, now: Callable[[], float]) -> Sample:
    """The episode as a sample; the bus validates it when it is offered."""
    trajectory = episode.trajectory
    return Sample(
        task_id=plan.task.task_id,
        group_id=plan.group_id,
        rollout_id=plan.rollout_id,
        attempt=attempt,
        seat=plan.seat,
        group_size=plan.group_size,
        data_source=plan.task.data_source,
        tokens=np.ascontiguousarray(trajectory.tokens, np.int32),
        loss_mask=np.ascontiguousarray(trajectory.loss_mask, np.uint8),
        behavior_logprobs=np.ascontiguousarray(trajectory.behavior_logprobs, np.float32),
        version_starts=np.ascontiguousarray(trajectory.version_starts, np.int32),
        versions=np.ascontiguousarray(trajectory.versions, np.int32),
        kept_cache=np.ascontiguousarray(trajectory.kept_cache, np.uint8),
        reward=episode.reward,
        temperature=plan.sampling.temperature,
        stop_reason=StopReason(trajectory.stop_reason),
        num_turns=trajectory.num_turns,
        settings_revision=plan.settings_revision,
        incarnation=plan.incarnation,
        produced_at=now(),
        segment_starts=np.ascontiguousarray(trajectory.segment_starts, np.int32),
        token_rewards=np.ascontiguousarray(trajectory.token_rewards, np.float32),
        reward_parts=_some(episode.reward_parts, float),
        counts=_some(trajectory.counts, int),
    )


def _some(figures: Mapping[str, Any], kind: Callable[[Any], Any]) -> dict[str, Any]:
    """As many as a sample carries, under names that it takes."""
    return {str(name)[:MAX_FIGURE_NAME]: kind(value) for name, value in list(figures.items())[:MAX_FIGURES]}
