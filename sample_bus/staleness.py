"""How far generation may run ahead, and how old a sample is. Pure and exact (`fractions.Fraction`).

Invariant (pacing): a group starts only while

    admitted - refunded + group_size <= (v - v0 + 1 + staleness_threshold) * K

with v the newest published version, v0 the version from which everything is counted, and K the samples consumed per sync
period. At threshold 0 exactly the samples of the next period are started: the run is synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sample_bus.sample import NO_VERSION, Sample


def budget(policy_version: int, origin_version: int, staleness_threshold: float, samples_per_period: int) -> Fraction:
    """Samples that may have been started since `origin_version`, net of refunds.

    A float threshold means the decimal number that it prints as: 0.1 is one tenth.
    """
    periods = policy_version - origin_version + 1
    return (periods + Fraction(str(staleness_threshold))) * samples_per_period


@dataclass(slots=True, kw_only=True)
class AdmissionLedger:
    """What the rollouter has started, in samples since `origin_version`."""

    samples_per_period: int
    """K = trigger_parameter_sync_step * samples_per_step."""
    origin_version: int = 0
    admitted: int = 0
    refunded: int = 0
    """Rollouts that failed for good or were dropped: each is replaced."""

    @property
    def outstanding(self) -> int:
        """Admitted and not refunded."""
        return self.admitted - self.refunded

    def may_admit(self, group_size: int, *, policy_version: int, staleness_threshold: float) -> bool:
        """Whether a whole group may start now."""
        limit = budget(policy_version, self.origin_version, staleness_threshold, self.samples_per_period)
        return self.outstanding + group_size <= limit

    def room(self, *, policy_version: int, staleness_threshold: float) -> Fraction:
        """Samples that may still be started now; negative after the threshold was lowered."""
        return budget(policy_version, self.origin_version, staleness_threshold, self.samples_per_period) - self.outstanding

    def admit(self, num_samples: int) -> None:
        self.admitted += num_samples

    def refund(self, num_samples: int) -> None:
        """Raises ValueError if more would be refunded than was admitted."""
        if not 0 <= num_samples <= self.outstanding:
            raise ValueError(f"refund of {num_samples}: got more than the {self.outstanding} samples that are outstanding")
        self.refunded += num_samples

    def rebase(self, *, origin_version: int, accounted: int, in_flight: int = 0) -> None:
        """Count anew from a trainer's resumption: what it accounts for, and what is in flight here and not yet with it."""
        self.origin_version = origin_version
        self.admitted = accounted + in_flight
        self.refunded = 0


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
