"""How far generation may run ahead, and how old a sample is. Pure and exact (`fractions.Fraction`).

Invariant (pacing): a group starts only while

    admitted - refunded + group_size <= N(v + 1) + staleness_threshold * K

with v the version that the engines hold, N(w) the seats that the trainer's steps up to version w take, counted from the origin
(N(v0) = 0), and K the seats of one sync period at today's settings. While K never changes N(v + 1) is (v - v0 + 1) * K and the
limit is (v - v0 + 1 + staleness_threshold) * K. At threshold 0 exactly the samples of the next period are started: the run is
synchronous. docs/staleness.md proves what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sample_bus.messages import SeatDemand
from sample_bus.sample import NO_VERSION, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The settings that pace generation, as they stand at the moment of decision."""

    staleness_threshold: float
    """In sync periods. A float means the decimal number that it prints as: 0.1 is one tenth."""
    samples_per_step: int
    samples_per_period: int
    """K = trigger_parameter_sync_step * samples_per_step."""

    @property
    def ahead(self) -> Fraction:
        """Seats that may be started beyond those that the next version needs."""
        return Fraction(str(self.staleness_threshold)) * self.samples_per_period


def budget(
    policy_version: int,
    origin_version: int,
    staleness_threshold: float,
    samples_per_period: int,
    *,
    consumed_seats: int | None = None,
) -> Fraction:
    """Seats that may have been started since `origin_version`, net of refunds, when a whole period follows `policy_version`.

    `consumed_seats` is what the steps up to `policy_version` took; None: whole periods of `samples_per_period`.
    """
    if consumed_seats is None:
        consumed_seats = (policy_version - origin_version) * samples_per_period
    return consumed_seats + (1 + Fraction(str(staleness_threshold))) * samples_per_period


@dataclass(slots=True, kw_only=True)
class SeatClock:
    """N: the seats that the trainer's steps take up to each version, as far as the trainer has said it."""

    origin_version: int = 0
    _consumed: dict[int, int] = field(default_factory=dict)
    _newest: int | None = None
    _demand: SeatDemand | None = None

    def take(self, policy_version: int, *, consumed_seats: int | None, demand: SeatDemand | None) -> None:
        """What the trainer says with its newest published version; None: it says nothing, whole periods are assumed."""
        self._newest, self._demand = policy_version, demand
        if consumed_seats is not None:
            self._consumed[policy_version] = consumed_seats

    def forget_before(self, policy_version: int) -> None:
        """The engines have reached this version and do not go back."""
        for version in [version for version in self._consumed if version < policy_version]:
            del self._consumed[version]

    def due(self, held_version: int, pace: Pace) -> int:
        """N(held_version + 1): the seats that steps take until the version after `held_version` is published.

        Exact when that version is published or the held one is the newest; else (the trainer said less) at most what the next
        version that it did name took.
        """
        if held_version + 1 in self._consumed:
            return self._consumed[held_version + 1]
        if held_version == self._newest and self._demand is not None:
            steps_left = max(0, self._demand.sync_step - self._demand.begun_step)
            return self._demand.taken_seats + steps_left * pace.samples_per_step
        consumed = self._consumed.get(held_version)
        whole = budget(held_version, self.origin_version, 0, pace.samples_per_period, consumed_seats=consumed)
        later = [seats for version, seats in self._consumed.items() if version > held_version]
        return min([int(whole), *later])


@dataclass(slots=True, kw_only=True)
class AdmissionLedger:
    """What the rollouter has started, in seats since the trainer's origin."""

    admitted: int = 0
    refunded: int = 0
    """Seats of groups that the trainer dropped: each is replaced."""
    clock: SeatClock = field(default_factory=SeatClock)

    @property
    def outstanding(self) -> int:
        """Admitted and not refunded."""
        return self.admitted - self.refunded

    def may_admit(self, group_size: int, *, policy_version: int, pace: Pace) -> bool:
        """Whether a whole group may start now, `policy_version` being what the engines hold."""
        return group_size <= self.room(policy_version=policy_version, pace=pace)

    def room(self, *, policy_version: int, pace: Pace) -> Fraction:
        """Seats that may still be started now; negative after the threshold or the period was lowered."""
        return self.clock.due(policy_version, pace) + pace.ahead - self.outstanding

    def admit(self, num_seats: int) -> None:
        self.admitted += num_seats

    def refund(self, num_seats: int) -> None:
        """Raises ValueError if more would be refunded than was admitted."""
        if not 0 <= num_seats <= self.outstanding:
            raise ValueError(f"refund of {num_seats}: got more than the {self.outstanding} samples that are outstanding")
        self.refunded += num_seats

    def rebase(self, *, origin_version: int, accounted: int, in_flight: int = 0) -> None:
        """Count anew from a trainer's resumption: what it accounts for, and what is in flight here and not yet with it."""
        self.clock = SeatClock(origin_version=origin_version)
        self.admitted = accounted + in_flight
        self.refunded = 0


def seats_of_run(demand: SeatDemand, *, num_steps: int, samples_per_step: int) -> int:
    """Seats that steps take from the origin to the last step of the run."""
    return demand.taken_seats + max(0, num_steps - demand.begun_step) * samples_per_step


def sample_staleness(sample: Sample, trainer_version: int) -> int:
    """Trainer's version minus the oldest version that sampled a token, time in queues included; 0 if no policy sampled any.

    Negative for a sample from a version that the trainer does not have (it was rolled back).
    """
    oldest = sample.oldest_version
    return 0 if oldest == NO_VERSION else trainer_version - oldest


def token_staleness(sample: Sample, trainer_version: int) -> npt.NDArray[np.int32]:
    """[T] int32 trainer's version minus each token's; 0 for tokens that no policy sampled."""
    versions = sample.token_versions()
    return np.where(versions == NO_VERSION, np.int32(0), np.int32(trainer_version) - versions).astype(np.int32)
