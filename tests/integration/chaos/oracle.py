"""Whether a finished run lost or doubled anything, found out from its checkpoint and what its producer would have made.

It does not use the product's own books: those are held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from sample_bus.journal import (
    ROLLOUTER_FILE,
    TRAINER_FILE,
    GroupAdmitted,
    Queued,
    RecordsDropped,
    RecordsGone,
    RollouterBegan,
    SampleOffered,
    SeatClosed,
    StepBegan,
    StepTrained,
    TrainerBegan,
    read_journal,
)
from sample_bus.sample import SampleId
from tests.integration.chaos import rollouts
from tests.integration.chaos.rollouts import GROUP_SIZE
from tests.integration.chaos.weights import Weights
from trainer.checkpoint import DIRECTORY, find, verify

Seat = tuple[int, int]
"""(issue, seat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run."""

    num_admitted: int
    num_trained: int
    num_closed: int
    num_dropped: int
    num_steps: int
    num_replayed: int
    num_trainers: int
    num_producers: int
    problems: tuple[str, ...]

    def line(self) -> str:
        return (
            f"{self.num_admitted} admitted = {self.num_trained} trained + {self.num_closed} closed + {self.num_dropped} "
            f"dropped; {self.num_steps} steps, {self.num_replayed} taken again; {self.num_trainers} trainers, "
            f"{self.num_producers} producers"
        )


def outcome_of(run_dir: Path) -> Outcome:
    (journals,) = (run_dir / "journal").iterdir()
    problems: list[str] = []
    weights = _checkpoint(run_dir)
    produced = list(read_journal(journals / ROLLOUTER_FILE))
    consumed = list(read_journal(journals / TRAINER_FILE))

    issues = [record.issue for record in produced if isinstance(record, GroupAdmitted)]
    if issues != list(range(len(issues))):
        problems.append("issues were admitted out of order or twice")
    seats = {(issue, seat) for issue in issues for seat in range(GROUP_SIZE)}
    closed = {(rollouts.issue_of(one.group_id), one.seat) for one in produced if isinstance(one, SeatClosed)}
    offered = {(rollouts.issue_of(one.group_id), one.seat) for one in produced if isinstance(one, SampleOffered)}

    times = Counter((one.issue, one.seat) for one in weights.trained)
    problems += [f"seat {seat} was trained {number} times" for seat, number in times.items() if number > 1]
    problems += [f"seat {seat} was trained and never admitted" for seat in times.keys() - seats]
    if weights.digest != Weights.made_anew(weights.trained).digest:
        problems.append("the weights are not what the trained samples make")

    seat_of = {SampleId(*one.id): (rollouts.issue_of(one.group_id), one.seat) for one in consumed if isinstance(one, Queued)}
    dropped_ids = [SampleId(*one) for record in consumed if isinstance(record, RecordsDropped) for one in record.samples]
    dropped = {seat_of[one] for one in dropped_ids} - times.keys() - closed
    lost = seats - times.keys() - closed - dropped
    problems += [f"seat {seat} was lost" for seat in sorted(lost)]
    problems += [f"seat {seat} has neither sample nor closed seat" for seat in sorted(seats - offered - closed)]
    problems += _torn_groups(times.keys(), closed, len(issues))

    problems += [f"records are gone: {record}" for record in consumed if isinstance(record, RecordsGone)]
    problems += _different_batches([record for record in consumed if isinstance(record, StepBegan)])
    losses = [record for record in consumed if isinstance(record, StepTrained)]
    problems += _different_losses(losses)
    return Outcome(
        num_admitted=len(seats),
        num_trained=len(times),
        num_closed=len(closed),
        num_dropped=len(dropped),
        num_steps=max((record.step for record in losses), default=0),
        num_replayed=sum(record.replayed for record in losses),
        num_trainers=sum(isinstance(record, TrainerBegan) for record in consumed),
        num_producers=sum(isinstance(record, RollouterBegan) for record in produced),
        problems=tuple(problems),
    )


def _checkpoint(run_dir: Path) -> Weights:
    """Of the newest checkpoint."""
    newest = find(run_dir / DIRECTORY).complete[-1]
    verify(newest)
    weights = Weights()
    weights.load(newest / "weights")
    return weights


def _torn_groups(trained: Set[Seat], closed: set[Seat], num_groups: int) -> list[str]:
    """A group is trained with all its survivors or not at all."""
    problems = []
    for issue in range(num_groups):
        seats = {(issue, seat) for seat in range(GROUP_SIZE)}
        there = seats & trained
        if there and there != seats - closed:
            problems.append(f"group {issue}: trained {sorted(there)}, closed {sorted(seats & closed)}")
    return problems


def _different_batches(steps: list[StepBegan]) -> list[str]:
    first: dict[int, StepBegan] = {}
    problems = []
    for step in steps:
        known = first.setdefault(step.step, step)
        if (known.samples, known.closures) != (step.samples, step.closures):
            problems.append(f"step {step.step} was taken again with other records")
    return problems


def _different_losses(steps: list[StepTrained]) -> list[str]:
    first: dict[int, float] = {}
    return [f"step {step.step} came out otherwise" for step in steps if first.setdefault(step.step, step.loss) != step.loss]
