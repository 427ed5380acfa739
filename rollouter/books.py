"""The books of a run's rollouts: where every seat stands. A fold of the rollouter's own journal; pure.

Invariant: the books are a function of the journal's records alone, so a process that replays them stands where the one before
it stood: which issue comes next, which seats are open and how often each was tried, which tasks failed how often.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouter.failures import TASK_FAULT, FailureReason
from rollouter.outcomes import Outcomes
from rollouter.seat_policy import Move
from sample_bus.journal import (
    LATE_RESULT,
    AttemptFailed,
    GroupAdmitted,
    IssueSkipped,
    Offering,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    SeatClosed,
    TaskQuarantined,
    TaskReleased,
)
from sample_bus.messages import RolloutCounts
from sample_bus.position import Settled
from sample_bus.sample import SampleId

MAX_RECENT_GROUPS = 4096
"""Groups all of whose seats have their record, kept for a record that the trainer's end refuses."""
MAX_KEPT_WORDS = 8
"""Failures of one task whose words are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """A rollout was given up; its closed seat is not in the stream yet."""

    attempt: int
    reason: FailureReason
    message: str


@dataclass(slots=True, kw_only=True)
class SeatBook:
    attempt: int = 0
    """Number of the attempt that runs or comes next."""
    first_attempt: int = 0
    """The first of those that continue each other up to `attempt`."""
    kept_tokens: int = 0
    """Sampled tokens that `attempt` goes on from."""
    num_failed: int = 0
    """Attempts of the rollout in the seat that failed by themselves."""
    num_interrupted: int = 0
    """Attempts in the seat that a death of this process cut off, since one last got further than the one before."""
    num_refills: int = 0
    """Rollouts in the seat that were given up for a fresh one."""
    closing: Closing | None = None
    id: SampleId | None = None
    """Its record; None while it is open."""
    closed: str = ""
    """Reason of its closed seat; empty for a sample, or while it is open."""

    @property
    def is_open(self) -> bool:
        return self.id is None

    @property
    def is_closed(self) -> bool:
        """It brings no sample."""
        return bool(self.closed) or self.closing is not None


@dataclass(slots=True, kw_only=True)
class GroupBook:
    admitted: GroupAdmitted
    seats: list[SeatBook]
    spent_s: float = 0.0
    """How long processes before this one had it open; the time between them does not count."""
    since: float
    """Unix seconds from which this process has it open, or from which its deadline counts anew."""

    @property
    def num_closed(self) -> int:
        """Seats that bring no sample."""
        return sum(seat.is_closed for seat in self.seats)

    @property
    def is_open(self) -> bool:
        return any(seat.is_open for seat in self.seats)

    def open_for_s(self, now: float) -> float:
        """Seconds that count towards its deadline."""
        return self.spent_s + max(0.0, now - self.since)


@dataclass(slots=True)
class TaskFailures:
    """Rollouts of a task that were given up by its own fault, since it was last released."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def add(self, reason: str, message: str) -> None:
        self.count += 1
        if len(self.reasons) < MAX_KEPT_WORDS:
            self.reasons.append(reason)
            self.messages.append(message)


