"""The gate before each step: which whole groups may be trained, in which order, and how long the step is held for aged ones.

Invariant: the rule in force is read at each decision, when a batch is taken; a step is held for `AgeRule.wait_s` at most,
counted from the moment at which it could have been taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from sample_bus.messages import RollouterStatus
from sample_bus.protocols import Lease
from sample_bus.sample import Sample
from trainer.aged import (
    AgeRule,
    Awaited,
    Lineage,
    OnStale,
    Weighting,
    awaited,
    by_age,
    drop_reason,
    oldest_among,
    oldest_of,
)
from trainer.groups import DropReason, Group

log = structlog.get_logger()


class AgeGate:
    """Belongs to the intake."""

    def __init__(
        self,
        *,
        rule: Callable[[], AgeRule],
        lineage: Lineage,
        ask: Callable[[str, str], None] = lambda group_id, task_id: None,
        on_hold: Callable[[Awaited], None] = lambda awaited: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` is told each group that is dropped to have its task issued again, with the task; `on_hold` what a step is held
        for."""
        self._on_hold = on_hold
        self._rule = rule
        self._lineage = lineage
        self.ask = ask
        self._clock = clock
        self._oldest_in_flight: int | None = None
        self._held_since: float | None = None
        self.awaits: Awaited | None = None
        """What the step is held for at the moment."""

    def stale_reason(self, group_id: str) -> DropReason:
        """Under which reason a group is dropped that is too old."""
        return self._rule().reason_for(group_id)

    def drop_reason(self, group: Group, policy_version: int) -> DropReason | None:
        """Why the group may not be trained at `policy_version`; None: it may."""
        return drop_reason(group, self._rule(), self._lineage, policy_version=policy_version)

    def ordered(self, groups: Iterable[Group]) -> Sequence[Group]:
        """As steps take them: in order of arrival; the oldest first where versions wait for them."""
        return by_age(groups, self._lineage) if self._rule().on_stale is OnStale.WAIT else list(groups)

    def weighting(self, policy_version: int) -> Weighting | None:
        """How the tokens of a step that is taken now are weighted."""
        return Weighting.of(self._rule(), self._lineage, policy_version=policy_version)

    def has_lost(self, sample: Sample) -> bool:
        """Whether a rollback has lost a version that sampled tokens of it."""
        return self._lineage.has_lost(sample)

    def take_status(self, status: RollouterStatus) -> bool:
        """What the rollouter has in flight; whether that says something new."""
        mine = status.incarnation == self._lineage.incarnation
        oldest = status.oldest_in_flight_version if mine else None
        is_new = oldest != self._oldest_in_flight
        self._oldest_in_flight = oldest
        return is_new

    def holds(
        self, ready: Iterable[Group], open_groups: Iterable[Iterable[Lease]], *, policy_version: int, groups_per_step: int
    ) -> bool:
        """Whether the step, which has all that it needs and is the last at `policy_version`, waits for aged groups."""
        rule = self._rule()
        lacks = awaited(
            rule,
            policy_version=policy_version,
            ready=[oldest_of(group, self._lineage) for group in ready],
            open_groups=[oldest_among(leases, self._lineage) for leases in open_groups],
            oldest_in_flight=self._oldest_in_flight,
            groups_per_step=groups_per_step,
        )
        if lacks is None:
            return False
        now = self._clock()
        if self._held_since is None:
            self._held_since = now
            log.info("step is held", awaits=str(lacks), at_most_s=rule.wait_s)
        if now - self._held_since < rule.wait_s:
            self.awaits = lacks
            self._on_hold(lacks)
            return True
        log.warning("step is held no longer: what comes now will be too old", awaited=str(lacks), after_s=rule.wait_s)
        return False

    def left_s(self) -> float | None:
        """Seconds until the step is held no longer; None: it is not held."""
        if self._held_since is None or self.awaits is None:
            return None
        return max(0.0, self._held_since + self._rule().wait_s - self._clock())

    def decide(self) -> None:
        """A decision begins: whether the step is held is open again."""
        self.awaits = None

    def taken(self) -> None:
        """A batch was handed out."""
        self._held_since = self.awaits = None
