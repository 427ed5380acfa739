"""What happened to one rollout, from both journals, in the order of time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sample_bus.issued import Issued, Rollout
from sample_bus.journal import (
    LATE_RESULT,
    AttemptFailed,
    GroupAdmitted,
    Id,
    Queued,
    RecordsDropped,
    RecordsGone,
    RetryAsked,
    RollouterBegan,
    RollouterRecord,
    SampleOffered,
    Saved,
    SeatClosed,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerRecord,
    VersionPublished,
)
from sample_bus.position import BusPosition
from sample_bus.sample import SampleId
from sample_bus.settlements import SETTLED, Fate, Outcome, Settlements, id_of, in_words, name_of


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    """Unix seconds."""
    who: str
    text: str


def matching(wanted: str, issued: Issued, settlements: Settlements) -> list[Rollout]:
    """The rollouts that `wanted` names, in order of admission: one by its id (`GROUP/SEAT`) or by a record of it
    (`PRODUCER/EPOCH/SEQ`), else those of a group, else those whose id begins so."""
    group_id, _, seat = wanted.rpartition("/")
    if seat.isdecimal() and issued.knows((group_id, int(seat))):
        return [(group_id, int(seat))]
    by_record = _of_record(wanted, issued, settlements)
    if by_record is not None:
        return [by_record]
    if wanted in issued.sizes:
        return [(wanted, number) for number in range(issued.sizes[wanted])]
    return [
        (name, number)
        for name, size in issued.sizes.items()
        if name.startswith(wanted) or wanted.startswith(name)
        for number in range(size)
        if f"{name}/{number}".startswith(wanted)
    ]


@dataclass(slots=True)
class Story:
    """Fold of both journals for one rollout."""

    rollout: Rollout
    ids: frozenset[SampleId]
    """Its records."""
    events: list[Event] = field(default_factory=list)
    _standing: dict[SampleId, Outcome] = field(default_factory=dict)
    _step: int = 0
    """That trained it, and of which no version was published yet."""
    _is_covered: bool = False
    _is_handed: bool = False

    def tell(self, rollouter: Iterable[RollouterRecord], trainer: Iterable[TrainerRecord]) -> list[Event]:
        """Everything that the journals say of it, oldest first."""
        for record in rollouter:
            self.events += self._by_rollouter(record)
        for one in trainer:
            self.events += self._by_trainer(one)
        return sorted(self.events, key=lambda event: event.at)

    # ── the rollouter ────────────────────────────────────────────────────────────────────────────────────────────────

    def _by_rollouter(self, record: RollouterRecord) -> Iterator[Event]:
        text = ""
        match record:
            case GroupAdmitted(group_id=group_id) if group_id == self.rollout[0]:
                text = (
                    f"admitted: task {record.task_id}, issue {record.issue}, seat {self.rollout[1]} of {record.group_size}, "
                    f"policy version {record.policy_version}, settings revision {record.settings_revision}"
                ) + (f", in the place of {record.replaces}, which was too old" if record.replaces else "")
            case GroupAdmitted(replaces=group_id) if group_id == self.rollout[0]:
                text = f"its task was issued again as group {record.group_id}"
            case AttemptFailed() if (record.group_id, record.seat) == self.rollout:
                what = (
                    "brought a late result, which was refused" if record.reason == LATE_RESULT else f"failed: {record.reason}"
                )
                message = f" ({record.message})" if record.message else ""
                text = f"attempt {record.attempt} {what}{message}" + (
                    "" if record.reason == LATE_RESULT else f"; {record.then}"
                )
            case SampleOffered() if (record.group_id, record.seat) == self.rollout:
                text = (
                    f"attempt {record.attempt} offered as record {_name(record.id)}: {record.num_tokens} tokens, "
                    f"reward {record.reward:g}, oldest version {record.oldest_version}"
                )
            case SeatClosed() if (record.group_id, record.seat) == self.rollout:
                text = f"given up at attempt {record.attempt}: {record.reason}; seat closed by record {_name(record.id)}"
            case RollouterBegan() if self.events and not self._is_handed:
                text = f"the rollouter began again (process {record.process}, stream {record.epoch})"
            case _:
                pass
        self._is_handed |= isinstance(record, SampleOffered | SeatClosed) and bool(text)
        if text:
            yield Event(record.at, "rollouter", text)

    # ── the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _by_trainer(self, record: TrainerRecord) -> Iterator[Event]:
        match record:
            case Queued() if id_of(record.id) in self.ids:
                what = f"closed seat ({record.closed})" if record.closed else "sample"
                self._standing.setdefault(id_of(record.id), Outcome(Fate.QUEUED))
                yield Event(record.received_at or record.at, "trainer", f"received record {_name(record.id)}, a {what}")
            case StepBegan():
                for sample_id in self._mine(record.samples, record.closures):
                    self._standing[sample_id] = Outcome(Fate.TAKEN, record.step)
                    text = f"record {name_of(sample_id)} taken by step {record.step}, newest version {record.policy_version}"
                    yield Event(record.at, "trainer", text)
            case StepTrained():
                yield from self._trained(record)
            case RecordsDropped():
                for sample_id in self._mine(record.samples, record.closures):
                    self._standing[sample_id] = Outcome(Fate.DROPPED, reason=record.reason)
                    yield Event(record.at, "trainer", f"record {name_of(sample_id)} dropped: {record.reason}")
            case RecordsGone():
                for sample_id in self.ids:
                    is_gone = sample_id[:2] == (record.producer, record.epoch) and record.first <= sample_id.seq < record.last
                    if is_gone and sample_id not in self._standing:
                        yield Event(record.at, "trainer", f"record {name_of(sample_id)} is kept by nobody any more")
            case VersionPublished() if self._step and record.step >= self._step:
                self._step = 0
                yield Event(record.at, "trainer", f"its effect is published in version {record.policy_version}")
            case Saved():
                covered = [one for one in self._standing if BusPosition.from_plain(record.position).covers(one)]
                if covered and not self._is_covered:
                    self._is_covered = True
                    yield Event(record.at, "trainer", f"covered by the checkpoint of step {record.step}")
            case RetryAsked(group_id=group_id) if group_id == self.rollout[0]:
                yield Event(record.at, "trainer", "its group is too old: the rollouter is asked to issue the task again")
            case TrainerBegan():
                yield from self._began(record)
            case _:
                pass

    def _trained(self, record: StepTrained) -> Iterator[Event]:
        for sample_id, outcome in self._standing.items():
            if outcome == Outcome(Fate.TAKEN, record.step):
                self._standing[sample_id] = Outcome(Fate.TRAINED, record.step)
                self._step = record.step
                again = ", taken again as before" if record.replayed else ""
                yield Event(record.at, "trainer", f"trained by step {record.step}{again}: loss {record.loss:.4f}")

    def _began(self, record: TrainerBegan) -> Iterator[Event]:
        position = BusPosition.from_plain(record.position)
        for sample_id, outcome in list(self._standing.items()):
            if position.covers(sample_id):
                continue
            del self._standing[sample_id]
            self._step, self._is_covered = 0, False
            void = f"that it was {in_words(outcome)} does not hold any more" if outcome.fate in SETTLED else "it comes again"
            yield Event(record.at, "trainer", f"began again at step {record.step}, without record {name_of(sample_id)}: {void}")

    def _mine(self, *plain: list[Id]) -> list[SampleId]:
        return [sample_id for ids in plain for sample_id in map(id_of, ids) if sample_id in self.ids]


def _of_record(wanted: str, issued: Issued, settlements: Settlements) -> Rollout | None:
    parts = wanted.rsplit("/", 2)
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    sample_id = SampleId(parts[0], int(parts[1]), int(parts[2]))
    owner = issued.owner(sample_id)
    if owner is None and sample_id in settlements.seats:
        seat = settlements.seats[sample_id]
        owner = (seat.group_id, seat.seat)
    return owner


def _failure(record: AttemptFailed) -> str:
    message = f" ({record.message})" if record.message else ""
    if record.reason == LATE_RESULT:
        return f"brought a late result, which was refused{message}"
    return f"failed: {record.reason}{message}; {record.then}"


def _name(plain: Id) -> str:
    return name_of(id_of(plain))
