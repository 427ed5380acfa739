"""Asking the rollouter for held-out accuracy and taking the answers.

Invariant: a result is filed under the version for which it was asked, whatever was published since.
"""

from __future__ import annotations

import asyncio

import structlog

from sample_bus.errors import RequestFailed
from sample_bus.messages import Accepted, EvaluationRequest, EvaluationResult
from sample_bus.protocols import ControlServer
from trainer.status import StatusBoard
from trainer.tracking import Tracker

log = structlog.get_logger()


class Evaluations:
    """Owns topic `evaluate`."""

    def __init__(self, control: ControlServer, board: StatusBoard, tracker: Tracker, *, incarnation: str) -> None:
        self._incarnation = incarnation
        self._control = control
        self._board = board
        self._tracker = tracker
        self._last_id = 0
        self._results: dict[int, EvaluationResult] = {}
        self._changed = asyncio.Condition()
        control.handle("evaluation.result", EvaluationResult, self._take)

    async def ask(self, policy_version: int) -> int:
        """Ask for the accuracy of `policy_version`; returns the request's id."""
        self._last_id += 1
        request = EvaluationRequest(incarnation=self._incarnation, request_id=self._last_id, policy_version=policy_version)
        await self._control.publish("evaluate", request)
        return self._last_id

    async def wait(self, request_id: int, *, timeout_s: float) -> EvaluationResult | None:
        """The result of a request; None, with a warning, if it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: request_id in self._results)
        except TimeoutError:
            log.warning("evaluation did not come", request_id=request_id, timeout_s=timeout_s)
            return None
        return self._results[request_id]

    async def _take(self, result: EvaluationResult) -> Accepted:
        if not 1 <= result.request_id <= self._last_id:
            raise RequestFailed(f"evaluation {result.request_id} was never asked for; newest is {self._last_id}")
        if result.request_id in self._results:
            return Accepted()
        log.info(
            "evaluation",
            policy_version=result.policy_version,
            accuracy=round(result.accuracy, 4),
            num_samples=result.num_samples,
            seconds=round(result.seconds, 2),
        )
        self._tracker.write(
            "evaluation",
            result.policy_version,
            {
                "accuracy": result.accuracy,
                "num_samples": result.num_samples,
                "seconds": result.seconds,
                "oldest_generating_version": min(result.generating_versions, default=result.policy_version),
                "newest_generating_version": max(result.generating_versions, default=result.policy_version),
            },
        )
        async with self._changed:
            self._results[result.request_id] = result
            self._board.add_evaluation(result)
            self._changed.notify_all()
        return Accepted()
