"""What a journal says about a run's steps: which samples each took, with which settings, and what came out. Pure.

Invariant: a `Recording` holds the steps in effect, without a gap up to the last one. A process that took the run up at an
earlier step voids what was trained beyond it; a step that was begun and not trained has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from sample_bus.journal import Record, Saved, StepBegan, StepTrained, TrainerBegan, VersionPublished
from sample_bus.sample import SampleId
from trainer.aged import Weighting
from trainer.errors import ReplayError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    step: int
    policy_version: int
    """Newest published version when it was taken."""
    samples: tuple[SampleId, ...]
    """In batch order."""
    options: Mapping[str, Any]
    """Settings that held for it, by dotted key."""
    loss: float
    grad_norm: float
    weighting: Weighting | None = None
    """How its tokens were weighted by age; None: all counted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    policy_version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    steps: tuple[RecordedStep, ...]
    """Rising by one; the first is 1 unless the run began from a checkpoint that came from elsewhere."""
    published: Mapping[int, PublishedVersion]
    """Step after which a version was published (0: before the first) to that version."""
    saved: frozenset[int]
    """Steps of which this run had a checkpoint."""

    @property
    def num_samples(self) -> int:
        return sum(len(step.samples) for step in self.steps)


def recording_of(records: Iterable[Record]) -> Recording:
    """The steps in effect of a trainer's journal, oldest record first."""
    began: dict[int, StepBegan] = {}
    trained: dict[int, StepTrained] = {}
    published: dict[int, PublishedVersion] = {}
    saved: set[int] = set()
    for record in records:
        match record:
            case TrainerBegan():
                trained = {step: one for step, one in trained.items() if step <= record.step}
                published = {step: one for step, one in published.items() if step <= record.step}
                saved = {step for step in saved if step <= record.step} | ({record.step} - {0})
            case StepBegan():
                began[record.step] = record
            case StepTrained():
                trained[record.step] = record
            case VersionPublished():
                published[record.step] = PublishedVersion(policy_version=record.policy_version, digest=record.digest)
            case Saved():
                saved.add(record.step)
            case _:
                pass
    step = max(trained, default=0)
    steps: list[RecordedStep] = []
    while step in trained and step in began:
        steps.append(_step(began[step], trained[step]))
        step -= 1
    return Recording(steps=tuple(reversed(steps)), published=published, saved=frozenset(saved))


def origin_of(recording: Recording, *, kept: Collection[SampleId], checkpoints: Set[int]) -> int:
    """The step after which a replay begins: the earliest state that can be had and after which every sample was kept.

    0 is the initial weights; other states are `checkpoints` (steps of complete ones; those that this run did not write do not
    count). Raises ReplayError saying what is missing.
    """
    if not recording.steps:
        raise ReplayError("no step was trained, there is nothing to train again")
    if not kept:
        raise ReplayError("nothing was kept of its samples; a run keeps them with bus.retain=true")
    first, last = recording.steps[0].step, recording.steps[-1].step
    missing = [(step.step, one) for step in recording.steps for one in step.samples if one not in kept]
    last_missing = max((step for step, _ in missing), default=first - 1)
    for state in sorted({0} | (checkpoints & recording.saved)):
        if max(first - 1, last_missing) <= state < last and (state > 0 or first == 1):
            return state
    if missing:
        step, sample = missing[0]
        raise ReplayError(
            f"{len(missing)} of {recording.num_samples} samples of steps {first} to {last} were not kept, the first is "
            f"{sample.producer}/{sample.epoch}/{sample.seq} of step {step}; expected all of them, or a checkpoint of step "
            f"{last_missing} or later and before {last}"
        )
    raise ReplayError(f"steps {first} to {last} are recorded; expected step 1, or a checkpoint of step {first - 1} or later")


def _step(began: StepBegan, trained: StepTrained) -> RecordedStep:
    return RecordedStep(
        step=began.step,
        policy_version=began.policy_version,
        samples=tuple(SampleId(*one) for one in began.samples),
        options=began.options,
        loss=trained.loss,
        grad_norm=trained.grad_norm,
        weighting=Weighting.from_plain(began.weighting),
    )