@dataclass(slots=True)
class Books:
    """Where everything stands; changed by `apply` alone."""

    replaced: set[str] = field(default_factory=set)
    """Groups that were too old and in whose place another one was admitted."""
    open_groups: dict[str, GroupBook] = field(default_factory=dict)
    """Groups of which some seat has no record, in order of admission."""
    next_issue: int = 0
    failures: dict[str, TaskFailures] = field(default_factory=dict)
    """By task."""
    quarantined: set[str] = field(default_factory=set)
    producer: str = "rollouter"
    epoch: int = 0
    """Of the stream; 0 before the first process."""
    fingerprint: str = ""
    """Of the data over which issues are numbered."""
    num_processes: int = 0
    was_cut_off: bool = False
    """The newest process has said nothing of its end."""
    outcomes: Outcomes = field(default_factory=Outcomes)
    """How often tasks were passed."""
    _recent: OrderedDict[str, GroupBook] = field(default_factory=OrderedDict)
    _places: dict[SampleId, tuple[str, int]] = field(default_factory=dict)
    _recorded: Settled = field(default_factory=Settled)
    """Sequence numbers of this epoch that stand in the journal."""
    _offerings: dict[tuple[str, int], tuple[Offering, int | None]] = field(default_factory=dict)
    """Records handed to the bus, by place, in that order, with their numbers as far as they are known; from the first on whose
    number is not."""
    _offerings_from: int = 0
    """Number of the first of them, if it is in the stream."""
    _admitted: int = 0
    _offered: int = 0
    _failed: Counter[str] = field(default_factory=Counter)
    _retried: int = 0
    _late: int = 0
    _at: float = 0.0

    def apply(self, record: RollouterRecord) -> None:
        """Take one record in, in the order of the journal. One of a group that is not known changes no group."""
        match record:
            case RollouterBegan():
                self._began(record)
            case GroupAdmitted():
                seats = [SeatBook() for _ in range(record.group_size)]
                self.open_groups[record.group_id] = GroupBook(admitted=record, seats=seats, since=record.at)
                self.next_issue = max(self.next_issue, record.issue + 1)
                if record.replaces:
                    self.replaced.add(record.replaces)
                self._admitted += record.group_size
                self.outcomes.admit(record)
            case AttemptFailed():
                self._attempt_failed(record)
            case SampleOffered():
                self.outcomes.offer(record)
                self._recorded_in(record.group_id, record.seat, record.id, attempt=record.attempt, closed="")
            case SeatClosed():
                self._recorded_in(record.group_id, record.seat, record.id, attempt=record.attempt, closed=record.reason)
            case TaskQuarantined():
                self.quarantined.add(record.task_id)
            case TaskReleased():
                self.quarantined.discard(record.task_id)
                self.failures.pop(record.task_id, None)
            case IssueSkipped():
                self.next_issue = max(self.next_issue, record.issue + 1)
            case Offering():
                self._offering(record)
            case RollouterEnded():
                self.was_cut_off = False
        self._at = max(self._at, record.at)

    # ── what they say ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Rollouts admitted whose record is not in the stream."""
        return self._admitted - self._offered - self._failed.total()

    def counts(self) -> RolloutCounts:
        """The rollouter's side of the ledger, since the run began."""
        return RolloutCounts(
            admitted=self._admitted,
            offered=self._offered,
            failed={reason: count for reason, count in sorted(self._failed.items()) if count},
            retried=self._retried,
            in_flight=self.in_flight,
            quarantined_tasks=len(self.quarantined),
            late_results=self._late,
        )

    def group(self, group_id: str) -> GroupBook | None:
        """An open group, or one that was whole a short while ago."""
        return self.open_groups.get(group_id) or self._recent.get(group_id)

    def place_of(self, sample_id: SampleId) -> tuple[str, int] | None:
        """(group, seat) whose newest record this is, if it is not too long ago."""
        return self._places.get(sample_id)

    def knows(self, sample_id: SampleId) -> bool:
        return sample_id.epoch == self.epoch and self._recorded.covers(sample_id.seq)

    @property
    def first_unknown(self) -> int:
        """The first sequence number of this epoch that does not stand in the journal."""
        return self._recorded.watermark

    @property
    def num_recorded(self) -> int:
        """Records of this epoch that stand in the journal."""
        return self._recorded.num_settled

    def num_recorded_from(self, seq: int) -> int:
        """How many of them have number `seq` or a higher one."""
        beyond = sum(max(0, last - max(first, seq)) for first, last in self._recorded.runs())
        return max(0, self._recorded.watermark - seq) + beyond

    def silently_stored(self, next_seq: int) -> list[tuple[Offering, SampleId]]:
        """Records that must be in the stream, whose next record gets number `next_seq`, though nobody noted it: numbers are
        given in the order in which records are handed over, so each unknown number belongs to the next one that has none.

        To be asked when everything that the stream still holds has been noted: what is found here the trainer has committed.
        """
        found = []
        expected = self._offerings_from
        for offering, seq in self._offerings.values():
            if seq is not None:
                expected = max(expected, seq + 1)
            elif expected < next_seq and not self._recorded.covers(expected):
                found.append((offering, SampleId(self.producer, self.epoch, expected)))
                expected += 1
        return found

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _began(self, record: RollouterBegan) -> None:
        for group in self.open_groups.values():
            group.spent_s = group.open_for_s(self._at)
            group.since = record.at
            if self.epoch not in (0, record.epoch):
                self._lose_records(group)
        self._offerings.clear()
        if record.epoch != self.epoch:
            self._recorded = Settled()
            self._recent.clear()
            self._places.clear()
        self.epoch = record.epoch
        self.fingerprint = record.data_fingerprint
        self.num_processes += 1
        self.was_cut_off = True

    def _lose_records(self, group: GroupBook) -> None:
        """The stream that held the group's records is gone: if there were any it can never be whole, so all its seats are to be
        closed, in the new stream."""
        if all(seat.is_open for seat in group.seats):
            return
        for seat in group.seats:
            self._take_back(seat)
            seat.closing = Closing(
                attempt=seat.attempt, reason=FailureReason.SIBLINGS_LOST, message="an older stream of the rollouter is gone"
            )

    def _attempt_failed(self, record: AttemptFailed) -> None:
        if record.reason == LATE_RESULT:
            self._late += 1
            return
        move = Move(record.then)
        if move in (Move.RETRY, Move.REFILL):
            self._retried += 1
        group = self.group(record.group_id)
        if group is None:
            return
        self._offerings.pop((record.group_id, record.seat), None)
        reason, seat = FailureReason(record.reason), group.seats[record.seat]
        if not seat.is_open:  # the trainer's end refused its record
            self._take_back(seat)
            self._recent.pop(record.group_id, None)
            self.open_groups[record.group_id] = group
        seat.attempt = max(seat.attempt, record.attempt + 1)
        if reason is FailureReason.INTERRUPTED:
            seat.num_interrupted = 1 if record.kept_tokens > seat.kept_tokens else seat.num_interrupted + 1
        else:
            seat.num_failed += 1
        seat.kept_tokens = record.kept_tokens
        if move is not Move.CONTINUE:
            seat.first_attempt = seat.attempt
        if move is Move.REFILL:
            seat.num_failed = 0
            seat.num_refills += 1
        elif move is Move.CLOSE:
            seat.closing = Closing(attempt=record.attempt, reason=reason, message=record.message)
        if move is Move.REFILL and reason is FailureReason.GROUP_DEADLINE:
            group.spent_s, group.since = 0.0, record.at
        if move is not Move.RETRY and reason in TASK_FAULT:
            self.failures.setdefault(group.admitted.task_id, TaskFailures()).add(record.reason, record.message)

    def _recorded_in(self, group_id: str, number: int, plain: Sequence[Any], *, attempt: int, closed: str) -> None:
        sample_id = SampleId(*plain)
        if sample_id.epoch == self.epoch and not self._recorded.add(sample_id.seq):
            return
        self._number((group_id, number), sample_id.seq)
        group = self.group(group_id)
        if group is None:
            return
        seat = group.seats[number]
        self._take_back(seat)
        seat.id, seat.closed, seat.closing = sample_id, closed, None
        seat.attempt = max(seat.attempt, attempt)
        self._places[sample_id] = (group_id, number)
        if closed:
            self._failed[closed] += 1
        else:
            self._offered += 1
        if not group.is_open and self.open_groups.pop(group_id, None) is not None:
            self._remember(group_id, group)

    def _offering(self, record: Offering) -> None:
        if not self._offerings:
            self._offerings_from = self._recorded.watermark
        place = (record.group_id, record.seat)
        self._offerings.pop(place, None)
        self._offerings[place] = (record, None)

    def _number(self, place: tuple[str, int], seq: int) -> None:
        if place not in self._offerings:
            return
        self._offerings[place] = (self._offerings[place][0], seq)
        while self._offerings and (first := next(iter(self._offerings.values())))[1] is not None:
            self._offerings_from = first[1] + 1
            del self._offerings[first[0].group_id, first[0].seat]

    def _take_back(self, seat: SeatBook) -> None:
        """The seat's record, if it has one, does not count any more."""
        if seat.id is None:
            return
        self._places.pop(seat.id, None)
        if seat.closed:
            self._failed[seat.closed] -= 1
        else:
            self._offered -= 1
        seat.id, seat.closed = None, ""

    def _remember(self, group_id: str, group: GroupBook) -> None:
        self._recent[group_id] = group
        while len(self._recent) > MAX_RECENT_GROUPS:
            _, oldest = self._recent.popitem(last=False)
            for seat in oldest.seats:
                if seat.id is not None:
                    self._places.pop(seat.id, None)
