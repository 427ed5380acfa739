"""The training loop.

Consumes whole groups from the intake; waits for samples, and at the end for the last evaluation; produces optimizer steps,
policy versions, metrics and checkpoints; ends after `num_steps`, when asked to drain, or with an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from configs.live import LiveSettings
from configs.schema import Settings
from sample_bus.messages import StepSummary, TrainerState
from sample_bus.protocols import Leased
from sample_bus.sample import NO_VERSION
from trainer.advantages import group_advantages
from trainer.checkpoint import save_checkpoint
from trainer.clock import Activity, ActivityClock
from trainer.evaluations import Evaluations
from trainer.groups import Group
from trainer.intake import Intake
from trainer.policy import LossOptions, Policy, Proximal, StepReport
from trainer.publisher import Publisher
from trainer.status import StatusBoard
from trainer.tracking import Tracker
from trainer.update import UpdateOptions, train_step

log = structlog.get_logger()


class TrainingLoop:
    """Steps from `first_step` on; `policy_version` is the newest published version."""

    def __init__(
        self,
        settings: Settings,
        live: LiveSettings,
        policy: Policy,
        *,
        intake: Intake,
        publisher: Publisher,
        evaluations: Evaluations,
        board: StatusBoard,
        clock: ActivityClock,
        tracker: Tracker,
        executor: Executor,
        first_step: int,
        policy_version: int,
        drain: asyncio.Event,
    ) -> None:
        self._settings = settings
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
        self._drain = drain
        self.policy_version = policy_version

    async def run(self) -> None:
        """Train until the last step or until asked to drain."""
        settings = self._settings
        while self._step < settings.num_steps and not self._drain.is_set():
            groups = await self._wait_for_batch()
            if groups is None:
                break
            await self._train(groups)
            if self._step % settings.trigger_parameter_sync_step == 0:
                self.policy_version += 1
                await self.publish()
                every = settings.evaluation.every_versions
                if every and self.policy_version % every == 0 and self._step < settings.num_steps:
                    await self._evaluations.ask(self.policy_version)
            if settings.checkpoint.every_steps and self._step % settings.checkpoint.every_steps == 0:
                await self.save()
        finished = self._step >= settings.num_steps
        if settings.checkpoint.at_end and not (
            settings.checkpoint.every_steps and self._step % settings.checkpoint.every_steps == 0
        ):
            await self.save()
        if finished and settings.evaluation.at_end:
            await self._evaluate_at_end()

    async def publish(self) -> None:
        """Announce the current weights as `policy_version`."""
        self._board.enter(TrainerState.PUBLISHING, f"policy version {self.policy_version}")
        with self._clock.during(Activity.PUBLISHING):
            seconds = await self._publisher.announce(
                self._policy.export_weights(), policy_version=self.policy_version, executor=self._executor
            )
        self._board.set(policy_version=self.policy_version)
        await self._board.flush()
        row = {"policy_version": self.policy_version, "snapshot_ms": seconds * 1e3}
        for engine, result in self._publisher.last_results.items():
            row |= {f"pause_ms_{engine}": result.pause_ms, f"stage_ms_{engine}": result.stage_ms}
        self._tracker.write("sync", self.policy_version, row)

    async def save(self) -> None:
        """Write a checkpoint of this step."""
        self._board.enter(TrainerState.SAVING, f"step {self._step}")
        state = {"step": self._step, "policy_version": self.policy_version}
        root = self._settings.run_dir / "checkpoints"
        with self._clock.during(Activity.SAVING):
            path: Path = await self._in_thread(
                lambda: save_checkpoint(root, self._policy, step=self._step, state=state, keep=self._settings.checkpoint.keep)
            )
        log.info("checkpoint saved", step=self._step, path=str(path))

    async def _wait_for_batch(self) -> list[Group] | None:
        self._board.enter(TrainerState.WAITING, f"samples of step {self._step + 1}")
        with self._clock.during(Activity.WAITING):
            batch = asyncio.ensure_future(self._intake.next_batch(lambda: self.policy_version))
            drained = asyncio.ensure_future(self._drain.wait())
            try:
                await asyncio.wait((batch, drained), return_when=asyncio.FIRST_COMPLETED)
                return batch.result() if batch.done() else None
            finally:
                batch.cancel()
                drained.cancel()

    async def _train(self, groups: Sequence[Group]) -> None:
        self._board.enter(TrainerState.TRAINING, f"step {self._step + 1}")
        started = time.monotonic()
        members = [leased for group in groups for leased in group.members]
        samples = [leased.sample for leased in members]
        trainer = self._live.settings.trainer
        advantages = group_advantages(
            np.array([sample.reward for sample in samples], dtype=np.float32),
            [sample.group_id for sample in samples],
            normalize_by_std=trainer.normalize_by_std,
        )
        options = UpdateOptions(
            learning_rate=trainer.learning_rate,
            warmup_steps=trainer.warmup_steps,
            loss=LossOptions(
                clip_low=trainer.clip_low,
                clip_high=trainer.clip_high,
                max_importance_weight=trainer.max_importance_weight,
                proximal=Proximal(trainer.proximal),
            ),
        )
        with self._clock.during(Activity.TRAINING):
            report: StepReport = await self._in_thread(lambda: train_step(self._policy, samples, advantages, options))
        self._step += 1
        self._intake.settle_trained(groups)
        self._record(members, report, time.monotonic() - started)

    def _record(self, members: Sequence[Leased], report: StepReport, seconds: float) -> None:
        staleness = np.array([self.policy_version - leased.sample.oldest_version for leased in members])
        token_staleness = np.concatenate([self._token_staleness(leased) for leased in members])
        rewards = np.array([leased.sample.reward for leased in members])
        lengths = np.array([leased.sample.num_trained_tokens for leased in members])
        revisions = np.array([leased.sample.settings_revision for leased in members])
        summary = StepSummary(
            step=self._step,
            policy_version=self.policy_version,
            reward_mean=float(rewards.mean()),
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            staleness_mean=float(staleness.mean()),
            staleness_max=int(staleness.max()),
            mismatch_mean_abs=report.mismatch_mean_abs,
            mismatch_max_abs=report.mismatch_max_abs,
            importance_mean=report.importance_mean,
            num_samples=report.num_samples,
            num_tokens=report.num_tokens,
            num_trained_tokens=report.num_trained_tokens,
            step_time_s=seconds,
            finished_at=time.time(),
        )
        self._board.add_step(summary)
        counts = self._intake.counts()
        row: dict[str, Any] = {
            **summary.model_dump(exclude={"step", "finished_at"}),
            "reward_std": float(rewards.std()),
            "staleness_min": int(staleness.min()),
            "token_staleness_mean": float(token_staleness.mean()) if token_staleness.size else 0.0,
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_max": int(lengths.max()),
            "importance_max": report.importance_max,
            "importance_capped_fraction": report.importance_capped_fraction,
            "kl_behavior_policy": report.kl_behavior_policy,
            "entropy": report.entropy,
            "clip_fraction": report.clip_fraction,
            "num_computed_tokens": report.num_computed_tokens,
            "num_microbatches": report.num_microbatches,
            "skipped": int(report.skipped),
            "forward_backward_s": report.forward_backward_s,
            "optimizer_s": report.optimizer_s,
            "settings_revision": self._live.revision,
            "admitted_revision_min": int(revisions.min()),
            "admitted_revision_max": int(revisions.max()),
            "staleness_max_of_newest_revision": int(staleness[revisions == revisions.max()].max()),
            "samples_queued": counts.queued,
            "samples_trained": counts.trained,
            "samples_dropped": sum(counts.dropped.values()),
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
        )

    def _token_staleness(self, leased: Leased) -> npt.NDArray[np.int32]:
        versions = leased.sample.token_versions()
        sampled: npt.NDArray[np.int32] = versions[versions != NO_VERSION]
        return np.int32(self.policy_version) - sampled

    async def _evaluate_at_end(self) -> None:
        self._board.enter(TrainerState.EVALUATING, f"policy version {self.policy_version}")
        await self._publisher.wait_committed(self.policy_version, timeout_s=self._settings.weight_sync.round_timeout_s)
        request_id = await self._evaluations.ask(self.policy_version)
        await self._evaluations.wait(request_id, timeout_s=self._settings.evaluation.timeout_s)

    async def _in_thread(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
