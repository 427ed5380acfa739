"""The books of a run, from the journals of both daemons: every rollout's place, and whether the identity closes. Pure.

    issued = trained + dropped (by reason) + failed (by reason) + queued + on the way + in flight

Invariant: every issued rollout is counted in exactly one place, so the sum always holds; the books close when, besides, no
rollout is lost, none was trained twice, none came from nowhere, and what the daemons counted themselves says the same.

To read a run that goes on: first the producers' copies, then the trainer's journal, then the rollouter's, then the copies
again. What a producer had freed by then stands in the trainer's journal, and what the trainer received was admitted by the
rollouter's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sample_bus.issued import Handed, Issued, Rollout
from sample_bus.ledger import identity
from sample_bus.sample import SampleId
from sample_bus.settlements import (
    LOST_WITH_TRAINER,
    PRODUCER_LOST,
    SETTLED,
    Fate,
    Outcome,
    Problems,
    Settlements,
    in_words,
    name_of,
)

REJECTED = "rejected"
_CAME_TO_NOTHING = frozenset({REJECTED, LOST_WITH_TRAINER, PRODUCER_LOST})
_NAMED = 5
"""Rollouts named in a problem that concerns many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a producer keeps of its stream."""

    producer: str
    epoch: int
    first: int
    """Copies below it were freed before the journals were read."""
    next_seq: int
    """Copies from it on were not there after the journals had been read."""


class Place(StrEnum):
    """Where a rollout is."""

    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    """Its seat was closed."""
    QUEUED = "queued"
    """With the trainer."""
    ON_THE_WAY = "on the way"
    """Kept by its producer, not with the trainer."""
    IN_FLIGHT = "in flight"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    issued: int
    trained: int
    dropped: Mapping[str, int]
    """Reason to number of rollouts."""
    failed: Mapping[str, int]
    """Reason to number of rollouts."""
    queued: int
    on_the_way: int
    in_flight: int
    lost: int
    copies_known: bool
    """Whether the producers' copies could be looked at; if not, what is on the way may be lost."""
    step: int
    policy_version: int
    trainers: int
    """Trainer's processes that took the run up."""
    rollouters: int
    rolled_back: int
    """Samples whose training was lost with a trainer's process; they came again."""
    spare_records: int
    """Records of rollouts that another record decides: late results, and samples that were rejected or lost."""
    end: str | None
    """How the trainer ended, with its message; None while it runs or when it was killed."""
    problems: tuple[str, ...] = ()
    num_problems: int = 0

    @property
    def closes(self) -> bool:
        return not self.num_problems

    @property
    def accounted(self) -> int:
        """The right side of the identity."""
        placed = self.trained + self.queued + self.on_the_way + self.in_flight
        return placed + sum(self.dropped.values()) + sum(self.failed.values())

    def line(self) -> str:
        """The identity in numbers."""
        text = identity(
            issued=self.issued,
            trained=self.trained,
            dropped=self.dropped,
            failed=self.failed,
            queued=self.queued,
            on_the_way=self.on_the_way,
            in_flight=self.in_flight,
            way=self.way,
            lost=self.lost,
        )
        return text if self.closes else f"{text}: DOES NOT CLOSE ({self.num_problems} problems)"

    @property
    def way(self) -> str:
        return "on the way" if self.copies_known or self.end is None or not self.on_the_way else "on the way or lost"


