"""What each daemon writes down as it happens, in `RUN_DIR/journal/RUN_ID/{rollouter,trainer}.log`: the books of the run.

Each daemon replays its own journal when it starts again; `headrace ledger` reads both. Invariant: a record is written before
what it tells of has an effect that another process sees (an admission before its rollouts start, a step's ids before the step),
or it can be told again from what is durable (an offer from the producer's stream).

Records are msgpack arrays [kind, field, …] in a `RecordLog`. `id` is [producer, epoch, seq] of the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from sample_bus.errors import JournalError, WireError
from sample_bus.packing import pack, unpack
from sample_bus.record_log import read_records

Id = list[Any]
"""[producer, epoch, seq]."""

ROLLOUTER_FILE = "rollouter.log"
TRAINER_FILE = "trainer.log"
LATE_RESULT = "late result"
"""Reason of an `AttemptFailed` that only counts a refused result."""


def journal_dir(run_dir: Path, run_id: str) -> Path:
    return run_dir / "journal" / run_id


# ── written by the rollouter ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class RollouterBegan:
    """A rollouter's process took the run up."""

    KIND: ClassVar[int] = 1
    at: float
    """Unix seconds, here and below."""
    process: str
    epoch: int
    """Of its stream."""
    data_fingerprint: str
    """Of the tasks in load order: issue numbers mean nothing over others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted:
    """All seats of a group are about to start."""

    KIND: ClassVar[int] = 2
    at: float
    group_id: str
    task_id: str
    issue: int
    """Number of the issue over all epochs of the data."""
    group_size: int
    policy_version: int
    incarnation: str
    settings_revision: int
    temperature: float
    max_tokens: int
    replaces: str = ""
    """The group that was too old and whose task is issued again with this one; empty: a task of the data's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An attempt ended without a sample; the next one gets number `attempt` + 1.

    With reason `LATE_RESULT`: one that had failed before brought a result after all, which was refused.
    """

    KIND: ClassVar[int] = 3
    at: float
    group_id: str
    seat: int
    attempt: int
    reason: str
    message: str
    then: str = "retry"
    """What follows: `retry`, `continue` (the next attempt goes on where this one was recorded last), `refill` (the rollout is
    given up and a fresh one takes its seat) or `close` (it is given up and its seat is about to be closed)."""
    kept_tokens: int = 0
    """Sampled tokens that the next attempt goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOffered:
    """A seat's sample is durable on the bus."""

    KIND: ClassVar[int] = 4
    at: float
    group_id: str
    seat: int
    attempt: int
    id: Id
    num_tokens: int
    reward: float
    oldest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatClosed:
    """A rollout was given up; its closed seat is durable on the bus."""

    KIND: ClassVar[int] = 5
    at: float
    group_id: str
    seat: int
    attempt: int
    reason: str
    id: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuarantined:
    """A task failed so often that it is not issued again until it is released."""

    KIND: ClassVar[int] = 6
    at: float
    task_id: str
    num_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReleased:
    KIND: ClassVar[int] = 7
    at: float
    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSkipped:
    """An issue of a quarantined task was passed over."""

    KIND: ClassVar[int] = 8
    at: float
    task_id: str
    issue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RollouterEnded:
    """The process ended in good order, with its own count of the run's rollouts (`messages.RolloutCounts`)."""

    KIND: ClassVar[int] = 9
    at: float
    reason: str
    counts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offering:
    """A record is about to be handed to the bus. Records get their numbers in the order of these: so a process that comes
    again knows which were stored, though nobody noted it (`SampleOffered`, `SeatClosed`) and the trainer has committed them."""

    KIND: ClassVar[int] = 10
    at: float
    group_id: str
    seat: int
    attempt: int
    closed: str
    """Reason of a closed seat; empty for a sample, of which the rest tells."""
    num_tokens: int = 0
    reward: float = 0.0
    oldest_version: int = -1


