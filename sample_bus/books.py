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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sample_bus.issued import Handed, Issued, Rollout
from sample_bus.sample import SampleId
from sample_bus.settlements import LOST_WITH_TRAINER, SETTLED, Fate, Outcome, Problems, Settlements, in_words, name_of

REJECTED = "rejected"
_CAME_TO_NOTHING = frozenset({REJECTED, LOST_WITH_TRAINER})
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
        parts = [f"{self.trained} trained", _by_reason(self.dropped, "dropped")]
        if self.failed:
            parts.append(_by_reason(self.failed, "failed"))
        parts += [f"{self.queued} queued", f"{self.on_the_way} {self.way}", f"{self.in_flight} in flight"]
        text = f"{self.issued} issued = {' + '.join(parts)}"
        if self.lost:
            text += f" + {self.lost} LOST"
        return text if self.closes else f"{text}: DOES NOT CLOSE ({self.num_problems} problems)"

    @property
    def way(self) -> str:
        return "on the way" if self.copies_known or self.end is None or not self.on_the_way else "on the way or lost"


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Both journals folded, and what the producers keep."""

    issued: Issued
    settlements: Settlements
    copies: dict[str, Copies] | None
    rejected: Collection[SampleId]
    problems: Problems = field(default_factory=lambda: Problems([]))
    lost: list[str] = field(default_factory=list)
    spare: int = 0

    def place(self, rollout: Rollout, records: list[Handed]) -> tuple[Place, str]:
        """Where the rollout is, and the reason if there is one."""
        known = [(record, self.settlements.outcome(record.id)) for record in records]
        trained = [
            record for record, outcome in known if outcome is not None and outcome.fate is Fate.TRAINED and not record.closed
        ]
        if len(trained) > 1:
            self.problems.add(
                f"rollout {rollout[0]}/{rollout[1]} was trained twice: records {', '.join(name_of(one.id) for one in trained)}"
            )
        self.spare += max(0, len(records) - 1)
        if trained:
            return Place.TRAINED, ""
        places = [self._of_record(*one) for one in known if one[1] is not None or not self.issued.has_taken_back(one[0].id)]
        for place, reason in places:  # the first record decides, unless it came to nothing
            if place is not Place.LOST and reason not in _CAME_TO_NOTHING:
                return place, reason
        for place, reason in places:
            if place is not Place.LOST:
                return place, reason
        if not places:
            return Place.IN_FLIGHT, ""
        self.lost.append(f"{rollout[0]}/{rollout[1]} (record {name_of(records[0].id)}: {places[0][1]})")
        return places[0]

    def _of_record(self, record: Handed, outcome: Outcome | None) -> tuple[Place, str]:
        if outcome is None:
            if record.id in self.rejected:
                return Place.DROPPED, REJECTED
            why = self._why_lost(record.id)
            if why:
                return Place.LOST, why
            return (Place.FAILED, record.closed) if record.closed else (Place.ON_THE_WAY, "")
        if record.closed:
            return Place.FAILED, record.closed
        if outcome.fate is Fate.GONE:
            return Place.DROPPED, LOST_WITH_TRAINER
        if outcome.fate is Fate.DROPPED:
            return Place.DROPPED, outcome.reason
        return Place.QUEUED, ""

    def _why_lost(self, sample_id: SampleId) -> str:
        """Why a record that no trainer has seen cannot be on its way; empty if it can."""
        if self.settlements.position.covers(sample_id):
            return "a checkpoint covers it, and nothing says what became of it"
        if self.copies is None:
            return ""
        copies = self.copies.get(sample_id.producer)
        if copies is None:
            return f"its producer {sample_id.producer!r} keeps nothing"
        if copies.epoch != sample_id.epoch:
            return f"its producer lost it: it keeps epoch {copies.epoch}"
        if sample_id.seq < copies.first:
            return f"its producer freed its copy (all below {copies.first})"
        if sample_id.seq >= copies.next_seq:
            return f"its producer keeps no copy (none from {copies.next_seq} on)"
        return ""

    def check_unsettled(self) -> None:
        """What the trainer holds and has not settled must be covered by nothing and freed by nobody."""
        for sample_id, outcome in self.settlements.outcomes.items():
            if outcome.fate in SETTLED or outcome.fate is Fate.GONE:
                continue
            copies = self.copies.get(sample_id.producer) if self.copies is not None else None
            if self.settlements.position.covers(sample_id):
                self.problems.add(f"record {name_of(sample_id)} is {in_words(outcome)}, and a checkpoint covers it as settled")
            elif copies is not None and copies.epoch == sample_id.epoch and sample_id.seq < copies.first:
                self.problems.add(f"record {name_of(sample_id)} is {in_words(outcome)}, and its producer freed its copy")


def balance(
    issued: Issued, settlements: Settlements, *, copies: Iterable[Copies] | None, rejected: Collection[SampleId] = ()
) -> Books:
    """Put both journals and the producers' copies together.

    `copies`: None when they cannot be looked at from here (kept by a broker, or on another host). `rejected`: records that the
    trainer's end could not decode, as far as they are known.
    """
    reading = _Reading(
        issued=issued,
        settlements=settlements,
        copies={one.producer: one for one in copies} if copies is not None else None,
        rejected=rejected,
    )
    records = _merged(reading)
    places: Counter[tuple[Place, str]] = Counter()
    for rollout, handed in records.items():
        places[reading.place(rollout, handed)] += 1
    places[Place.IN_FLIGHT, ""] += issued.num_issued - len(records)
    reading.check_unsettled()
    if reading.lost:
        more = f" and {len(reading.lost) - _NAMED} more" if len(reading.lost) > _NAMED else ""
        reading.problems.add(f"{len(reading.lost)} rollouts lost: {'; '.join(reading.lost[:_NAMED])}{more}")
    sources = (reading.problems, settlements.problems, issued.problems)
    ended = settlements.ended
    return Books(
        issued=issued.num_issued,
        trained=places[Place.TRAINED, ""],
        dropped=_reasons(places, Place.DROPPED),
        failed=_reasons(places, Place.FAILED),
        queued=places[Place.QUEUED, ""],
        on_the_way=places[Place.ON_THE_WAY, ""],
        in_flight=places[Place.IN_FLIGHT, ""],
        lost=len(reading.lost),
        copies_known=copies is not None,
        step=settlements.step,
        policy_version=settlements.policy_version,
        trainers=settlements.num_began,
        rollouters=issued.num_began,
        rolled_back=settlements.num_rolled_back,
        spare_records=reading.spare,
        end=None if ended is None else f"{ended.reason}: {ended.message}" if ended.message else ended.reason,
        problems=tuple(text for source in sources for text in source.texts),
        num_problems=sum(source.num for source in sources),
    )


def _merged(reading: _Reading) -> dict[Rollout, list[Handed]]:
    """Records of every admitted rollout in stream order: those that the rollouter noted, and those that only the trainer did
    (the rollouter died between the offer and its note). What belongs to no admitted rollout is a problem."""
    records = {rollout: list(handed) for rollout, handed in reading.issued.handed.items() if reading.issued.knows(rollout)}
    for sample_id, seat in reading.settlements.seats.items():
        rollout = (seat.group_id, seat.seat)
        if not reading.issued.knows(rollout):
            reading.problems.add(
                f"record {name_of(sample_id)} is of seat {seat.seat} of {seat.group_id}, which was never admitted"
            )
            continue
        handed = records.setdefault(rollout, [])
        if all(sample_id != known.id for known in handed):
            handed.append(Handed(sample_id, seat.closed))
    for handed in records.values():
        handed.sort(key=lambda record: record.id)
    return records


def _reasons(places: Counter[tuple[Place, str]], place: Place) -> dict[str, int]:
    return {reason: number for (where, reason), number in sorted(places.items()) if where is place and number}


def _by_reason(numbers: Mapping[str, int], what: str) -> str:
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(numbers.items()) if number)
    return f"{sum(numbers.values())} {what}" + (f" ({reasons})" if reasons else "")