class Reading:
    """Both journals folded, and what the producers keep."""

    def __init__(
        self,
        issued: Issued,
        settlements: Settlements,
        *,
        copies: Iterable[Copies] | None,
        rejected: Collection[SampleId] = (),
    ) -> None:
        """`copies`: None when they cannot be looked at from here (kept by a broker, or on another host). `rejected`: records
        that the trainer's end could not decode, as far as they are known."""
        self.issued = issued
        self.settlements = settlements
        self._copies = {one.producer: one for one in copies} if copies is not None else None
        self._rejected = rejected
        self._problems = Problems([])
        self._lost: list[str] = []
        self._num_spare = 0
        self.records = self._merged()
        """Records of every admitted rollout that has some, in stream order."""

    def place(self, rollout: Rollout) -> tuple[Place, str]:
        """Where the rollout is, and the reason if there is one."""
        known = [(record, self.settlements.outcome(record.id)) for record in self.records.get(rollout, ())]
        if any(outcome is not None and outcome.fate is Fate.TRAINED and not record.closed for record, outcome in known):
            return Place.TRAINED, ""
        places = [self._of_record(*one) for one in known if one[1] is not None or not self.issued.has_taken_back(one[0].id)]
        for place, reason in places:  # the first record decides, unless it came to nothing
            if place is not Place.LOST and reason not in _CAME_TO_NOTHING:
                return place, reason
        for place, reason in places:
            if place is not Place.LOST:
                return place, reason
        return places[0] if places else (Place.IN_FLIGHT, "")

    def books(self) -> Books:
        """Count every rollout, and look for contradictions; once."""
        places = self._count()
        self._check_unsettled()
        if self._lost:
            more = f" and {len(self._lost) - _NAMED} more" if len(self._lost) > _NAMED else ""
            self._problems.add(f"{len(self._lost)} rollouts lost: {'; '.join(self._lost[:_NAMED])}{more}")
        settlements, issued = self.settlements, self.issued
        sources = (self._problems, settlements.problems, issued.problems)
        ended = settlements.ended
        return Books(
            issued=issued.num_issued,
            trained=places[Place.TRAINED, ""],
            dropped=_reasons(places, Place.DROPPED),
            failed=_reasons(places, Place.FAILED),
            queued=places[Place.QUEUED, ""],
            on_the_way=places[Place.ON_THE_WAY, ""],
            in_flight=places[Place.IN_FLIGHT, ""],
            lost=len(self._lost),
            copies_known=self._copies is not None,
            step=settlements.step,
            policy_version=settlements.policy_version,
            trainers=settlements.num_began,
            rollouters=issued.num_began,
            rolled_back=settlements.num_rolled_back,
            spare_records=self._num_spare,
            end=None if ended is None else f"{ended.reason}: {ended.message}" if ended.message else ended.reason,
            problems=tuple(text for source in sources for text in source.texts),
            num_problems=sum(source.num for source in sources),
        )

    def _count(self) -> Counter[tuple[Place, str]]:
        places: Counter[tuple[Place, str]] = Counter()
        for rollout, records in self.records.items():
            place, reason = self.place(rollout)
            places[place, reason] += 1
            name = f"{rollout[0]}/{rollout[1]}"
            if place is Place.LOST:
                self._lost.append(f"{name} (record {name_of(records[0].id)}: {reason})")
            if len(records) > 1:
                self._num_spare += len(records) - 1
                self._check_once(name, records)
        places[Place.IN_FLIGHT, ""] += self.issued.num_issued - len(self.records)
        return places

    def _check_once(self, name: str, records: Sequence[Handed]) -> None:
        """No two samples of one rollout were trained."""
        outcomes = self.settlements.outcomes
        trained = [one for one in records if not one.closed and one.id in outcomes and outcomes[one.id].fate is Fate.TRAINED]
        if len(trained) > 1:
            self._problems.add(f"rollout {name} was trained twice: records {', '.join(name_of(one.id) for one in trained)}")

    def _of_record(self, record: Handed, outcome: Outcome | None) -> tuple[Place, str]:
        if outcome is None:
            if record.id in self._rejected:
                return Place.DROPPED, REJECTED
            why = self._why_lost(record.id)
            if why:
                return Place.LOST, why
            return (Place.FAILED, record.closed) if record.closed else (Place.ON_THE_WAY, "")
        if record.closed:
            return Place.FAILED, record.closed
        if outcome.fate is Fate.GONE:
            return Place.DROPPED, outcome.reason or LOST_WITH_TRAINER
        if outcome.fate is Fate.DROPPED:
            return Place.DROPPED, outcome.reason
        return Place.QUEUED, ""

    def _why_lost(self, sample_id: SampleId) -> str:
        """Why a record that no trainer has seen cannot be on its way; empty if it can."""
        if self.settlements.position.covers(sample_id):
            return "a checkpoint covers it, and nothing says what became of it"
        if self._copies is None:
            return ""
        copies = self._copies.get(sample_id.producer)
        if copies is None:
            return f"its producer {sample_id.producer!r} keeps nothing"
        if copies.epoch != sample_id.epoch:
            return f"its producer lost it: it keeps epoch {copies.epoch}"
        if sample_id.seq < copies.first:
            return f"its producer freed its copy (all below {copies.first})"
        if sample_id.seq >= copies.next_seq:
            return f"its producer keeps no copy (none from {copies.next_seq} on)"
        return ""

    def _check_unsettled(self) -> None:
        """What the trainer holds and has not settled must be covered by nothing and freed by nobody."""
        for sample_id, outcome in self.settlements.outcomes.items():
            if outcome.fate in SETTLED or outcome.fate is Fate.GONE:
                continue
            copies = self._copies.get(sample_id.producer) if self._copies is not None else None
            if self.settlements.position.covers(sample_id):
                self._problems.add(f"record {name_of(sample_id)} is {in_words(outcome)}, and a checkpoint covers it as settled")
            elif copies is not None and copies.epoch == sample_id.epoch and sample_id.seq < copies.first:
                self._problems.add(f"record {name_of(sample_id)} is {in_words(outcome)}, and its producer freed its copy")

    def _merged(self) -> dict[Rollout, list[Handed]]:
        """Those that the rollouter noted, and those that only the trainer did (the rollouter died between the offer and its
        note). What belongs to no admitted rollout is a problem."""
        records = {rollout: list(handed) for rollout, handed in self.issued.handed.items() if self.issued.knows(rollout)}
        for sample_id, seat in self.settlements.seats.items():
            rollout = (seat.group_id, seat.seat)
            if not self.issued.knows(rollout):
                self._problems.add(
                    f"record {name_of(sample_id)} is of seat {seat.seat} of {seat.group_id}, which was never admitted"
                )
                continue
            handed = records.setdefault(rollout, [])
            if all(sample_id != known.id for known in handed):
                handed.append(Handed(sample_id, seat.closed))
        for handed in records.values():
            handed.sort(key=_by_id)
        return records


def balance(
    issued: Issued, settlements: Settlements, *, copies: Iterable[Copies] | None, rejected: Collection[SampleId] = ()
) -> Books:
    """Put both journals and the producers' copies together; the arguments are those of `Reading`."""
    return Reading(issued, settlements, copies=copies, rejected=rejected).books()


def _by_id(record: Handed) -> SampleId:
    return record.id


def _reasons(places: Counter[tuple[Place, str]], place: Place) -> dict[str, int]:
    return {reason: number for (where, reason), number in sorted(places.items()) if where is place and number}
