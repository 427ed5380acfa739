"""Answering the trainer's question which weights the engines hold.

Invariant: every check is answered once for each engine, whatever became of it; an engine that cannot be asked is an answer too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from agent_loop.errors import EngineError
from agent_loop.vllm_client import VllmClient
from rollouter.engines import EngineFleet
from rollouter.reports import Reports
from sample_bus.protocols import Control
from sample_bus.weight_checks import EngineWeights, WeightCheckRequest, WorkerWeights

log = structlog.get_logger()


class WeightChecker:
    """Follows topic `weights_check`."""

    def __init__(self, *, engines: EngineFleet, control: Control, reports: Reports) -> None:
        self._engines = engines
        self._control = control
        self._reports = reports

    async def run(self) -> None:
        """Answer until cancelled. Raises RequestFailed when nobody hears of it."""
        done: tuple[str, int] | None = None
        async for request in self._control.watch("weights_check", WeightCheckRequest):
            if done == (request.incarnation, request.request_id):
                continue
            done = (request.incarnation, request.request_id)
            answers = await self._engines.check_weights(effective=request.effective)
            for answer in answers:
                await self._reports.send("weights.checked", addressed(answer, request, num_engines=len(answers)))


def addressed(answer: EngineWeights, request: WeightCheckRequest, *, num_engines: int) -> EngineWeights:
    """An engine's answer as the one to `request`."""
    return answer.model_copy(
        update={"incarnation": request.incarnation, "request_id": request.request_id, "num_engines": num_engines}
    )


async def weights_of(name: str, client: VllmClient, *, effective: bool, lock: asyncio.Lock) -> EngineWeights:
    """What the engine's workers hold, between two rounds (`lock`)."""
    try:
        async with lock:
            held: Sequence[dict[str, Any]] = await client.collective_rpc("headrace_checksums")
            found: Sequence[dict[str, Any] | None] = (
                await client.collective_rpc("headrace_verify") if effective else [None] * len(held)
            )
        workers = tuple(worker_weights(*pair) for pair in zip(held, found, strict=True))
    except (EngineError, ValueError, KeyError, TypeError) as error:
        log.warning("engine does not say what it holds", engine=name, why=str(error))
        return unanswered(name, str(error))
    return EngineWeights(incarnation="", request_id=0, engine=name, num_engines=0, workers=workers)


def unanswered(name: str, why: str) -> EngineWeights:
    return EngineWeights(incarnation="", request_id=0, engine=name, num_engines=0, error=why)


def worker_weights(held: dict[str, Any], found: dict[str, Any] | None) -> WorkerWeights:
    """A worker's two answers as one."""
    read_back = (
        {}
        if found is None or held["policy_version"] is None
        else {"num_equal": found["num_equal"], "different": found["different"], "unread": found["unread"]}
    )
    return WorkerWeights(
        policy_version=held["policy_version"],
        manifest_digest=held["manifest_digest"],
        checksums=held["checksums"],
        **read_back,
    )
