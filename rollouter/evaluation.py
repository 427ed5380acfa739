"""Evaluation: the held-out accuracy of a policy version.

Invariant: an accuracy is the mean over rollouts that were scored; a failed one is left out and counted, and without a single
scored one there is no result. Until an evaluation's rollouts have all gone to the engines, no training rollout is admitted. One
that cannot come to anything ends early: when its first attempts have all failed, or too many rollouts in a row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from agent_loop.engine import SamplingParams
from agent_loop.errors import words_of
from agent_loop.task import Task
from rollouter.admission import HeldVersion
from rollouter.errors import EvaluationFailed
from rollouter.failure_notes import FailureNotes
from rollouter.failures import FINAL, TASK_FAULT, FailureReason, FailureStreak, reason_of
from rollouter.live import LiveView
from rollouter.reports import Reports
from rollouter.rollouts import Episode, Plan, Runner
from rollouter.shelter import sheltered_task
from sample_bus.messages import EvaluationRequest, EvaluationResult, TrainerStatus
from sample_bus.protocols import Control
from sample_bus.sample import NO_VERSION

log = structlog.get_logger()

HOPELESS_ATTEMPTS = 16
"""An evaluation whose first attempts, so many, all failed, and not for an engine or a service that was away, ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What came of an evaluation's rollouts."""

    rewards: tuple[float, ...]
    versions: frozenset[int]
    num_failed: int
    first_failure: str = ""

    def result(self, request: EvaluationRequest, *, seconds: float) -> EvaluationResult:
        """Raises EvaluationFailed when nothing was scored."""
        if not self.rewards:
            raise EvaluationFailed(
                f"evaluation {request.request_id} of version {request.policy_version}: all {self.num_failed} rollouts failed; "
                f"first: {self.first_failure or f'none ended within evaluation.timeout_s ({seconds:.0f} s)'}"
            )
        return EvaluationResult(
            request_id=request.request_id,
            policy_version=request.policy_version,
            accuracy=sum(self.rewards) / len(self.rewards),
            num_samples=len(self.rewards),
            num_failed=self.num_failed,
            generating_versions=tuple(sorted(self.versions)),
            seconds=seconds,
        )


class Prospects:
    """Whether an evaluation can still come to something. Pure."""

    def __init__(self, name: str, *, max_in_a_row: int) -> None:
        self._name = name
        self._streak = FailureStreak(limit=max_in_a_row)
        self._num_attempts = 0
        self._has_scored = False
        self._first = ""

    def succeeded(self) -> None:
        """A rollout was scored."""
        self._has_scored = True
        self._streak.succeeded()

    def attempt_failed(self, words: str, reason: FailureReason) -> None:
        """An attempt failed. Raises EvaluationFailed when the first ones all did."""
        if self._has_scored or reason not in TASK_FAULT:
            return
        self._first = self._first or words
        self._num_attempts += 1
        if self._num_attempts >= HOPELESS_ATTEMPTS:
            raise EvaluationFailed(f"{self._name}: the first {HOPELESS_ATTEMPTS} attempts all failed; first: {self._first}")

    def given_up(self, rollout_id: str, reason: FailureReason, message: str) -> None:
        """A rollout failed with all its attempts. Raises TooManyFailures."""
        self._streak.failed(rollout_id, reason, message)


