"""How old a sample is when it is consumed, and what becomes of one that is too old. Pure.

Age is counted at the moment at which a batch is taken, waiting and scoring included, from the oldest version that sampled a
token. Invariant: with `drop`, `retry` and `wait` no token older than `max_staleness` is trained; with `downweight` such a token
counts `weight_base ** (age - max_staleness)`. A group stands or falls as a whole: one member that is too old decides for all.

Versions of another incarnation: both lines of versions grew from those up to the version at which this one began (its origin).
What is not beyond the origin is a version of both and keeps its number. What is beyond was lost with a rollback: the trainer
does not have it, and such a token counts as one of the origin, from which it was no further away than the lost line had come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.schema import Settings
from sample_bus.group_id import parse
from sample_bus.protocols import Lease, Leased
from sample_bus.sample import NO_VERSION, Sample
from trainer.groups import DropReason, Group


class OnStale(StrEnum):
    DROP = "drop"
    RETRY = "retry"
    """Drop the group and have its task issued again."""
    DOWNWEIGHT = "downweight"
    WAIT = "wait"
    """Before the step that a new version follows, wait for what that version would make too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeRule:
    """What holds at one moment."""

    max_staleness: int | None = None
    """Versions; None: nothing is ever too old."""
    on_stale: OnStale = OnStale.DROP
    weight_base: float = 0.5
    max_requeues: int = 3
    wait_s: float = 120.0
    """How long a step is held at most, with `wait`."""

    @classmethod
    def of(cls, settings: Settings) -> AgeRule:
        """The wait ends with a group's deadline; where none is set, with that of a round of weights."""
        deadline_s = settings.rollouter.group_timeout_s
        return cls(
            max_staleness=settings.max_staleness,
            on_stale=OnStale(settings.on_stale),
            weight_base=settings.stale_weight_base,
            max_requeues=settings.rollouter.max_requeues,
            wait_s=settings.weight_sync.round_timeout_s if deadline_s is None else deadline_s,
        )

    def reason_for(self, group_id: str) -> DropReason:
        """Under which reason a group that is too old is dropped. One that no rollouter of ours named cannot be retried."""
        name = parse(group_id)
        if self.on_stale is not OnStale.RETRY or name is None:
            return DropReason.STALE
        return DropReason.STALE_RETRIED if name.num_requeues < self.max_requeues else DropReason.STALE_FOR_GOOD


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The trainer's own line of versions."""

    incarnation: str
    origin_version: int = 0
    """The version at which this incarnation began."""

    def oldest(self, sample: Sample) -> int:
        """The version from which the sample's age counts; NO_VERSION if no policy sampled any of it."""
        return self._counted(sample, sample.oldest_version)

    def has_lost(self, sample: Sample) -> bool:
        """Whether a version that sampled tokens of it was lost with a rollback."""
        return sample.incarnation != self.incarnation and int(sample.versions.max()) > self.origin_version

    def age(self, sample: Sample, policy_version: int) -> int:
        """Versions between the oldest one of the sample and `policy_version`; 0 if no policy sampled any of it."""
        oldest = self.oldest(sample)
        return 0 if oldest == NO_VERSION else policy_version - oldest

    def ages(self, sample: Sample, policy_version: int) -> npt.NDArray[np.int64]:
        """[R] of each run of equal version; 0 for what no policy sampled."""
        versions = sample.versions.tolist()
        ages = [0 if one == NO_VERSION else policy_version - self._counted(sample, one) for one in versions]
        return np.array(ages, dtype=np.int64)

    def _counted(self, sample: Sample, version: int) -> int:
        return version if sample.incarnation == self.incarnation else min(version, self.origin_version)


def oldest_of(group: Group, lineage: Lineage) -> int | None:
    """The oldest version in the group from which age counts; None if no policy sampled any of it."""
    return oldest_among(group.members, lineage)


def oldest_among(leases: Iterable[Lease], lineage: Lineage) -> int | None:
    """The same of any records; closed seats have no age."""
    versions = [lineage.oldest(lease.sample) for lease in leases if isinstance(lease, Leased)]
    return min((version for version in versions if version != NO_VERSION), default=None)