# ── written by the trainer ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerBegan:
    """A trainer's process took the run up at `step`. What was settled before and is not in `position` comes again."""

    KIND: ClassVar[int] = 32
    at: float
    incarnation: str
    step: int
    policy_version: int
    position: list[dict[str, Any]]
    """`BusPosition.as_plain` of the checkpoint that it began from; empty afresh."""
    counts: dict[str, Any]
    """`messages.Counts` at that position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A record was received and leased by the intake."""

    KIND: ClassVar[int] = 33
    at: float
    received_at: float
    id: Id
    group_id: str
    seat: int
    attempt: int
    closed: str
    """Reason of a closed seat; empty for a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegan:
    """The next step takes these records, in this order; written before the step."""

    KIND: ClassVar[int] = 34
    at: float
    step: int
    """Number of the step, from 1."""
    policy_version: int
    """Newest published version."""
    samples: list[Id]
    """In batch order."""
    closures: list[Id]
    """Closed seats of the same groups, settled with them."""
    options: dict[str, Any]
    """Every live setting's value that the step uses, by dotted key."""
    weighting: dict[str, Any] = field(default_factory=dict)
    """How its tokens are weighted by age (`trainer.aged.Weighting`); empty: all count whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """The step's effect is in the weights."""

    KIND: ClassVar[int] = 35
    at: float
    step: int
    policy_version: int
    loss: float
    grad_norm: float
    replayed: bool
    """Taken again after a restart, from its `StepBegan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsDropped:
    """Settled untrained."""

    KIND: ClassVar[int] = 36
    at: float
    reason: str
    samples: list[Id]
    closures: list[Id]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsGone:
    """A producer has them no more and no checkpoint covers them (`protocols.Gone`)."""

    KIND: ClassVar[int] = 37
    at: float
    producer: str
    epoch: int
    first: int
    last: int
    num_records: int
    reason: str = "lost with a trainer"
    """What they are counted as dropped for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    KIND: ClassVar[int] = 38
    at: float
    policy_version: int
    step: int
    digest: str
    """Over names, shapes, dtypes and checksums of all tensors (hex)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of `step` is durable and covers `position`."""

    KIND: ClassVar[int] = 39
    at: float
    step: int
    policy_version: int
    position: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnded:
    """The process ended in good order, with its own count (`messages.Counts`)."""

    KIND: ClassVar[int] = 40
    at: float
    reason: str
    message: str
    counts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryAsked:
    """A group was too old: the rollouter is asked to issue its task again. Written before the group is dropped, once."""

    KIND: ClassVar[int] = 41
    at: float
    group_id: str
    task_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetriesTaken:
    """The rollouter has admitted other groups in the place of these, and noted it."""

    KIND: ClassVar[int] = 42
    at: float
    group_ids: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTaken:
    """The model with which the run was begun: its tokens are those of every record. Written once, before the first version."""

    KIND: ClassVar[int] = 43
    at: float
    source: str
    """`model.source`."""
    files: dict[str, Any]
    """Name to digest (configs.model_files)."""


RollouterRecord = (
    RollouterBegan
    | GroupAdmitted
    | AttemptFailed
    | SampleOffered
    | SeatClosed
    | TaskQuarantined
    | TaskReleased
    | IssueSkipped
    | RollouterEnded
    | Offering
)
TrainerRecord = (
    TrainerBegan
    | Queued
    | StepBegan
    | StepTrained
    | RecordsDropped
    | RecordsGone
    | VersionPublished
    | Saved
    | TrainerEnded
    | RetryAsked
    | RetriesTaken
    | ModelTaken
)
Record = RollouterRecord | TrainerRecord


def _types_of(annotation: Any) -> tuple[type[Any], ...]:
    """What a field's value may be when it is read."""
    declared: type[Any] = get_origin(annotation) or annotation
    return (int, float) if declared is float else (declared,)


_KINDS: dict[int, type[Record]] = {kind.KIND: kind for kind in get_args(Record)}
_FIELDS: dict[type[Record], tuple[str, ...]] = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS.values()}
_TYPES: dict[type[Record], tuple[tuple[type[Any], ...], ...]] = {
    kind: tuple(_types_of(get_type_hints(kind)[name]) for name in names) for kind, names in _FIELDS.items()
}


def encode_record(record: Record) -> bytes:
    kind = type(record)
    return pack([kind.KIND, *(getattr(record, name) for name in _FIELDS[kind])])


def decode_record(payload: bytes, where: str) -> Record:
    """Raises JournalError naming `where`."""
    try:
        values = unpack(payload, where, max_items=max(1, len(payload)))
    except WireError as error:
        raise JournalError(str(error)) from error
    kind = _KINDS.get(values[0]) if isinstance(values, list) and values and type(values[0]) is int else None
    if kind is None or len(values) != 1 + len(_FIELDS[kind]):
        raise JournalError(f"{where}: got {repr(values)[:80]}, expected a record of this version's journal")
    for name, value, types in zip(_FIELDS[kind], values[1:], _TYPES[kind], strict=True):
        if type(value) not in types:
            raise JournalError(f"{where}: {kind.__name__}.{name}: got {repr(value)[:80]}, expected {types[-1].__name__}")
    made: Any = kind
    decoded: Record = made(**dict(zip(_FIELDS[kind], values[1:], strict=True)))
    return decoded


def read_journal(path: Path) -> Iterator[Record]:
    """Every record, oldest first; nothing if there is no such file. The file may be in use. Raises JournalError."""
    if not path.exists():
        return
    for offset, payload in read_records(path):
        yield decode_record(payload, f"{path} at byte {offset}")
