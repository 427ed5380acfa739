"""What the rollouter issued and handed over, by its journal. Pure.

Invariant: a rollout is a seat of an admitted group; its record, a sample or a closed seat, names it. A rollout without a record
is in flight, over restarts of the rollouter too: it is played on. So is one whose record was taken back, because the trainer's
end refused it, or because it went with a lost stream before its group was whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sample_bus.journal import (
    LATE_RESULT,
    AttemptFailed,
    GroupAdmitted,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    SeatClosed,
)
from sample_bus.messages import RolloutCounts
from sample_bus.sample import SampleId
from sample_bus.settlements import Problems, id_of, name_of

Rollout = tuple[str, int]
"""(group_id, seat)."""


_COMPARED = ("admitted", "offered", "in_flight")


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
    taken_back: set[SampleId] = field(default_factory=set)
    """Records that do not count any more: their rollouts go on."""
    num_late: int = 0
    """Results of attempts that had been given up, refused before they were offered."""
    num_began: int = 0
    epoch: int = 0
    """Of the newest stream."""
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
                self._begin(record)
            case GroupAdmitted():
                if record.group_id in self.sizes:
                    self.problems.add(f"group {record.group_id} was admitted twice")
                self.sizes[record.group_id] = record.group_size
            case AttemptFailed(reason=reason) if reason == LATE_RESULT:
                self.num_late += 1
            case AttemptFailed():  # of a rollout that has its record: the trainer's end refused it
                self._take_back((record.group_id, record.seat))
            case SampleOffered():
                self._hand((record.group_id, record.seat), Handed(id_of(record.id), ""))
            case SeatClosed():
                self._hand((record.group_id, record.seat), Handed(id_of(record.id), record.reason))
            case RollouterEnded():
                self.ended = record
                self._compare(record)
            case _:
                pass

    @property
    def num_issued(self) -> int:
        return sum(self.sizes.values())

    def knows(self, rollout: Rollout) -> bool:
        group_id, seat = rollout
        return 0 <= seat < self.sizes.get(group_id, 0)

    def owner(self, sample_id: SampleId) -> Rollout | None:
        """The rollout whose record that is, if the rollouter has noted it."""
        return self._owners.get(sample_id)

    def has_taken_back(self, sample_id: SampleId) -> bool:
        """Whether the record does not count any more. One of an older stream that was never noted went with that stream."""
        return sample_id in self.taken_back or (sample_id.epoch < self.epoch and sample_id not in self._owners)

    def counts(self) -> RolloutCounts:
        """The rollouter's side of the ledger as the journal has it: each rollout by its newest record."""
        failed: Counter[str] = Counter()
        offered = 0
        for rollout, records in self.handed.items():
            newest = records[-1]
            if newest.id in self.taken_back or not self.knows(rollout):
                continue
            if newest.closed:
                failed[newest.closed] += 1
            else:
                offered += 1
        in_flight = self.num_issued - offered - failed.total()
        return RolloutCounts(admitted=self.num_issued, offered=offered, failed=dict(failed), in_flight=in_flight)

    def _begin(self, record: RollouterBegan) -> None:
        self.num_began += 1
        self.ended = None
        if self.epoch not in (0, record.epoch):
            for group_id, size in self.sizes.items():
                seats = [(group_id, seat) for seat in range(size)]
                if not all(self._has_record(seat) for seat in seats):
                    for seat in seats:
                        self._take_back(seat)
        self.epoch = record.epoch

    def _has_record(self, rollout: Rollout) -> bool:
        records = self.handed.get(rollout, ())
        return any(record.id not in self.taken_back for record in records)

    def _take_back(self, rollout: Rollout) -> None:
        self.taken_back |= {record.id for record in self.handed.get(rollout, ())}

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

    def _compare(self, record: RollouterEnded) -> None:
        counts = self.counts()
        numbers = {"admitted": counts.admitted, "offered": counts.offered, "in_flight": counts.in_flight, **counts.failed}
        told = {**record.counts.get("failed", {}), **{key: record.counts.get(key, 0) for key in _COMPARED}}
        for what in sorted(numbers.keys() | told.keys()):
            if told.get(what, 0) != numbers.get(what, 0):
                self.problems.add(
                    f"the rollouter counted {told.get(what, 0)} rollouts as {what.replace('_', ' ')} at its end, "
                    f"its journal says {numbers.get(what, 0)} (process {self.num_began})"
                )
