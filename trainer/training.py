"""One run of training: model, tracker, publisher, intake and loop, from the first published version to the last settled sample.

Loaded by the daemon once its bus listens, since it brings torch along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from configs.live import LiveSettings
from configs.loader import dump
from configs.paths import socket_dir
from configs.schema import Settings
from sample_bus.messages import TrainerState
from sample_bus.protocols import Hub
from trainer.checkpoint import resume
from trainer.clock import ActivityClock
from trainer.evaluations import Evaluations
from trainer.fsdp import FsdpPolicy
from trainer.intake import Intake
from trainer.loop import TrainingLoop
from trainer.models import prepare_model
from trainer.policy import Policy
from trainer.publisher import Publisher
from trainer.status import StatusBoard
from trainer.tracking import open_tracker

log = structlog.get_logger()
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the daemon lends to the training."""

    settings: Settings
    live: LiveSettings
    hub: Hub
    board: StatusBoard
    clock: ActivityClock
    intake: Intake
    incarnation: str
    drain: asyncio.Event
    executor: Executor
    """One thread: everything that touches the model happens there."""


async def train(around: Surroundings) -> None:
    """Prepare the model, resume, train until the last step or until drained. Raises what makes training impossible."""
    settings, board = around.settings, around.board
    loop = asyncio.get_running_loop()

    def in_thread(function: Callable[[], R]) -> asyncio.Future[R]:
        return loop.run_in_executor(around.executor, function)

    board.enter(TrainerState.STARTING, f"preparing model {settings.model.source}")
    prepared = await in_thread(lambda: prepare_model(settings))
    board.set(model_dir=str(prepared.model_dir), model_dtype=str(prepared.dtype).removeprefix("torch."))
    board.enter(TrainerState.STARTING, "loading the model")
    trusted = settings.model.trust_remote_code
    policy = await in_thread(
        lambda: FsdpPolicy(prepared.model_dir, settings.trainer, dtype=prepared.dtype, trust_remote_code=trusted)
    )
    step, version = await in_thread(lambda: _resume(settings, policy))
    board.set(origin_version=version, policy_version=version, step=step)
    around.hub.set_origin(version)
    if step >= settings.num_steps:
        log.info("already complete", step=step, num_steps=settings.num_steps)
        return
    tracker = await asyncio.to_thread(
        lambda: open_tracker(
            settings.tracking,
            run_dir=settings.run_dir,
            name=settings.name,
            incarnation=around.incarnation,
            config=dump(settings),
        )
    )
    publisher = Publisher(
        around.hub,
        settings.weight_sync,
        incarnation=around.incarnation,
        socket_dir=socket_dir(settings),
        dtype=prepared.dtype,
        loop=loop,
    )
    try:
        with publisher:
            evaluations = Evaluations(around.hub, board, tracker, incarnation=around.incarnation)
            training = TrainingLoop(
                settings,
                around.live,
                policy,
                intake=around.intake,
                publisher=publisher,
                evaluations=evaluations,
                board=board,
                clock=around.clock,
                tracker=tracker,
                executor=around.executor,
                first_step=step,
                policy_version=version,
                drain=around.drain,
            )
            await _run(training, around.intake, evaluations if settings.evaluation.at_start else None)
    finally:
        await asyncio.to_thread(tracker.close)


async def _run(training: TrainingLoop, intake: Intake, evaluations: Evaluations | None) -> None:
    if evaluations is not None:
        await evaluations.ask(training.policy_version)
    await training.publish()
    try:
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(intake.run())
            await training.run()
            taking.cancel()
    finally:
        intake.close_unfinished()


def _resume(settings: Settings, policy: Policy) -> tuple[int, int]:
    """Step and policy version to go on from."""
    state = resume(settings.run_dir / "checkpoints", policy, mode=settings.checkpoint.resume)
    if state is None:
        return 0, 0
    log.info("resumed", **state)
    return int(state["step"]), int(state["policy_version"])
