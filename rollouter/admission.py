"""May a group of rollouts start now? Pure: no clock, no await.

Invariant: `admitted - refunded` never exceeds the staleness budget of the version that the engines hold, counted from the
trainer's origin, whatever the order of events. Only what the trainer gives back is refunded: a rollout's own end, whether by a
sample or by a closed seat, changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from configs.errors import ConfigError
from sample_bus.messages import SeatDemand
from sample_bus.protocols import Resumption
from sample_bus.staleness import AdmissionLedger, Pace


class Hold(StrEnum):
    """Why no group starts now."""

    DRAINING = "draining"
    NO_TRAINER = "the trainer has not said from which version to count"
    NO_WEIGHTS = "the engines hold no version of this trainer yet"
    JOURNAL = "the journal cannot be written"
    EVALUATING = "an evaluation goes first"
    TOO_OLD = "the engines' version is already older than max_staleness allows"
    ENOUGH = "every sample that the run still needs is under way"
    BUS_FULL = "the bus could not take what is under way in every order"
    BUDGET = "the staleness budget is used up"
    CONCURRENCY = "max_concurrent_rollouts are in flight"
    NO_DATA = "the data is exhausted"
    QUARANTINED = "every task is in quarantine"
    LOOKING = "tasks that are left out are passed over"
    READING = "the next task is being read"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """What the serving engines hold. Numbers of two incarnations are never compared."""

    incarnation: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a decision reads, as it stands at that moment."""

    group_size: int
    staleness_threshold: float
    max_concurrent_rollouts: int
    max_staleness: int | None
    num_samples_needed: int | None
    """Samples that the trainer consumes from its origin to its last step; None: unknown."""
    num_in_flight: int
    """Rollouts admitted whose record is not in the stream."""
    num_unsettled: int
    """Records on the bus or with the trainer, and rollouts in flight, at most."""
    num_open_seats: int
    """Seats of groups of which some rollout is in flight, arrived ones included."""
    samples_per_step: int
    samples_per_period: int
    max_queued_samples: int
    journal_blocked: bool
    evaluating: bool
    draining: bool

    @property
    def pace(self) -> Pace:
        return Pace(
            staleness_threshold=self.staleness_threshold,
            samples_per_step=self.samples_per_step,
            samples_per_period=self.samples_per_period,
        )

    @property
    def bus_has_room(self) -> bool:
        """Whether the trainer can still fill a step with one more group under way, in whatever order samples arrive.

        Either everything under way fits into the bus's limit. Or: while the trainer waits, fewer than a step's whole groups are
        with it, at most samples_per_step - group_size samples; all others there belong to open groups. If both fit, no sample
        that completes a group ever waits for credit that only a step could give back.
        """
        if self.num_unsettled + self.group_size <= self.max_queued_samples:
            return True
        return self.num_open_seats + self.samples_per_step <= self.max_queued_samples


class Admission:
    """The account of seats, in rollouts since the trainer's origin."""

    def __init__(self) -> None:
        self._ledger = AdmissionLedger()
        self._incarnation: str | None = None
        self._held: HeldVersion | None = None
        self._origin_version = 0
        self._published: int | None = None
        self._refunded_by_trainer = 0
        self._next_seq = 0

    @property
    def incarnation(self) -> str | None:
        """The trainer whose versions count here."""
        return self._incarnation

    @property
    def origin_version(self) -> int:
        """The version from which everything is counted."""
        return self._origin_version

    @property
    def held(self) -> HeldVersion | None:
        return self._held

    @property
    def outstanding(self) -> int:
        """Admitted and not refunded."""
        return self._ledger.outstanding

    def hold(self, conditions: Conditions) -> Hold | None:
        """Why a group may not start now; None: it may.

        Raises ConfigError when a group is larger than what may ever be in flight.
        """
        if conditions.group_size > conditions.max_concurrent_rollouts:
            raise ConfigError(
                f"rollouter.max_concurrent_rollouts: got {conditions.max_concurrent_rollouts}, below group_size="
                f"{conditions.group_size}: no group could ever start"
            )
        if conditions.draining:
            return Hold.DRAINING
        if self._incarnation is None:
            return Hold.NO_TRAINER
        if self._held is None or self._held.incarnation != self._incarnation:
            return Hold.NO_WEIGHTS
        if conditions.journal_blocked:
            return Hold.JOURNAL
        if conditions.evaluating:
            return Hold.EVALUATING
        version = self._held.policy_version
        if self._published is None or self._published < version:
            return Hold.NO_TRAINER  # it announces a version first and then says so: what it says of its origin is older
        if conditions.max_staleness is not None and self._published - version > conditions.max_staleness:
            return Hold.TOO_OLD
        needed = conditions.num_samples_needed
        if needed is not None and self.outstanding + conditions.group_size > needed:
            return Hold.ENOUGH
        if not self._ledger.may_admit(conditions.group_size, policy_version=version, pace=conditions.pace):
            return Hold.BUDGET
        if conditions.num_in_flight + conditions.group_size > conditions.max_concurrent_rollouts:
            return Hold.CONCURRENCY
        if not conditions.bus_has_room:
            return Hold.BUS_FULL
        return None

    def admit(self, count: int) -> None:
        """`count` rollouts start."""
        self._ledger.admit(count)

    def stored(self, seq: int) -> None:
        """A rollout's record is in the stream, under this number. One that the trainer had counted already when it took this
        producer, while the rollout still counted as in flight here, is not counted twice."""
        if seq < self._next_seq:
            self._ledger.refund(min(1, self.outstanding))

    def take_held(self, held: HeldVersion | None) -> None:
        """All serving engines hold this version now; None: they hold nothing that may be used."""
        self._held = held
        if held is not None and held.incarnation == self._incarnation:
            self._ledger.clock.forget_before(held.policy_version)

    def take_trainer(
        self,
        *,
        incarnation: str,
        origin_version: int,
        policy_version: int,
        num_refunded: int,
        consumed_seats: int | None = None,
        demand: SeatDemand | None = None,
    ) -> None:
        """What the trainer says: where it counts from, its newest published version, what its steps took, and the records that
        it gave back since its origin; each is refunded once."""
        if incarnation != self._incarnation:
            return
        self._published = policy_version
        if origin_version != self._origin_version:
            self._origin_version = origin_version
            self._ledger.rebase(origin_version=origin_version, accounted=self.outstanding)
        self._ledger.clock.take(policy_version, consumed_seats=consumed_seats, demand=demand)
        if num_refunded > self._refunded_by_trainer:
            self._ledger.refund(min(num_refunded - self._refunded_by_trainer, self.outstanding))
            self._refunded_by_trainer = num_refunded

    def rebase(self, resumption: Resumption, *, in_flight: int) -> None:
        """Count from the origin of the trainer that took this producer: what it accounts for, plus `in_flight`, the rollouts
        here whose records it did not count and that will still arrive."""
        self._incarnation = resumption.incarnation
        self._origin_version = resumption.origin_version
        self._published = None
        self._refunded_by_trainer = resumption.dropped
        self._next_seq = resumption.next_seq
        self._ledger.rebase(origin_version=resumption.origin_version, accounted=resumption.accounted, in_flight=in_flight)

    def forget(self) -> None:
        """The trainer that is there now has another run: nothing starts until `rebase`."""
        self._incarnation = None
        self._published = None
