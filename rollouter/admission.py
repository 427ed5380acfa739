"""May a group of rollouts start now? Pure: no clock, no await.

Invariant: `admitted - refunded` never exceeds the staleness budget of the version that the engines hold, counted from the
trainer's origin, whatever the order of events; and every admitted rollout is in flight, offered or failed, never two of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from configs.errors import ConfigError
from rollouter.failures import FailureReason
from sample_bus.messages import RolloutCounts
from sample_bus.protocols import Resumption
from sample_bus.staleness import AdmissionLedger


class Hold(StrEnum):
    """Why no group starts now."""

    DRAINING = "draining"
    NO_TRAINER = "the trainer has not said from which version to count"
    NO_WEIGHTS = "the engines hold no version of this trainer yet"
    EVALUATING = "an evaluation goes first"
    TOO_OLD = "the engines' version is already older than max_staleness allows"
    ENOUGH = "every sample that the run still needs is under way"
    BUS_FULL = "the bus could not take what is under way in every order"
    BUDGET = "the staleness budget is used up"
    CONCURRENCY = "max_concurrent_rollouts are in flight"
    NO_DATA = "the data is exhausted"


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
    num_unsettled: int
    """Samples on the bus or with the trainer, and rollouts in flight, at most."""
    num_open_seats: int
    """Seats of groups of which some rollout is in flight, arrived ones included."""
    samples_per_step: int
    max_queued_samples: int
    evaluating: bool
    draining: bool

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
    """The account of rollouts."""

    def __init__(self, *, samples_per_period: int) -> None:
        self._ledger = AdmissionLedger(samples_per_period=samples_per_period)
        self._incarnation: str | None = None
        self._held: HeldVersion | None = None
        self._origin_version = 0
        self._published: int | None = None
        self._dropped_by_trainer = 0
        self._offered = 0
        self._failed: Counter[FailureReason] = Counter()
        self._retried = 0
        self._in_flight = 0

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
    def in_flight(self) -> int:
        """Rollouts admitted, neither offered nor failed."""
        return self._in_flight

    @property
    def outstanding(self) -> int:
        """Admitted and not refunded, in samples since the origin."""
        return self._ledger.outstanding

    def counts(self) -> RolloutCounts:
        return RolloutCounts(
            admitted=self._offered + sum(self._failed.values()) + self._in_flight,
            offered=self._offered,
            failed={reason.value: count for reason, count in sorted(self._failed.items())},
            retried=self._retried,
            in_flight=self._in_flight,
        )

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
        if not self._ledger.may_admit(
            conditions.group_size, policy_version=version, staleness_threshold=conditions.staleness_threshold
        ):
            return Hold.BUDGET
        if self._in_flight + conditions.group_size > conditions.max_concurrent_rollouts:
            return Hold.CONCURRENCY
        if not conditions.bus_has_room:
            return Hold.BUS_FULL
        return None

    def admit(self, count: int) -> None:
        """`count` rollouts start."""
        self._ledger.admit(count)
        self._in_flight += count

    def offered(self) -> None:
        """The bus took a rollout's sample."""
        self._leave()
        self._offered += 1

    def failed(self, reason: FailureReason) -> None:
        """A rollout is given up; its place in the budget is free again."""
        self._leave()
        self._failed[reason] += 1
        self._ledger.refund(1)

    def retried(self) -> None:
        """A rollout is tried once more."""
        self._retried += 1

    def take_held(self, held: HeldVersion | None) -> None:
        """All serving engines hold this version now; None: they hold nothing that may be used."""
        self._held = held

    def take_trainer(self, *, incarnation: str, origin_version: int, policy_version: int, num_dropped: int) -> None:
        """What the trainer says: where it counts from, its newest published version, and samples that it dropped since its
        origin; each drop is refunded once."""
        if incarnation != self._incarnation:
            return
        self._published = policy_version
        if origin_version != self._origin_version:
            self._origin_version = origin_version
            self._ledger.rebase(origin_version=origin_version, accounted=self.outstanding)
        if num_dropped > self._dropped_by_trainer:
            self._ledger.refund(num_dropped - self._dropped_by_trainer)
            self._dropped_by_trainer = num_dropped

    def rebase(self, resumption: Resumption) -> None:
        """Count from the origin of the trainer that took this producer: what it accounts for, plus what is in flight here and
        will still arrive."""
        self._incarnation = resumption.incarnation
        self._origin_version = resumption.origin_version
        self._published = None
        self._dropped_by_trainer = resumption.dropped
        self._ledger.rebase(origin_version=resumption.origin_version, accounted=resumption.accounted, in_flight=self._in_flight)
        self._offered = resumption.accounted + resumption.dropped
        self._failed.clear()
        self._retried = 0

    def _leave(self) -> None:
        if self._in_flight < 1:
            raise AssertionError(f"a rollout ended and {self._in_flight} were in flight")
        self._in_flight -= 1