class Evaluator:
    """Answers topic `evaluate`."""

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        runner: Runner,
        control: Control,
        reports: Reports,
        live: LiveView,
        stop_token_ids: tuple[int, ...],
        held: Callable[[], HeldVersion | None],
        on_change: Callable[[], None],
        notes: FailureNotes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tuple(tasks)[: live.settings.evaluation.max_tasks]
        self._runner = runner
        self._control = control
        self._reports = reports
        self._live = live
        self._stop_token_ids = stop_token_ids
        self._held = held
        self._on_change = on_change
        self._notes = notes
        self._clock = clock
        self._asked: EvaluationRequest | None = None
        self._handed_over: tuple[str, int] | None = None
        self._version_came = asyncio.Event()
        self.is_running = False

    @property
    def has_precedence(self) -> bool:
        """An evaluation is due whose rollouts have not all been handed to the engines."""
        return self._asked is not None and self._is_due(self._asked) and not self._is_done(self._asked)

    def wake(self) -> None:
        """The engines hold another version."""
        self._version_came.set()

    async def run(self) -> None:
        """Answer one request after the other. Never returns; raises EvaluationFailed, TooManyFailures."""
        async for request in self._control.watch("evaluate", EvaluationRequest):
            if not self._tasks:
                log.warning("there is no held-out task, evaluation left out", policy_version=request.policy_version)
                continue
            self._asked = request
            self._on_change()
            while not self._is_due(request) and not self._is_overtaken(request):
                self._version_came.clear()
                await self._version_came.wait()
            if self._is_overtaken(request) or self._is_done(request):
                continue
            self.is_running = True
            try:
                result = await self._evaluate(request)
            finally:
                self.is_running = False
                self._handed_over = _key(request)
                self._on_change()
            if not self._is_overtaken(request):
                await self._reports.send("evaluation.result", result)

    def _is_done(self, request: EvaluationRequest) -> bool:
        """Handed to the engines already, or answered to this trainer by an earlier rollouter."""
        if self._handed_over == _key(request):
            return True
        trainer = self._control.get("trainer", TrainerStatus)
        if trainer is None or trainer.incarnation != request.incarnation:
            return False
        return any(result.request_id == request.request_id for result in trainer.evaluations)

    def _is_due(self, request: EvaluationRequest) -> bool:
        """The engines hold the version that is to be measured, or a newer one of the same trainer."""
        held = self._held()
        return held is not None and held.incarnation == request.incarnation and held.policy_version >= request.policy_version

    def _is_overtaken(self, request: EvaluationRequest) -> bool:
        """Another trainer has taken the place of the one that asked."""
        trainer = self._control.get("trainer", TrainerStatus)
        return trainer is not None and trainer.incarnation != request.incarnation

    async def _evaluate(self, request: EvaluationRequest) -> EvaluationResult:
        settings = self._live.settings.evaluation
        started = self._clock()
        log.info("evaluation started", policy_version=request.policy_version, tasks=len(self._tasks))
        places = asyncio.Semaphore(self._live.settings.rollouter.max_concurrent_rollouts)
        plans = [self._plan(request, task, seat) for task in self._tasks for seat in range(settings.samples_per_task)]
        waiting = len(plans)
        prospects = Prospects(
            f"evaluation {request.request_id} of version {request.policy_version}",
            max_in_a_row=self._live.settings.rollouter.max_consecutive_failures,
        )

        async def play(plan: Plan) -> Episode | str:
            nonlocal waiting
            async with places:
                waiting -= 1
                if waiting == 0:
                    self._handed_over = _key(request)
                    self._on_change()
                return await self._episode(plan, prospects)

        tasks = [asyncio.create_task(play(plan), name=plan.rollout_id) for plan in plans]
        try:
            done, late = (
                await asyncio.wait(tasks, timeout=settings.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
                if tasks
                else (set(), set())
            )
            for task in done:
                task.result()  # raises what ends the evaluation before its time
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if late:
            log.warning("evaluation cut short", late=len(late), of=len(plans), timeout_s=settings.timeout_s)
        episodes = [task.result() for task in tasks if task not in late]
        scored = [episode for episode in episodes if isinstance(episode, Episode)]
        tally = Tally(
            rewards=tuple(episode.unshaped_reward for episode in scored),
            versions=frozenset(int(v) for episode in scored for v in episode.trajectory.versions if v != NO_VERSION),
            num_failed=len(plans) - len(scored),
            first_failure=next((episode for episode in episodes if isinstance(episode, str)), ""),
        )
        result = tally.result(request, seconds=self._clock() - started)
        log.info("evaluation finished", failed=tally.num_failed, **result.model_dump())
        return result

    def _plan(self, request: EvaluationRequest, task: Task, seat: int) -> Plan:
        settings = self._live.settings
        name = f"evaluation{request.request_id}/{task.task_id}"
        held = self._held()
        return Plan(
            task=task,
            group_id=name,
            seat=seat,
            group_size=settings.evaluation.samples_per_task,
            rollout_id=f"{name}/{seat}",
            seed_key=f"evaluation/{task.task_id}/{seat}",
            sampling=SamplingParams(
                temperature=settings.evaluation.temperature,
                max_tokens=settings.sampling.max_tokens,
                stop_token_ids=self._stop_token_ids,
            ),
            settings_revision=self._live.revision,
            incarnation="" if held is None else held.incarnation,
        )

    async def _episode(self, plan: Plan, prospects: Prospects) -> Episode | str:
        """A rollout, or why it was given up. Raises EvaluationFailed, TooManyFailures."""
        attempts = self._live.settings.rollouter.max_attempts
        why, reason, message = "", FailureReason.AGENT_LOOP_FAILED, ""
        for number in range(attempts):
            try:
                episode = await sheltered_task(self._runner.attempt(plan, number), name=f"{plan.rollout_id}.{number}")
            except Exception as error:  # noqa: BLE001 - user code may raise anything; the rollout counts as failed
                reason, message = reason_of(error), words_of(error)
                why = f"rollout {plan.rollout_id}: {reason}: {error}"
                log.warning(
                    "evaluation attempt failed",
                    rollout_id=plan.rollout_id,
                    attempt=number,
                    reason=reason.value,
                    error=message,
                )
                self._notes.add(reason, message, is_evaluation=True)
                prospects.attempt_failed(why, reason)
                if reason in FINAL:
                    break
            else:
                prospects.succeeded()
                return episode
        prospects.given_up(plan.rollout_id, reason, message)
        return why


def _key(request: EvaluationRequest) -> tuple[str, int]:
    """A request's identity: numbers start again with each trainer process."""
    return request.incarnation, request.request_id
