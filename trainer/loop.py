"""The training loop.

Consumes whole groups from the intake; waits for samples, for a journal that cannot be written, and at the end for the last
evaluation; produces optimizer steps, policy versions, metrics and checkpoints; ends after `num_steps`, when asked to drain, or
with an exception. Invariant: a step's records are in the journal before the step, and a checkpoint's position and counts are
those of its weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from configs.live import LiveSettings, live_values, with_live
from configs.schema import Settings, TrainerSettings
from sample_bus.journal import Saved, StepBegan, StepTrained
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import TrainerState
from sample_bus.protocols import Consumer, Leased
from sample_bus.sample import Sample
from trainer.advantages import group_advantages, turn_advantages
from trainer.advice import Advisor
from trainer.aged import weights_of
from trainer.bias import row_of
from trainer.checkpoint import DIRECTORY, Part, save_checkpoint
from trainer.clock import Activity, ActivityClock
from trainer.commits import Commits
from trainer.demand import StepAccount, next_sync_step
from trainer.errors import CheckpointError
from trainer.evaluations import Evaluations
from trainer.intake import Intake, plain_ids
from trainer.plan import Batch
from trainer.policy import LossOptions, Policy, Proximal, StepReport
from trainer.publisher import Publisher
from trainer.run_state import RunState
from trainer.status import StatusBoard
from trainer.step_row import metrics_row, summary_of
from trainer.tracking import Tracker
from trainer.update import UpdateOptions, train_step

log = structlog.get_logger()

_STEP_SECTION = "trainer."
_STEP_KEYS = frozenset({"max_staleness", "on_stale", "stale_weight_base"})
"""Live settings that a step uses beside those of its section. How large a batch is, and when is saved, is no part of it."""


class Flushed(Protocol):
    """What must be on disk before a step is taken: the journal, and what is kept of the bus."""

    @property
    def is_blocked(self) -> bool: ...

    async def flush(self) -> None: ...


class TrainingLoop:
    """Steps from `first_step` on; `policy_version` is the newest published version."""

    def __init__(
        self,
        settings: Settings,
        live: LiveSettings,
        policy: Policy,
        *,
        consumer: Consumer,
        journal: JournalWriter,
        retained: Flushed | None,
        commits: Commits,
        parts: Mapping[str, Part],
        run_id: str,
        incarnation: str,
        intake: Intake,
        publisher: Publisher,
        evaluations: Evaluations,
        board: StatusBoard,
        clock: ActivityClock,
        tracker: Tracker,
        executor: Executor,
        first_step: int,
        policy_version: int,
        saved_step: int | None,
        drain: asyncio.Event,
    ) -> None:
        """`parts` is what checkpoints hold, the policy among it; `saved_step` that of this run's newest checkpoint."""
        self._settings = settings
        self._consumer = consumer
        self._journal = journal
        self._retained = retained
        self._commits = commits
        self._parts = parts
        self._run_id = run_id
        self._incarnation = incarnation
        self._live = live
        self._policy = policy
        self._intake = intake
        self._publisher = publisher
        self._evaluations = evaluations
        self._board = board
        self._clock = clock
        self._tracker = tracker
        self._executor = executor
        self._step = first_step
        self._saved_step = saved_step
        self._drain = drain
        self.policy_version = policy_version
        self._decided = (live.settings, live.revision)
        """Settings and their revision when the intake decided on the newest batch: those of its step."""
        self._advisor = Advisor()
        self._account = StepAccount(begun_step=first_step, sync_step=self._next_sync_step())
        self._board.set(**self._account.said())

    async def run(self) -> None:
        """Train until the last step or until asked to drain."""
        num_steps = self._settings.num_steps
        while self._step < num_steps and not self._drain.is_set():
            batch = await self._wait_for_batch()
            if batch is None:
                break
            await self._train(batch)
            if self._account.is_due:
                self.policy_version += 1
                self._account.publish(next_sync_step=self._next_sync_step())
                await self.publish()
                every = self._live.settings.evaluation.every_versions
                if every and self.policy_version % every == 0 and self._step < num_steps:
                    await self._evaluations.ask(self.policy_version)
            every = self._live.settings.checkpoint.every_steps
            if every and self._step % every == 0:
                await self._try_to_save()
        if self._live.settings.checkpoint.at_end:
            self._commits.hold()
            if self._step != self._saved_step:
                await self.save()
        if self._step >= num_steps and self._live.settings.evaluation.at_end:
            await self._evaluate_at_end()

    async def publish(self) -> None:
        """Announce the current weights as `policy_version`."""
        self._board.enter(TrainerState.PUBLISHING, f"policy version {self.policy_version}")
        with self._clock.during(Activity.PUBLISHING):
            seconds = await self._publisher.announce(
                self._policy.export_weights, policy_version=self.policy_version, executor=self._executor
            )
        self._board.set(policy_version=self.policy_version, **self._account.said())
        await self._board.flush()
        row = {"policy_version": self.policy_version, "snapshot_ms": seconds * 1e3}
        for engine, result in self._publisher.last_results.items():
            row |= {f"pause_ms_{engine}": result.pause_ms, f"stage_ms_{engine}": result.stage_ms}
        self._tracker.write("sync", self.policy_version, row)

    async def save(self) -> None:
        """Write a checkpoint of this step; afterwards producers may free what it covers. Raises CheckpointError."""
        await self._flush(f"before a checkpoint of step {self._step}")
        self._board.enter(TrainerState.SAVING, f"step {self._step}")
        state = RunState(
            run_id=self._run_id,
            incarnation=self._incarnation,
            step=self._step,
            policy_version=self.policy_version,
            position=self._consumer.position(),
            counts=self._intake.settled_counts(),
            bias=self._intake.bias(),
        )
        root = self._settings.run_dir / DIRECTORY
        keep = self._live.settings.checkpoint.keep
        with self._clock.during(Activity.SAVING):
            path: Path = await self._in_thread(lambda: save_checkpoint(root, self._parts, state=state, keep=keep))
        self._saved_step = self._step
        self._journal.write(
            Saved(at=time.time(), step=state.step, policy_version=state.policy_version, position=state.position.as_plain())
        )
        await self._flush(f"after the checkpoint of step {self._step}")
        self._commits.saved(state.position)
        log.info("checkpoint saved", step=self._step, path=str(path))

    async def _try_to_save(self) -> None:
        try:
            await self.save()
        except CheckpointError as error:
            every = self._live.settings.checkpoint.every_steps
            log.warning("checkpoint not saved, the run goes on", error=str(error), next_at_step=self._step + every)

    async def _flush(self, when: str) -> None:
        """Return when everything told so far is on disk; says what is awaited while it is not."""
        if self._journal.is_blocked:
            self._board.enter(TrainerState.WAITING, f"{self._journal.path} cannot be written {when}: {self._journal.problem}")
        await self._journal.flush()
        if self._retained is not None:
            if self._retained.is_blocked:
                self._board.enter(TrainerState.WAITING, f"samples cannot be kept (bus.retain) {when}")
            await self._retained.flush()

    async def _wait_for_batch(self) -> Batch | None:
        self._board.enter(TrainerState.WAITING, f"samples of step {self._step + 1}")
        with self._clock.during(Activity.WAITING):
            batch = asyncio.ensure_future(self._intake.next_batch(self._decide, is_last=self._ends_version))
            drained = asyncio.ensure_future(self._drain.wait())
            try:
                await asyncio.wait((batch, drained), return_when=asyncio.FIRST_COMPLETED)
                return batch.result() if batch.done() else None
            finally:
                batch.cancel()
                drained.cancel()

    def _decide(self) -> int:
        """The intake decides on a batch in this moment: its step takes the settings of now, and is of the version of now."""
        self._decided = (self._live.settings, self._live.revision)
        return self.policy_version

    def _ends_version(self) -> bool:
        """Whether a new version follows the next step, and steps that could still take something follow that."""
        return self._account.sync_step <= self._step + 1 < self._settings.num_steps

    async def _train(self, batch: Batch) -> None:
        step = self._step + 1
        in_force, _ = self._decided
        settings = in_force if batch.options is None else with_live(in_force, batch.options)
        members = [leased for group in batch.groups for leased in group.members]
        self._account.begin(step, sum(len(group.records) for group in batch.groups))
        self._board.set(demand=self._account.said()["demand"])
        self._journal.write(
            StepBegan(
                at=time.time(),
                step=step,
                policy_version=self.policy_version,
                samples=plain_ids([leased.id for leased in members]),
                closures=plain_ids([lease.id for group in batch.groups for lease in group.closures]),
                options=step_options(settings),
                weighting={} if batch.weighting is None else batch.weighting.as_plain(),
            )
        )
        with self._clock.during(Activity.WAITING):
            await self._flush(f"before step {step}")
        self._board.enter(TrainerState.TRAINING, f"step {step}" + (", taken again" if batch.replayed else ""))
        started = time.monotonic()
        samples = [leased.sample for leased in members]
        advantages = advantages_of(samples, settings.trainer)
        dense = dense_of(samples, settings.trainer)
        options = options_of(settings.trainer)
        weights = weights_of(batch.weighting, samples)
        queued_s = [time.time() - leased.received_at for leased in members]
        with self._clock.during(Activity.TRAINING):
            report: StepReport = await self._in_thread(
                lambda: train_step(
                    self._policy,
                    samples,
                    advantages,
                    options,
                    weights=weights,
                    dense=dense,
                    before_change=self._publisher.before_change,
                )
            )
        self._step = step
        self._journal.write(
            StepTrained(
                at=time.time(),
                step=step,
                policy_version=self.policy_version,
                loss=report.loss,
                grad_norm=report.grad_norm,
                replayed=batch.replayed,
            )
        )
        self._intake.settle_trained(batch)
        self._record(members, report, time.monotonic() - started, queued_s=queued_s, replayed=batch.replayed)

    def _record(
        self, members: Sequence[Leased], report: StepReport, seconds: float, *, queued_s: Sequence[float], replayed: bool
    ) -> None:
        samples = [leased.sample for leased in members]
        summary = summary_of(
            samples, report, step=self._step, policy_version=self.policy_version, seconds=seconds, now=time.time()
        )
        self._board.add_step(summary, replayed=replayed)
        for words in self._advisor.look(samples, self._decided[0], step=self._step):
            log.warning("advice", says=words, step=self._step)
            self._board.advise(words)
        counts = self._intake.counts()
        _, revision = self._decided
        row: dict[str, Any] = {
            **metrics_row(samples, summary, report),
            "settings_revision": revision,
            "replayed": int(replayed),
            "samples_queued": counts.queued,
            "samples_trained": counts.trained,
            "samples_dropped": sum(counts.dropped.values()),
            "seats_closed": counts.closed,
            "queued_s_mean": float(np.mean(queued_s)),
            "queued_s_max": max(queued_s),
            **self._intake.signal_row(),
            **self._intake.rollouter_row(),
            **row_of(self._intake.bias()),
            **{f"seconds_{activity}": spent for activity, spent in self._clock.seconds().items()},
        }
        self._tracker.write("train", self._step, row)
        log.info(
            "step",
            step=self._step,
            policy_version=self.policy_version,
            reward=round(summary.reward_mean, 4),
            loss=round(summary.loss, 5),
            grad_norm=round(summary.grad_norm, 3),
            staleness_mean=round(summary.staleness_mean, 3),
            staleness_max=summary.staleness_max,
            mismatch_mean_abs=round(summary.mismatch_mean_abs, 6),
            importance_mean=round(summary.importance_mean, 5),
            seconds=round(seconds, 2),
            **({"replayed": True} if replayed else {}),
        )

    def _next_sync_step(self) -> int:
        settings = self._live.settings
        return next_sync_step(
            self._step,
            trigger_parameter_sync_step=settings.trigger_parameter_sync_step,
            num_steps=settings.num_steps,
        )

    async def _evaluate_at_end(self) -> None:
        self._board.enter(TrainerState.EVALUATING, f"policy version {self.policy_version}")
        await self._publisher.wait_committed(self.policy_version, timeout_s=self._settings.weight_sync.round_timeout_s)
        request_id = await self._evaluations.ask(self.policy_version)
        await self._evaluations.wait(request_id, timeout_s=self._live.settings.evaluation.timeout_s)

    async def _in_thread(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


def advantages_of(samples: Sequence[Sample], trainer: TrainerSettings) -> npt.NDArray[np.float32]:
    """[n] float32, one per sample; relative to the siblings that are there."""
    return group_advantages(
        np.array([sample.reward for sample in samples], dtype=np.float32),
        [sample.group_id for sample in samples],
        normalize_by_std=trainer.normalize_by_std,
    )


def dense_of(samples: Sequence[Sample], trainer: TrainerSettings) -> list[npt.NDArray[np.float32]] | None:
    """What rewards of turns add to each token's advantage, per sample float32 [T]; None: nothing."""
    return turn_advantages(
        samples,
        discount=trainer.dense_discount,
        weight=trainer.dense_weight,
        normalize_by_std=trainer.normalize_by_std,
    )


def step_options(settings: Settings) -> dict[str, Any]:
    """Every live setting that a step uses once it has its batch, by dotted key: what the journal keeps for it."""
    return {key: value for key, value in live_values(settings).items() if key in _STEP_KEYS or key.startswith(_STEP_SECTION)}


def options_of(trainer: TrainerSettings) -> UpdateOptions:
    """What holds for one step under these settings."""
    return UpdateOptions(
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        max_grad_norm=trainer.max_grad_norm,
        loss=LossOptions(
            clip_low=trainer.clip_low,
            clip_high=trainer.clip_high,
            max_importance_weight=trainer.max_importance_weight,
            proximal=Proximal(trainer.proximal),
        ),
    )
