"""Taking again, after a restart, what an earlier process took after the checkpoint: the same steps, the same drops. Pure.

Invariant: a record of the plan is held here until its step's records are all there, or given back when the plan is abandoned;
it is never lost and never handed out twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sample_bus.protocols import Gone, Lease
from sample_bus.sample import SampleId
from trainer.aged import Weighting
from trainer.groups import Dropped, DropReason, Group, described, make_group
from trainer.history import History, PlannedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step takes."""

    groups: tuple[Group, ...]
    replayed: bool = False
    """Taken again as an earlier process had taken it."""
    options: Mapping[str, Any] | None = None
    """Live settings under which it was taken then, by dotted key; None: those in force."""
    weighting: Weighting | None = None
    """How its tokens are weighted by age; None: all count whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """Why the rest of a plan cannot be taken."""

    steps: tuple[int, ...]
    why: str
    held: tuple[Lease, ...]
    """Records that had come for it, in order of arrival: they go the usual way."""


class Place(Enum):
    """Where a record belongs that the plan does not drop."""

    HELD = auto()
    """In a planned step."""
    FREE = auto()
    """The plan does not know it."""


class ReplayPlan:
    def __init__(self, history: History | None = None) -> None:
        self._history = history or History()
        self._steps: list[PlannedStep] = list(self._history.steps)
        self._step_of = {one: planned.step for planned in self._steps for one in planned.ids}
        self._drops = dict(self._history.drops)
        self._held: dict[SampleId, Lease] = {}

    @property
    def is_active(self) -> bool:
        """Whether steps are still to be taken again."""
        return bool(self._steps)

    @property
    def num_steps(self) -> int:
        """Steps that are still to be taken again."""
        return len(self._steps)

    def take(self, lease: Lease) -> Place | Dropped:
        """A record came."""
        reason = self._drops.pop(lease.id, None)
        if reason is not None:
            return Dropped(reason=reason, records=(lease,))
        if lease.id not in self._step_of:
            return Place.FREE
        self._held[lease.id] = lease
        return Place.HELD

    def next_batch(self) -> Batch | None:
        """The next planned step, once all its records are there."""
        if not self._steps or any(one not in self._held for one in self._steps[0].ids):
            return None
        planned = self._steps.pop(0)
        records: dict[str, list[Lease]] = {}
        for one in planned.ids:
            del self._step_of[one]
            lease = self._held.pop(one)
            records.setdefault(described(lease).group_id, []).append(lease)
        groups = tuple(make_group(group_id, leases) for group_id, leases in records.items())
        return Batch(groups=groups, replayed=True, options=planned.options, weighting=planned.weighting)

    def lose(self, gone: Gone) -> Abandoned | None:
        """Records will never come: a planned step that needs one of them cannot be taken, nor those after it."""
        missing = [one for one in (*self._step_of, *self._drops) if _is_gone(one, gone) and one not in self._held]
        for one in missing:
            self._drops.pop(one, None)
        return self._abandon(missing, "its records were lost with an earlier trainer: committed, and no checkpoint holds them")

    def lose_epochs_but(self, producer: str, epoch: int) -> Abandoned | None:
        """The producer has lost its stream and began another one."""
        missing = [
            one
            for one in (*self._step_of, *self._drops)
            if one.producer == producer and one.epoch != epoch and one not in self._held
        ]
        for one in missing:
            self._drops.pop(one, None)
        return self._abandon(missing, f"producer {producer} came with another stream, epoch {epoch}")

    def give_up(self) -> tuple[Lease, ...]:
        """Whatever is held; nothing is planned any more."""
        held = tuple(self._held.values())
        self._steps, self._step_of, self._held = [], {}, {}
        return held

    def is_refused(self, one: SampleId) -> bool:
        """Whether an earlier process refused the record as a duplicate: it says nothing about its group."""
        return self._history.drops.get(one) is DropReason.DUPLICATE_SEAT

    def awaits(self) -> str:
        """What the next planned step still lacks, in words."""
        if not self._steps:
            return "nothing"
        planned = self._steps[0]
        missing = [one for one in planned.ids if one not in self._held]
        text = f"step {planned.step} is taken again: {len(planned.ids) - len(missing)} of {len(planned.ids)} records are there"
        return text + (f", first missing {'/'.join(map(str, missing[0]))}" if missing else "")

    def _abandon(self, missing: list[SampleId], why: str) -> Abandoned | None:
        """Give the whole plan up if a step lacks one of `missing`: what came after it was decided on other weights."""
        if not any(one in self._step_of for one in missing):
            return None
        first = min(self._step_of[one] for one in missing if one in self._step_of)
        kept = [planned for planned in self._steps if planned.step < first]
        abandoned = [planned for planned in self._steps if planned.step >= first]
        held = tuple(lease for one, lease in self._held.items() if self._step_of[one] >= first)
        for planned in abandoned:
            for one in planned.ids:
                del self._step_of[one]
                self._held.pop(one, None)
        self._steps = kept
        self._drops.clear()
        return Abandoned(steps=tuple(planned.step for planned in abandoned), why=why, held=held)


def _is_gone(one: SampleId, gone: Gone) -> bool:
    return one.producer == gone.producer and one.epoch == gone.epoch and gone.first <= one.seq < gone.last
