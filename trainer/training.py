"""One run of training: model, tracker, publisher, intake and loop, from the first published version to the last settled sample.

Loaded by the daemon once its bus listens, since it brings torch along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from configs.errors import ConfigError
from configs.live import LiveSettings
from configs.loader import dump
from configs.model_files import model_files, other_files
from configs.paths import adapter_dir, socket_dir
from configs.schema import Settings
from sample_bus.journal import ModelTaken, VersionPublished
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import RoundSummary, TrainerState
from sample_bus.protocols import Hub
from trainer.checkpoint import Checkpoint, Part, load
from trainer.clock import ActivityClock
from trainer.commits import Commits
from trainer.evaluations import Evaluations
from trainer.fsdp import FsdpPolicy
from trainer.history import History
from trainer.intake import Intake
from trainer.loop import TrainingLoop
from trainer.models import prepare_model
from trainer.probe import Probe, probe_ids, row_of_probe
from trainer.publisher import Publisher
from trainer.randomness import Randomness
from trainer.retained import Retained
from trainer.rounds import has_ended, row_of
from trainer.status import StatusBoard
from trainer.taken_up import note
from trainer.tracking import Tracker, open_tracker
from trainer.weight_check import WeightChecks

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
    commits: Commits
    journal: JournalWriter
    retained: Retained | None
    checkpoint: Checkpoint | None
    """Where the run goes on from; the hub stands at its position."""
    history: History
    run_id: str
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
    files = await in_thread(lambda: model_files(prepared.model_dir))
    refuse_another_model(files, around.history, settings)
    where = {
        "model_dir": str(prepared.model_dir),
        "model_dtype": str(prepared.dtype).removeprefix("torch."),
        "model_files": files,
    }
    sends_adapters = settings.weight_sync.lora == "adapter"
    if not sends_adapters:
        board.set(**where)
        await board.flush()  # before any version of it: a rollouter of another model must not take one
    board.enter(TrainerState.STARTING, "loading the model")
    policy = await in_thread(
        lambda: FsdpPolicy(
            prepared.model_dir,
            settings.trainer,
            dtype=prepared.dtype,
            trust_remote_code=settings.model.trust_remote_code,
            exports_adapters=sends_adapters,
            seed=settings.seed,
        )
    )
    if sends_adapters:
        await in_thread(lambda: policy.write_first_adapter(adapter_dir(settings)))
        board.set(**where)
        await board.flush()
    randomness = Randomness()
    parts: Mapping[str, Part] = {"policy": policy, "random": randomness}
    await in_thread(lambda: _begin(around.checkpoint, parts, randomness, seed=settings.seed))
    await asyncio.to_thread(lambda: note(settings, run_id=around.run_id))
    if around.history.model is None:
        around.journal.write(ModelTaken(at=time.time(), source=settings.model.source, files=files))
    checkpoint = around.checkpoint
    own = checkpoint is not None and checkpoint.state.run_id == around.run_id
    step, version = (checkpoint.state.step, checkpoint.state.policy_version) if checkpoint else (0, 0)
    if checkpoint is not None:
        log.info("resumed", path=str(checkpoint.path), step=step, policy_version=version)
        if own:
            around.commits.saved(checkpoint.state.position)
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
    probe = None
    if settings.weight_sync.probe == "on":
        probe = Probe(policy, probe_ids(policy.vocab_size, max_model_len=settings.engine.max_model_len))
    publisher = Publisher(
        around.hub,
        settings.weight_sync,
        incarnation=around.incarnation,
        socket_dir=socket_dir(settings),
        dtype=prepared.dtype,
        loop=loop,
        on_version=lambda version, digest: _note_version(around, version, digest),
        on_round=lambda summary: _say_round(board, tracker, summary),
        probe=probe,
        on_wait=lambda what: board.set(detail=what),
        on_probe=lambda report: tracker.write("probe", report.policy_version, row_of_probe(report)),
    )
    try:
        with publisher:
            WeightChecks(around.hub, incarnation=around.incarnation, published=publisher.published)
            evaluations = Evaluations(around.hub, board, tracker, incarnation=around.incarnation)
            training = TrainingLoop(
                settings,
                around.live,
                policy,
                consumer=around.hub,
                journal=around.journal,
                retained=around.retained,
                commits=around.commits,
                parts=parts,
                run_id=around.run_id,
                incarnation=around.incarnation,
                intake=around.intake,
                publisher=publisher,
                evaluations=evaluations,
                board=board,
                clock=around.clock,
                tracker=tracker,
                executor=around.executor,
                first_step=step,
                policy_version=version,
                saved_step=step if own else None,
                drain=around.drain,
            )
            await _run(training, publisher, around, evaluations if settings.evaluation.at_start else None)
    finally:
        await asyncio.to_thread(tracker.close)


def refuse_another_model(files: Mapping[str, str], history: History, settings: Settings) -> None:
    """What the run's records say in tokens is said in those of the model that it was begun with. Raises ConfigError."""
    begun = history.model
    if begun is not None and (others := other_files(files, begun.files)):
        raise ConfigError(
            f"model.source={settings.model.source}: is another model than the one with which the run in {settings.run_dir} was "
            f"begun (model.source={begun.source}; not the same: {', '.join(others)}); begin afresh with checkpoint.resume=never"
        )


def _note_version(around: Surroundings, version: int, digest: str) -> None:
    before, step = around.history.published, around.board.status.step
    if before is not None and (before.step, before.policy_version) == (step, version) and before.digest != digest:
        log.warning(
            "a policy version is published again with other weights, such as those of another model.dtype",
            policy_version=version,
            digest=digest,
            digest_before=before.digest,
        )
    around.journal.write(VersionPublished(at=time.time(), policy_version=version, step=step, digest=digest))


def _say_round(board: StatusBoard, tracker: Tracker, summary: RoundSummary) -> None:
    board.set(round=summary)
    if has_ended(summary):
        tracker.write("round", summary.policy_version, row_of(summary))


async def _run(training: TrainingLoop, publisher: Publisher, around: Surroundings, evaluations: Evaluations | None) -> None:
    if evaluations is not None:
        await evaluations.ask(training.policy_version)
    await training.publish()
    intake = around.intake
    try:
        async with asyncio.TaskGroup() as tasks:
            works = (intake.run(), intake.follow_losses(), around.commits.run(), publisher.follow_engines())
            side = [tasks.create_task(work) for work in works]
            await training.run()
            for task in side:
                task.cancel()
    finally:
        intake.close_unfinished()
        around.commits.finish()


def _begin(checkpoint: Checkpoint | None, parts: Mapping[str, Part], randomness: Randomness, *, seed: int) -> None:
    """Bring model and random generators to where the run goes on. Raises CheckpointError."""
    if checkpoint is None:
        randomness.seed(seed)
    else:
        load(checkpoint, parts)
