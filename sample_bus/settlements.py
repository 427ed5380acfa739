"""What became of every record, by the trainer's journal. Pure.

Invariant: a fate holds in the line of steps that stands. When a trainer's process takes the run up at a checkpoint, what the
checkpoint's position does not cover has no fate any more: its effect is not in the weights, and its producer sends it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sample_bus.journal import (
    Id,
    Queued,
    RecordsDropped,
    RecordsGone,
    Saved,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    TrainerRecord,
    VersionPublished,
)
from sample_bus.position import BusPosition
from sample_bus.sample import SampleId

LOST_WITH_TRAINER = "lost with a trainer"
PRODUCER_LOST = "producer lost"
"""What is counted under: settled by a process whose effect no checkpoint holds, and kept by nobody any more."""
MAX_PROBLEMS = 50
"""Kept in words; the rest is counted."""


class Fate(StrEnum):
    QUEUED = "queued"
    TAKEN = "in a step"
    TRAINED = "trained"
    """Of a closed seat: settled with the step that trained its group."""
    DROPPED = "dropped"
    GONE = "gone"
    """Its producer has it no more, and it was not settled."""


SETTLED = frozenset({Fate.TRAINED, Fate.DROPPED})


class Outcome(NamedTuple):
    fate: Fate
    step: int = 0
    """Of TAKEN and TRAINED."""
    reason: str = ""
    """Of DROPPED."""


class Seat(NamedTuple):
    """Of which rollout a record is."""

    group_id: str
    seat: int
    attempt: int
    closed: str
    """Reason of a closed seat; empty for a sample."""


@dataclass(slots=True)
class Problems:
    """Contradictions in words, at most MAX_PROBLEMS of them."""

    texts: list[str]
    num: int = 0

    def add(self, text: str) -> None:
        self.num += 1
        if len(self.texts) < MAX_PROBLEMS:
            self.texts.append(text)


_QUEUED = Outcome(Fate.QUEUED)


class Settlements:
    """Fold of the trainer's journal, one record after the other."""

    def __init__(self, records: Iterable[TrainerRecord] = ()) -> None:
        self.seats: dict[SampleId, Seat] = {}
        """Every record that was ever received."""
        self.outcomes: dict[SampleId, Outcome] = {}
        """Fates that stand."""
        self.position = BusPosition()
        """Newest that a checkpoint of the standing line covers."""
        self.num_began = 0
        """Processes that took the run up."""
        self.num_rolled_back = 0
        """Samples whose training was lost with a process, repeated ones counted again."""
        self.step = 0
        """Newest trained step that stands."""
        self.policy_version = 0
        """Newest published version."""
        self.ended: TrainerEnded | None = None
        """How the newest process ended; None while it runs, and when it was killed."""
        self.problems = Problems([])
        self._gone: list[RecordsGone] = []
        self._began: dict[int, StepBegan] = {}
        """What each step took, by its number; of steps that may be replayed too."""
        for record in records:
            self.add(record)

    def add(self, record: TrainerRecord) -> None:
        match record:
            case TrainerBegan():
                self._begin(record)
            case Queued():
                self._queue(record)
            case StepBegan():
                self._take(record)
            case StepTrained():
                self._train(record)
            case RecordsDropped():
                self._drop(record)
            case RecordsGone():
                self._gone.append(record)
            case VersionPublished():
                self.policy_version = record.policy_version
            case Saved():
                self.position = BusPosition.from_plain(record.position)
            case TrainerEnded():
                self._end(record)

    def outcome(self, sample_id: SampleId) -> Outcome | None:
        """What became of the record; None when no trainer of the standing line has seen it."""
        known = self.outcomes.get(sample_id)
        if known is not None:
            return known
        for gone in self._gone:
            if (gone.producer, gone.epoch) == sample_id[:2] and gone.first <= sample_id.seq < gone.last:
                return Outcome(Fate.GONE, reason=gone.reason)
        return None

    def samples(self, fate: Fate) -> Iterator[tuple[SampleId, Outcome]]:
        """Samples (no closed seats) of that fate."""
        for sample_id, outcome in self.outcomes.items():
            if outcome.fate is fate and not self.seats[sample_id].closed:
                yield sample_id, outcome

    # ── the records ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, record: TrainerBegan) -> None:
        self.num_began += 1
        self.ended = None
        self.step, self.policy_version = record.step, record.policy_version
        self.position = BusPosition.from_plain(record.position)
        covered = _Cover(self.position)
        standing: dict[SampleId, Outcome] = {}
        for sample_id, outcome in self.outcomes.items():
            if outcome.fate is Fate.TAKEN and covered(sample_id):  # the process died between saving and noting the step
                outcome = Outcome(Fate.TRAINED, outcome.step)
            is_in_weights = outcome.fate is Fate.TRAINED and outcome.step <= record.step
            if covered(sample_id):
                standing[sample_id] = outcome
                if outcome.fate is Fate.TRAINED and not is_in_weights:
                    self.problems.add(
                        f"{self._of(sample_id)} was {in_words(outcome)}; the checkpoint of step {record.step} covers it "
                        "and does not hold its effect"
                    )
            elif is_in_weights:
                self.problems.add(
                    f"{self._of(sample_id)} was {in_words(outcome)}; the checkpoint of step {record.step} holds its effect "
                    "and does not cover it"
                )
            elif outcome.fate is Fate.TRAINED and not self.seats[sample_id].closed:
                self.num_rolled_back += 1
        self.outcomes = standing
        self._compare("trained", record.counts, sum(1 for _ in self.samples(Fate.TRAINED)), "the checkpoint it began from")

    def _queue(self, record: Queued) -> None:
        sample_id = id_of(record.id)
        seat = Seat(record.group_id, record.seat, record.attempt, record.closed)
        known = self.seats.setdefault(sample_id, seat)
        if known != seat:
            self.problems.add(
                f"record {name_of(sample_id)} was seat {known.seat} of {known.group_id} and came again as seat {seat.seat} of "
                f"{seat.group_id}"
            )
        self.outcomes.setdefault(sample_id, _QUEUED)

    def _take(self, record: StepBegan) -> None:
        known = self._began.get(record.step)
        if known is None or (known.samples, known.closures) != (record.samples, record.closures):
            for step in [step for step in self._began if step > record.step]:
                del self._began[step]
        self._began[record.step] = record
        for sample_id in _ids(record):
            if self._may_settle(sample_id, f"taken by step {record.step}"):
                self.outcomes[sample_id] = Outcome(Fate.TAKEN, record.step)

    def _train(self, record: StepTrained) -> None:
        self.step = record.step
        began = self._began.get(record.step)
        if began is None:
            self.problems.add(f"step {record.step} was trained, and nothing says on which samples")
            return
        for sample_id in _ids(began):
            if self._may_settle(sample_id, f"trained by step {record.step}"):
                self.outcomes[sample_id] = Outcome(Fate.TRAINED, record.step)

    def _drop(self, record: RecordsDropped) -> None:
        for sample_id in (id_of(one) for ids in (record.samples, record.closures) for one in ids):
            if self._may_settle(sample_id, f"dropped ({record.reason})"):
                self.outcomes[sample_id] = Outcome(Fate.DROPPED, reason=record.reason)

    def _may_settle(self, sample_id: SampleId, what: str) -> bool:
        """Whether the record was received and is not settled; a problem says if not."""
        if sample_id not in self.seats:
            self.problems.add(f"record {name_of(sample_id)} was {what}, and nobody received it")
            return False
        outcome = self.outcomes.get(sample_id)
        if outcome is not None and outcome.fate in SETTLED:
            self.problems.add(f"{self._of(sample_id)} was {what} after it had been {in_words(outcome)}")
            return False
        return True

    def _end(self, record: TrainerEnded) -> None:
        self.ended = record
        dropped = Counter(outcome.reason for _, outcome in self.samples(Fate.DROPPED))
        queued = sum(1 for fate in (Fate.QUEUED, Fate.TAKEN) for _ in self.samples(fate))
        self._compare("trained", record.counts, sum(1 for _ in self.samples(Fate.TRAINED)), "its end")
        self._compare("queued", record.counts, queued, "its end")
        told = record.counts.get("dropped", {})
        ranges = {LOST_WITH_TRAINER, *(gone.reason for gone in self._gone)}  # no id of theirs stands in the journal
        for reason in sorted((dropped.keys() | told.keys()) - ranges):
            self._compare(reason, told, dropped[reason], "its end")

    def _compare(self, what: str, told: dict[str, Any], number: int, when: str) -> None:
        if told.get(what, 0) != number:
            self.problems.add(
                f"the trainer counted {told.get(what, 0)} samples as {what} at {when}, its journal says {number} "
                f"(process {self.num_began})"
            )

    def _of(self, sample_id: SampleId) -> str:
        seat = self.seats[sample_id]
        return f"rollout {seat.group_id}/{seat.seat} (record {name_of(sample_id)})"


class _Cover:
    """`position.covers` for many ids."""

    def __init__(self, position: BusPosition) -> None:
        self._streams = {(stream.producer, stream.epoch): stream for stream in position.streams}

    def __call__(self, sample_id: SampleId) -> bool:
        stream = self._streams.get(sample_id[:2])
        return stream is not None and stream.covers(sample_id.seq)


def id_of(plain: Id) -> SampleId:
    """A journal's [producer, epoch, seq]."""
    return SampleId(*plain)


def name_of(sample_id: SampleId) -> str:
    """`producer/epoch/seq`, as `headrace ledger --sample` takes it."""
    return "/".join(str(part) for part in sample_id)


def in_words(outcome: Outcome) -> str:
    """`trained by step 3`, `dropped (stale)`, `queued`."""
    if outcome.step:
        return f"{outcome.fate} by step {outcome.step}" if outcome.fate is Fate.TRAINED else f"taken by step {outcome.step}"
    return f"{outcome.fate} ({outcome.reason})" if outcome.reason else str(outcome.fate)


def _ids(record: StepBegan) -> Iterator[SampleId]:
    for ids in (record.samples, record.closures):
        for one in ids:
            yield id_of(one)