def drop_reason(group: Group, rule: AgeRule, lineage: Lineage, *, policy_version: int) -> DropReason | None:
    """Why the group may not be trained at `policy_version`; None: it may."""
    oldest = oldest_of(group, lineage)
    if rule.max_staleness is None or oldest is None or policy_version - oldest <= rule.max_staleness:
        return None
    return None if rule.on_stale is OnStale.DOWNWEIGHT else rule.reason_for(group.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How a step's tokens are weighted by age. Stands in the journal beside the step, so that it is taken again alike."""

    base: float
    max_staleness: int
    policy_version: int
    incarnation: str
    origin_version: int

    @classmethod
    def of(cls, rule: AgeRule, lineage: Lineage, *, policy_version: int) -> Weighting | None:
        """None where every token counts whole, whatever its age."""
        if rule.on_stale is not OnStale.DOWNWEIGHT or rule.max_staleness is None:
            return None
        return cls(
            base=rule.weight_base,
            max_staleness=rule.max_staleness,
            policy_version=policy_version,
            incarnation=lineage.incarnation,
            origin_version=lineage.origin_version,
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Weighting | None:
        return cls(**plain) if plain else None

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def weights(self, sample: Sample) -> npt.NDArray[np.float32]:
        """[T] base ** max(0, age - max_staleness); 1 for what no policy sampled."""
        lineage = Lineage(incarnation=self.incarnation, origin_version=self.origin_version)
        beyond = np.maximum(0, lineage.ages(sample, self.policy_version) - self.max_staleness)
        ends = np.append(sample.version_starts[1:], sample.num_tokens)
        of_runs: npt.NDArray[np.float64] = np.power(self.base, beyond)
        weights: npt.NDArray[np.float32] = np.repeat(of_runs, ends - sample.version_starts).astype(np.float32)
        return weights

    def is_down(self, sample: Sample) -> bool:
        """Whether some trained token of it counts less than 1."""
        return bool((self.weights(sample)[sample.loss_mask != 0] < 1).any())


def weights_of(weighting: Weighting | None, samples: Iterable[Sample]) -> list[npt.NDArray[np.float32]] | None:
    """As `train_step` takes them."""
    return None if weighting is None else [weighting.weights(sample) for sample in samples]


def by_age(groups: Iterable[Group], lineage: Lineage) -> list[Group]:
    """The oldest first; those of equal age in their order."""

    def oldest(group: Group) -> float:
        version = oldest_of(group, lineage)
        return float("inf") if version is None else version

    return sorted(groups, key=oldest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """What a step that a new version follows is held for."""

    next_version: int
    num_open_groups: int
    """Groups that would be too old and of which some seats are still to come."""
    oldest_in_flight: int | None
    """The version of the oldest rollout in flight, if it would be too old."""

    def __str__(self) -> str:
        parts = []
        if self.oldest_in_flight is not None:
            parts.append(f"rollouts in flight since version {self.oldest_in_flight}")
        if self.num_open_groups:
            parts.append(f"the missing seats of {self.num_open_groups} groups")
        return f"version {self.next_version} is held (on_stale=wait) for {' and '.join(parts)}"


def awaited(
    rule: AgeRule,
    *,
    policy_version: int,
    ready: Sequence[int | None],
    open_groups: Iterable[int | None],
    oldest_in_flight: int | None,
    groups_per_step: int,
) -> Awaited | None:
    """What the last step at `policy_version` still waits for; None: it may be taken.

    ready: of each whole group the oldest version; open_groups: of each group that is not whole, as far as it is there;
    oldest_in_flight: of the rollouts that have brought nothing yet. Only what is trainable now and would not be at the next
    version is waited for, and nothing once such groups fill the step: it could not take more of them.
    """
    if rule.on_stale is not OnStale.WAIT or rule.max_staleness is None:
        return None
    last_chance = policy_version - rule.max_staleness
    if sum(version is not None and version <= last_chance for version in ready) >= groups_per_step:
        return None
    num_open = sum(version == last_chance for version in open_groups)
    flying = oldest_in_flight if oldest_in_flight == last_chance else None
    if not num_open and flying is None:
        return None
    return Awaited(next_version=policy_version + 1, num_open_groups=num_open, oldest_in_flight=flying)
