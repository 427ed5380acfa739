"""Group assembly: siblings meet here before they are trained. Pure: no clock, no waiting.

Invariant: a group leaves exactly once, either whole (every seat filled by one sample) or closed with a reason; a sample that
comes for a closed group or a filled seat is handed back as dropped with its reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sample_bus.protocols import Leased

_REMEMBERED_CLOSED_GROUPS = 65536


class DropReason(StrEnum):
    """Why the trainer let a sample go untrained."""

    STALE = "stale"
    GROUP_INCOMPLETE = "group incomplete"
    DUPLICATE_SEAT = "duplicate seat"
    PRODUCER_LOST = "producer lost"
    UNFINISHED = "run ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All siblings of one task, by seat."""

    group_id: str
    members: tuple[Leased, ...]

    @property
    def oldest_version(self) -> int:
        return min(leased.sample.oldest_version for leased in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Samples to settle untrained."""

    reason: DropReason
    members: tuple[Leased, ...]


@dataclass(slots=True)
class _Open:
    size: int
    producer_epoch: tuple[str, int]
    seats: dict[int, Leased] = field(default_factory=dict)


class GroupAssembler:
    """Collects samples by group."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._closed: OrderedDict[str, DropReason] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for siblings."""
        return sum(len(group.seats) for group in self._open.values())

    def oldest_open(self) -> tuple[str, tuple[int, ...]] | None:
        """The group open longest and the seats that it still waits for."""
        for group_id, group in self._open.items():
            return group_id, tuple(seat for seat in range(group.size) if seat not in group.seats)
        return None

    def add(self, leased: Leased) -> Group | Dropped | None:
        """Seat a sample. Returns the group if it is whole now, a drop if it has no place, else None."""
        sample = leased.sample
        reason = self._closed.get(sample.group_id)
        if reason is not None:
            return Dropped(reason=reason, members=(leased,))
        group = self._open.get(sample.group_id)
        if group is None:
            group = self._open[sample.group_id] = _Open(sample.group_size, (leased.id.producer, leased.id.epoch))
        if sample.seat in group.seats or sample.seat >= group.size:
            return Dropped(reason=DropReason.DUPLICATE_SEAT, members=(leased,))
        group.seats[sample.seat] = leased
        if len(group.seats) < group.size:
            return None
        del self._open[sample.group_id]
        self._remember(sample.group_id, DropReason.DUPLICATE_SEAT)
        return Group(group_id=sample.group_id, members=tuple(group.seats[seat] for seat in range(group.size)))

    def close(self, group_id: str, reason: DropReason) -> Dropped:
        """Give a group up; members that came so far, and those that come later, are dropped for `reason`."""
        group = self._open.pop(group_id, None)
        if group_id not in self._closed:
            self._remember(group_id, reason)
        return Dropped(reason=reason, members=tuple(group.seats.values()) if group else ())

    def close_other_epochs(self, producer: str, epoch: int) -> Dropped:
        """Give up every open group of another life of `producer`."""
        return self._close_where(lambda name, life: name == producer and life != epoch, DropReason.PRODUCER_LOST)

    def close_epoch(self, producer: str, epoch: int) -> Dropped:
        """Give up every open group of this life of `producer`."""
        return self._close_where(lambda name, life: name == producer and life == epoch, DropReason.PRODUCER_LOST)

    def close_all(self, reason: DropReason) -> Dropped:
        """Give up every open group."""
        return self._close_where(lambda name, life: True, reason)

    def _close_where(self, chosen: Callable[[str, int], bool], reason: DropReason) -> Dropped:
        gone = [group_id for group_id, group in self._open.items() if chosen(*group.producer_epoch)]
        members = tuple(leased for group_id in gone for leased in self.close(group_id, reason).members)
        return Dropped(reason=reason, members=members)

    def _remember(self, group_id: str, reason: DropReason) -> None:
        self._closed[group_id] = reason
        while len(self._closed) > _REMEMBERED_CLOSED_GROUPS:
            self._closed.popitem(last=False)


def is_stale(group: Group, *, policy_version: int, incarnation: str, max_staleness: int | None) -> bool:
    """Whether any member is older than `max_staleness` versions at the moment of decision.

    Version numbers of another incarnation are not compared; such samples are trainable (their behavior logprobs are their own).
    """
    if max_staleness is None:
        return False
    return any(
        leased.sample.incarnation == incarnation and policy_version - leased.sample.oldest_version > max_staleness
        for leased in group.members
    )


def ids(members: Sequence[Leased]) -> list[str]:
    """Rollout ids, for messages."""
    return [leased.sample.rollout_id for leased in members]
