"""Group assembly: siblings meet here before they are trained. Pure: no clock, no waiting.

Invariant: a group leaves exactly once, whole (each seat has brought its sample or its closed seat, and enough samples are left
to train) or given up with a reason; a record that comes for a group that has left, or for a seat that is taken, is handed back
as dropped with its reason. So a group cannot wedge: every admitted rollout brings exactly one of the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from sample_bus.closed_seat import ClosedSeat
from sample_bus.protocols import Lease, Leased, LeasedClosure
from sample_bus.sample import Sample, SampleId

REMEMBERED_CLOSED_GROUPS = 65536
"""Groups that have left, newest ones: a record that comes for one of them is known for what it is."""

GroupKey = tuple[str, str]
"""(producer, group id): each producer numbers its groups by itself."""
OnFailedSeat = Literal["train_survivors", "drop", "refill"]


class DropReason(StrEnum):
    """Why the trainer let a record go untrained."""

    STALE = "stale"
    STALE_RETRIED = "stale, retried"
    """Its task is issued again."""
    STALE_FOR_GOOD = "stale, no retry left"
    """Its task was issued again rollouter.max_requeues times."""
    GROUP_INCOMPLETE = "group incomplete"
    ZERO_SIGNAL = "zero signal"
    """Its rewards are all alike (filters.zero_signal=drop)."""
    DUPLICATE_SEAT = "duplicate seat"
    PRODUCER_LOST = "producer lost"
    UNFINISHED = "run ended"
    LOST_WITH_TRAINER = "lost with a trainer"
    """Settled by an earlier process whose effect no checkpoint holds, and kept by nobody any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The siblings of one task that are to be trained, by seat."""

    group_id: str
    members: tuple[Leased, ...]
    closures: tuple[LeasedClosure, ...] = ()
    """Seats that stayed empty; settled with the group."""

    @property
    def oldest_version(self) -> int:
        return min(leased.sample.oldest_version for leased in self.members)

    @property
    def records(self) -> tuple[Lease, ...]:
        return (*self.members, *self.closures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Records to settle untrained."""

    reason: DropReason
    records: tuple[Lease, ...]

    @property
    def samples(self) -> list[SampleId]:
        return [lease.id for lease in self.records if isinstance(lease, Leased)]

    @property
    def closures(self) -> list[SampleId]:
        return [lease.id for lease in self.records if isinstance(lease, LeasedClosure)]


@dataclass(slots=True)
class _Open:
    size: int
    producer_epoch: tuple[str, int]
    seats: dict[int, Lease] = field(default_factory=dict)


class GroupAssembler:
    """Collects records by group."""

    def __init__(
        self,
        *,
        on_failed_seat: OnFailedSeat = "train_survivors",
        min_survivors: int = 2,
        stale_reason: Callable[[str], DropReason] = lambda group_id: DropReason.STALE,
    ) -> None:
        """`refill` is the rollouter's matter: a seat that is closed nevertheless is treated as under `train_survivors`.
        `stale_reason`: under which reason a group is dropped of which a rollout was given up for its age.
        """
        self._stale_reason = stale_reason
        self._drops_on_failed_seat = on_failed_seat == "drop"
        self._min_survivors = min_survivors
        self._open: OrderedDict[GroupKey, _Open] = OrderedDict()
        self._closed: OrderedDict[GroupKey, DropReason] = OrderedDict()

    def obey(self, *, on_failed_seat: OnFailedSeat, min_survivors: int) -> None:
        """From the next record on other rules hold, for groups that are open too."""
        self._drops_on_failed_seat = on_failed_seat == "drop"
        self._min_survivors = min_survivors

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Records that wait for siblings."""
        return sum(len(group.seats) for group in self._open.values())

    def open_groups(self) -> Iterator[Iterable[Lease]]:
        """What of each open group is there."""
        return (group.seats.values() for group in self._open.values())

    def oldest_open(self) -> tuple[str, tuple[int, ...]] | None:
        """The group open longest and the seats that it still waits for."""
        for (_, group_id), group in self._open.items():
            return group_id, tuple(seat for seat in range(group.size) if seat not in group.seats)
        return None

    def remember(self, key: GroupKey, reason: DropReason) -> None:
        """A group has left already: what still comes for it is dropped for `reason`."""
        if key not in self._closed:
            self._closed[key] = reason
            while len(self._closed) > REMEMBERED_CLOSED_GROUPS:
                self._closed.popitem(last=False)

    def add(self, lease: Lease) -> Group | Dropped | None:
        """Seat a record. Returns the group if it is whole now, what is to be dropped by it, else None."""
        who = described(lease)
        key = group_key(lease)
        reason = self._closed.get(key)
        if reason is not None:
            return Dropped(reason=reason, records=(lease,))
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Open(who.group_size, (lease.id.producer, lease.id.epoch))
        if who.seat in group.seats or who.seat >= group.size:
            return Dropped(reason=DropReason.DUPLICATE_SEAT, records=(lease,))
        group.seats[who.seat] = lease
        hopeless = self._hopeless(group, who.group_id)
        if hopeless is not None:
            return self.close(key, hopeless)
        if len(group.seats) < group.size:
            return None
        del self._open[key]
        self.remember(key, DropReason.DUPLICATE_SEAT)
        return make_group(who.group_id, (group.seats[seat] for seat in range(group.size)))

    def close(self, key: GroupKey, reason: DropReason) -> Dropped:
        """Give a group up; records that came so far, and those that come later, are dropped for `reason`."""
        group = self._open.pop(key, None)
        self.remember(key, reason)
        return Dropped(reason=reason, records=tuple(group.seats.values()) if group else ())

    def close_other_epochs(self, producer: str, epoch: int) -> Dropped:
        """Give up every open group of another epoch of `producer`: it has lost its stream, their seats will stay open."""
        return self._close_where(lambda name, life: name == producer and life != epoch, DropReason.PRODUCER_LOST)

    def close_all(self, reason: DropReason) -> Dropped:
        """Give up every open group."""
        return self._close_where(lambda name, life: True, reason)

    def _hopeless(self, group: _Open, group_id: str) -> DropReason | None:
        """Why the group can never be trained any more, whatever its open seats bring."""
        reasons = [lease.closed.reason for lease in group.seats.values() if isinstance(lease, LeasedClosure)]
        if not reasons:
            return None
        if DropReason.STALE in reasons:
            return self._stale_reason(group_id)
        if self._drops_on_failed_seat or group.size - len(reasons) < self._min_survivors:
            return DropReason.GROUP_INCOMPLETE
        return None

    def _close_where(self, chosen: Callable[[str, int], bool], reason: DropReason) -> Dropped:
        gone = [key for key, group in self._open.items() if chosen(*group.producer_epoch)]
        records = tuple(lease for key in gone for lease in self.close(key, reason).records)
        return Dropped(reason=reason, records=records)


def described(lease: Lease) -> Sample | ClosedSeat:
    """What says of which group, seat and attempt the record is."""
    return lease.sample if isinstance(lease, Leased) else lease.closed


def group_key(lease: Lease) -> GroupKey:
    return lease.id.producer, described(lease).group_id


def make_group(group_id: str, records: Iterable[Lease]) -> Group:
    """A group of these records, in their order."""
    leases = tuple(records)
    return Group(
        group_id=group_id,
        members=tuple(lease for lease in leases if isinstance(lease, Leased)),
        closures=tuple(lease for lease in leases if isinstance(lease, LeasedClosure)),
    )
