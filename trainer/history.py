"""What the trainer's own journal says about everything that its checkpoint does not cover. Pure.

Invariant: a planned step names the records that the newest process took for it, none of which the position covers; what a
later process decided about a record voids what an earlier one had decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sample_bus.journal import (
    Id,
    ModelTaken,
    Queued,
    Record,
    RecordsDropped,
    RecordsGone,
    Saved,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    VersionPublished,
)
from sample_bus.messages import EndReason
from sample_bus.position import BusPosition
from sample_bus.sample import SampleId
from trainer.aged import Weighting
from trainer.groups import REMEMBERED_CLOSED_GROUPS, DropReason, GroupKey
from trainer.retries import RetriesFold, RetriesHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step that an earlier process began and that is to be taken again."""

    step: int
    samples: tuple[SampleId, ...]
    """In batch order."""
    closures: tuple[SampleId, ...]
    options: Mapping[str, Any] | None
    """Live settings that it used; None: it failed under them, those in force are to be used."""
    weighting: Weighting | None = None
    """How its tokens were weighted by age."""

    @property
    def ids(self) -> tuple[SampleId, ...]:
        return (*self.samples, *self.closures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A record that an earlier process had received and that the position does not cover."""

    key: GroupKey
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    steps: tuple[PlannedStep, ...] = ()
    """Rising by one from the checkpoint's step + 1."""
    drops: Mapping[SampleId, DropReason] = field(default_factory=dict)
    """Records beyond the position that were dropped."""
    closed_groups: Mapping[GroupKey, DropReason] = field(default_factory=dict)
    """The newest groups that the position covers, and what is said to whatever still comes for them."""
    known: Mapping[SampleId, Known] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Live settings of the newest step that was begun, by dotted key."""
    retries: RetriesHistory = field(default_factory=RetriesHistory)
    model: ModelTaken | None = None
    """With which the run was begun."""
    published: VersionPublished | None = None
    """The version of the step that it goes on from; None: that was not published here."""


def history_of(records: Iterable[Record], *, step: int, position: BusPosition) -> History:
    """Of a trainer's journal, oldest record first, for a process that goes on from `step` and `position`."""
    fold, retries = _Fold(step, position), RetriesFold()
    for record in records:
        fold.take(record)
        retries.take(record)
    return replace(fold.result(), retries=retries.result())


class _Fold:
    def __init__(self, step: int, position: BusPosition) -> None:
        self._step = step
        self._covers = {(stream.producer, stream.epoch): stream for stream in position.streams}
        self._steps: dict[int, PlannedStep] = {}
        self._step_of: dict[SampleId, int] = {}
        self._in_progress: int | None = None
        self._drops: dict[SampleId, DropReason] = {}
        self._groups: dict[SampleId, GroupKey] = {}
        """Of covered records whose settlement has not been read yet."""
        self._closed: OrderedDict[GroupKey, DropReason] = OrderedDict()
        self._known: dict[SampleId, Known] = {}
        self._options: Mapping[str, Any] = {}
        self._gone: list[RecordsGone] = []
        """Since the checkpoint."""
        self._model: ModelTaken | None = None
        self._published: VersionPublished | None = None

    def take(self, record: Record) -> None:
        match record:
            case TrainerBegan():
                self._in_progress = None
            case Queued():
                self._queued(record)
            case StepBegan():
                self._began(record)
            case StepTrained():
                self._in_progress = None
            case RecordsDropped():
                self._dropped(record)
            case RecordsGone():
                self._lost(record)
            case Saved():
                self._saved(record)
            case ModelTaken():
                self._model = record
            case VersionPublished() if record.step == self._step:
                self._published = record
            case TrainerEnded(reason=EndReason.FAILED) if self._in_progress in self._steps:
                self._steps[self._in_progress] = replace(self._steps[self._in_progress], options=None)
            case _:
                pass

    def result(self) -> History:
        steps: list[PlannedStep] = []
        while planned := self._steps.get(self._step + len(steps) + 1):
            if any(self._is_covered(one) for one in planned.ids):
                break
            steps.append(planned)
        return History(
            steps=tuple(steps),
            drops=self._drops,
            closed_groups=self._closed,
            known=self._known,
            options=self._options,
            model=self._model,
            published=self._published,
        )

    def _queued(self, record: Queued) -> None:
        one, key = SampleId(*record.id), (record.id[0], record.group_id)
        if self._is_covered(one):
            self._groups[one] = key
        else:
            self._known[one] = Known(key=key, closed=bool(record.closed))

    def _began(self, record: StepBegan) -> None:
        self._options = record.options
        samples, closures = _ids(record.samples), _ids(record.closures)
        for one in (*samples, *closures):
            self._close(one, DropReason.DUPLICATE_SEAT)
        if record.step <= self._step:
            return
        planned = PlannedStep(
            step=record.step,
            samples=samples,
            closures=closures,
            options=record.options,
            weighting=Weighting.from_plain(record.weighting),
        )
        before = self._steps.get(record.step)
        if before is None or before.ids != planned.ids:
            self._void_from(min([record.step, *(self._step_of[one] for one in planned.ids if one in self._step_of)]))
        self._steps[record.step] = planned
        for one in planned.ids:
            self._step_of[one] = record.step
            self._drops.pop(one, None)
        self._in_progress = record.step

    def _dropped(self, record: RecordsDropped) -> None:
        reason = DropReason(record.reason)
        if reason is DropReason.UNFINISHED:
            return  # that end of the run was not the last one
        for one in (*_ids(record.samples), *_ids(record.closures)):
            if self._is_covered(one):
                if reason is DropReason.DUPLICATE_SEAT:
                    self._groups.pop(one, None)  # its group may be open still
                self._close(one, reason)
            else:
                self._void_from(self._step_of.get(one))
                self._drops[one] = reason

    def _lost(self, record: RecordsGone) -> None:
        self._gone.append(record)
        self._void_from(min((step for one, step in self._step_of.items() if _is_of(one, record)), default=None))

    def _saved(self, record: Saved) -> None:
        """The checkpoint's counts hold what was lost before it; what was lost later is to be booked again."""
        if record.step == self._step:
            for one in [one for one in self._known if any(_is_of(one, gone) for gone in self._gone)]:
                del self._known[one]
            self._gone.clear()

    def _void_from(self, step: int | None) -> None:
        """Steps from `step` on will not be taken again as they were."""
        for number in [number for number in self._steps if step is not None and number >= step]:
            for one in self._steps.pop(number).ids:
                self._step_of.pop(one, None)

    def _close(self, one: SampleId, reason: DropReason) -> None:
        key = self._groups.pop(one, None)
        if key is not None:
            self._closed[key] = reason
            self._closed.move_to_end(key)
            while len(self._closed) > REMEMBERED_CLOSED_GROUPS:
                self._closed.popitem(last=False)

    def _is_covered(self, one: SampleId) -> bool:
        stream = self._covers.get((one.producer, one.epoch))
        return stream is not None and stream.covers(one.seq)


def _ids(plain: Iterable[Id]) -> tuple[SampleId, ...]:
    return tuple(SampleId(*one) for one in plain)


def _is_of(one: SampleId, gone: RecordsGone) -> bool:
    return one.producer == gone.producer and one.epoch == gone.epoch and gone.first <= one.seq < gone.last
