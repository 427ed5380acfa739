"""Taking recorded steps again, one after the other, and comparing what comes out with what came out then.

Loaded once it is known that there is something to train, since it brings torch along. Invariant: a step is given the same
samples in the same order, under the recorded settings unless they are overridden.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
import torch

from configs.loader import dump, validate
from configs.schema import Settings
from sample_bus.messages import Counts
from sample_bus.position import BusPosition
from trainer.aged import Weighting, weights_of
from trainer.checkpoint import DIRECTORY, Part, load, save_checkpoint
from trainer.comparison import Comparison, StepPair, VersionPair
from trainer.errors import ReplayError
from trainer.fsdp import FsdpPolicy
from trainer.loop import advantages_of, dense_of, options_of
from trainer.models import prepare_model
from trainer.policy import Policy
from trainer.randomness import Randomness
from trainer.recording import PublishedVersion, RecordedStep
from trainer.replay_request import Again
from trainer.run_state import RunState
from trainer.step_row import metrics_row, summary_of
from trainer.tracking import Tracker, open_tracker
from trainer.update import train_step
from weight_sync.arena import Arena
from weight_sync.snapshot import take_snapshot

log = structlog.get_logger()

RUN_ID = "replay"
"""Of the checkpoint at the end: no run's own, so that a run which begins from it takes its weights and no position."""
_ON_GPU = ("a GPU adds in no fixed order: the last bits may differ from run to run",)


def train_again(again: Again, ending: threading.Event) -> Comparison:
    """Take every step of `again`, or those until `ending` is set; with `checkpoint.at_end` a checkpoint is saved then.

    Raises ReplayError if the first weights are not those of the run, TrainerError, JournalError.
    """
    settings = again.settings
    prepared = prepare_model(settings)
    randomness = Randomness()
    policy = FsdpPolicy(
        prepared.model_dir,
        settings.trainer,
        dtype=prepared.dtype,
        trust_remote_code=settings.model.trust_remote_code,
        exports_adapters=settings.weight_sync.lora == "adapter",
        seed=settings.seed,
    )
    parts: dict[str, Part] = {"policy": policy, "random": randomness}
    randomness.seed(settings.seed)
    if again.checkpoint is not None:
        load(again.checkpoint, parts)
        log.info("begins from a checkpoint", path=str(again.checkpoint.path))
    tracker = open_tracker(
        settings.tracking, run_dir=settings.run_dir, name=settings.name, incarnation=RUN_ID, config=dump(settings)
    )
    retraining = _Retraining(again, policy, tracker, parts, dtype=prepared.dtype)
    try:
        retraining.check_first_weights()
        for step in again.steps:
            if ending.is_set():
                break
            retraining.take(step)
        if settings.checkpoint.at_end:
            retraining.save()
    finally:
        tracker.close()
    return retraining.comparison


class _Retraining:
    """The steps so far and what they are compared with."""

    def __init__(
        self, again: Again, policy: Policy, tracker: Tracker, parts: Mapping[str, Part], *, dtype: torch.dtype
    ) -> None:
        self.comparison = Comparison(reasons=again.reasons + (_ON_GPU if torch.cuda.is_available() else ()))
        self._again = again
        self._policy = policy
        self._tracker = tracker
        self._parts = parts
        self._dtype = dtype
        self._arena = Arena()
        self._step = again.origin
        self._policy_version = again.steps[0].policy_version

    def check_first_weights(self) -> None:
        """Compare with what the run published at that step, if it did."""
        published = self._again.published.get(self._again.origin)
        if published is None:
            return
        digest = self._compare_version(published)
        if digest != published.digest and self._again.same_digest:
            raise ReplayError(
                f"model.source={self._again.settings.model.source}: the weights before step {self._step + 1} have digest "
                f"{digest}, expected {published.digest} of the run's policy version {published.policy_version}: another model"
            )

    def take(self, recorded: RecordedStep) -> None:
        started = time.monotonic()
        settings = _in_force(self._again.settings, recorded.options, self._again.overridden)
        samples = [self._again.kept.sample(sample_id) for sample_id in recorded.samples]
        advantages = advantages_of(samples, settings.trainer)
        report = train_step(
            self._policy,
            samples,
            advantages,
            options_of(settings.trainer),
            weights=weights_of(_weighting(recorded.weighting, self._again.overridden), samples),
            dense=dense_of(samples, settings.trainer),
        )
        self._step = recorded.step
        self.comparison.steps.append(StepPair(recorded=recorded, loss=report.loss, grad_norm=report.grad_norm))
        summary = summary_of(
            samples,
            report,
            step=recorded.step,
            policy_version=recorded.policy_version,
            seconds=time.monotonic() - started,
            now=time.time(),
        )
        row = {"recorded_loss": recorded.loss, "recorded_grad_norm": recorded.grad_norm}
        self._tracker.write("train", recorded.step, {**metrics_row(samples, summary, report), **row})
        log.info(
            "step trained again",
            step=recorded.step,
            loss=round(report.loss, 5),
            recorded_loss=round(recorded.loss, 5),
            grad_norm=round(report.grad_norm, 3),
            identical=self.comparison.steps[-1].is_identical,
        )
        published = self._again.published.get(recorded.step)
        if published is not None:
            self._compare_version(published)

    def save(self) -> None:
        settings = self._again.settings
        state = RunState(
            run_id=RUN_ID,
            incarnation=RUN_ID,
            step=self._step,
            policy_version=self._policy_version,
            position=BusPosition(),
            counts=Counts(),
        )
        path = save_checkpoint(settings.run_dir / DIRECTORY, self._parts, state=state, keep=settings.checkpoint.keep)
        log.info("checkpoint saved", step=self._step, path=str(path))

    def _compare_version(self, published: PublishedVersion) -> str:
        self._policy_version = published.policy_version
        snapshot = take_snapshot(
            self._arena, self._policy.export_weights(), policy_version=published.policy_version, dtype=self._dtype
        )
        digest = snapshot.manifest.digest
        self.comparison.versions.append(VersionPair(step=self._step, recorded=published, digest=digest))
        return digest


def _weighting(recorded: Weighting | None, overridden: Mapping[str, Any]) -> Weighting | None:
    """Which tokens are too old is as recorded; how much they count may be another number."""
    if recorded is None or "stale_weight_base" not in overridden:
        return recorded
    return replace(recorded, base=float(overridden["stale_weight_base"]))


def _in_force(settings: Settings, recorded: Mapping[str, Any], overridden: Mapping[str, Any]) -> Settings:
    return validate({**dump(settings), **recorded, **overridden})
