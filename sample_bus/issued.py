"""What the rollouter issued and handed over, by its journal. Pure.

Invariant: a rollout is a seat of an admitted group; its record, a sample or a closed seat, names it. A rollout without a record
is in flight, over restarts of the rollouter too: it is played on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sample_bus.journal import (
    AttemptFailed,
    GroupAdmitted,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    SeatClosed,
)
from sample_bus.sample import SampleId
from sample_bus.settlements import Problems, id_of, name_of

Rollout = tuple[str, int]
"""(group_id, seat)."""


class Handed(NamedTuple):
    """A record that the rollouter put into its stream."""

    id: SampleId
    closed: str
    """Reason of a closed seat; empty for a sample."""


@dataclass(slots=True)
class Issued:
    """Fold of the rollouter's journal, one record after the other."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Seats of each admitted group."""
    handed: dict[Rollout, list[Handed]] = field(default_factory=dict)
    """Records of each rollout, in order."""
    num_retried: int = 0
    num_began: int = 0
    ended: RollouterEnded | None = None
    """How the newest process ended; None while it runs, and when it was killed."""
    problems: Problems = field(default_factory=lambda: Problems([]))
    _owners: dict[SampleId, Rollout] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[RollouterRecord]) -> Issued:
        issued = cls()
        for record in records:
            issued.add(record)
        return issued

    def add(self, record: RollouterRecord) -> None:
        match record:
            case RollouterBegan():
                self.num_began += 1
                self.ended = None
            case GroupAdmitted():
                if record.group_id in self.sizes:
                    self.problems.add(f"group {record.group_id} was admitted twice")
                self.sizes[record.group_id] = record.group_size
            case AttemptFailed():
                self.num_retried += 1
            case SampleOffered():
                self._hand((record.group_id, record.seat), Handed(id_of(record.id), ""))
            case SeatClosed():
                self._hand((record.group_id, record.seat), Handed(id_of(record.id), record.reason))
            case RollouterEnded():
                self.ended = record
                self._compare(record.counts)
            case _:
                pass

    @property
    def num_issued(self) -> int:
        return sum(self.sizes.values())

    def knows(self, rollout: Rollout) -> bool:
        group_id, seat = rollout
        return 0 <= seat < self.sizes.get(group_id, 0)

    def _hand(self, rollout: Rollout, record: Handed) -> None:
        if not self.knows(rollout):
            self.problems.add(f"record {name_of(record.id)} is of seat {rollout[1]} of {rollout[0]}, which was never admitted")
        owner = self._owners.setdefault(record.id, rollout)
        if owner != rollout:
            self.problems.add(f"record {name_of(record.id)} is of {owner[0]}/{owner[1]} and of {rollout[0]}/{rollout[1]}")
            return
        records = self.handed.setdefault(rollout, [])
        if all(record.id != known.id for known in records):  # told again from the stream after a restart
            records.append(record)

    def _compare(self, told: dict[str, Any]) -> None:
        in_flight = self.num_issued - sum(1 for rollout in self.handed if self.knows(rollout))
        for what, key, number in (("admitted", "admitted", self.num_issued), ("in flight", "in_flight", in_flight)):
            if told.get(key, 0) != number:
                self.problems.add(
                    f"the rollouter counted {told.get(key, 0)} rollouts as {what} at its end, its journal says {number}"
                )
