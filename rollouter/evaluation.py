"""Evaluation: the held-out accuracy of a policy version.

Invariant: an accuracy is the mean over rollouts that were scored; a failed one is left out and counted, and without a single
scored one there is no result. Until an evaluation's rollouts have all gone to the engines, no training rollout is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from agent_loop.engine import SamplingParams
from agent_loop.task import Task
from rollouter.admission import HeldVersion
from rollouter.errors import EvaluationFailed
from rollouter.failures import FINAL, reason_of
from rollouter.live import LiveView
from rollouter.reports import Reports
from rollouter.rollouts import Episode, Plan, Runner
from rollouter.shelter import sheltered_task
from sample_bus.messages import EvaluationRequest, EvaluationResult, TrainerStatus
from sample_bus.protocols import Control
from sample_bus.sample import NO_VERSION

log = structlog.get_logger()


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
            generating_versions=tuple(sorted(self.versions)),
            seconds=seconds,
        )


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
        """Answer one request after the other. Never returns; raises EvaluationFailed."""
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

        async def play(plan: Plan) -> Episode | str:
            nonlocal waiting
            async with places:
                waiting -= 1
                if waiting == 0:
                    self._handed_over = _key(request)
                    self._on_change()
                return await self._episode(plan)

        tasks = [asyncio.create_task(play(plan), name=plan.rollout_id) for plan in plans]
        try:
            _, late = await asyncio.wait(tasks, timeout=settings.timeout_s) if tasks else (set(), set())
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

    async def _episode(self, plan: Plan) -> Episode | str:
        """A rollout, or why it was given up."""
        attempts = self._live.settings.rollouter.max_attempts
        why = ""
        for number in range(attempts):
            try:
                return await sheltered_task(self._runner.attempt(plan, number), name=f"{plan.rollout_id}.{number}")
            except Exception as error:  # noqa: BLE001 - user code may raise anything; the rollout counts as failed
                reason = reason_of(error)
                why = f"rollout {plan.rollout_id}: {reason}: {error}"
                log.warning(
                    "evaluation attempt failed",
                    rollout_id=plan.rollout_id,
                    attempt=number,
                    reason=reason.value,
                    error=f"{type(error).__name__}: {error}",
                )
                if reason in FINAL:
                    break
        return why


def _key(request: EvaluationRequest) -> tuple[str, int]:
    """A request's identity: numbers start again with each trainer process."""
    return request.incarnation, request.request_id
