"""A rollouter and a trainer in small, for schedules of any kind: the real admission and the real account of steps, no clock.

Each event is one thing that happens somewhere; whoever calls decides which is next. Groups end in whatever order, seats close,
groups are dropped and refunded, engines lag behind what is published, either side dies, settings change. The model keeps a book
of its own: for each trained group the version at its admission, the threshold and the period that held then, the version that
trained it and how many seats overtook it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from rollouter.admission import Admission, Conditions, HeldVersion, Hold
from sample_bus.protocols import Resumption
from trainer.demand import StepAccount, next_sync_step

NEVER = 1 << 40
"""Steps of a run that does not end."""


@dataclass(kw_only=True)
class Group:
    number: int
    """In order of admission."""
    incarnation: int
    """The trainer's, at admission."""
    version: int
    """That the engines held at admission: no token is older."""
    threshold: Fraction
    period: int
    reach: Fraction
    """Seats from what steps had taken to the limit, at admission."""
    num_closed: int = 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    group: Group
    incarnation: int
    version: int
    """The trainer's, when the step took it."""
    overtaken_by: int
    """Seats that were admitted later and taken earlier, since the origin."""

    @property
    def age(self) -> int:
        return self.version - self.group.version

    @property
    def is_comparable(self) -> bool:
        """Admitted since the trainer that took it counts."""
        return self.group.incarnation == self.incarnation


@dataclass(kw_only=True)
class _Saved:
    step: int
    version: int
    trained: int
    """How many groups, in all."""


@dataclass(kw_only=True)
class Run:
    """Both daemons."""

    group_size: int
    groups_per_step: int
    trigger: int
    threshold: Fraction
    max_staleness: int | None = None
    concurrency: int = 1 << 30
    start: int = 0
    """The step and the version at which the run begins."""
    first_come: bool = True
    """The trainer takes what is whole first; else what was admitted first."""

    in_flight: list[Group] = field(default_factory=list)
    queue: list[Group] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    incarnation: int = 0
    admitted: int = 0
    refunded: int = 0
    """Seats, since the origin."""
    shortest_period: int = NEVER
    """Seats of the shortest period that was published."""

    def __post_init__(self) -> None:
        self.step = self.version = self.held = self.origin = self.start
        self.saved = _Saved(step=self.step, version=self.version, trained=0)
        self._begin(Admission(), accounted=0)

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def period(self) -> int:
        return self.trigger * self.samples_per_step

    @property
    def alive(self) -> int:
        """Seats in flight and queued."""
        return (len(self.in_flight) + len(self.queue)) * self.group_size

    @property
    def taken_since_origin(self) -> int:
        """Seats."""
        return (len(self.trained) - self.saved_trained) * self.group_size

    @property
    def limit(self) -> Fraction:
        """Of the account at this moment, from the definition: what steps take until the version after the held one, plus
        threshold * K."""
        if self.held < self.version:
            due = self._published[self.held + 1]
        else:
            due = self.taken_since_origin + (self.account.sync_step - self.step) * self.samples_per_step
        return due + self.threshold * self.period

    def conditions(self) -> Conditions:
        return Conditions(
            group_size=self.group_size,
            staleness_threshold=float(self.threshold),
            max_concurrent_rollouts=self.concurrency,
            max_staleness=self.max_staleness,
            num_samples_needed=None,
            num_in_flight=len(self.in_flight) * self.group_size,
            num_unsettled=0,
            num_open_seats=0,
            samples_per_step=self.samples_per_step,
            samples_per_period=self.period,
            max_queued_samples=NEVER,
            journal_blocked=False,
            evaluating=False,
            draining=False,
        )

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self) -> Hold | None:
        """One group, if it may start."""
        hold = self.admission.hold(self.conditions())
        if hold is None:
            self.admission.admit(self.group_size)
            self.in_flight.append(
                Group(
                    number=self.admitted,
                    incarnation=self.incarnation,
                    version=self.held,
                    threshold=self.threshold,
                    period=self.period,
                    reach=self.limit - self.taken_since_origin,
                )
            )
            self.admitted += 1
        return hold

    def admit_all(self) -> Hold:
        """As many as may start; what holds the next one."""
        while (hold := self.admit()) is None:
            pass
        return hold

    def finish(self, which: int = 0, *, num_closed: int = 0) -> None:
        """A group in flight becomes whole: each seat brings its sample or is closed."""
        if self.in_flight:
            group = self.in_flight.pop(which % len(self.in_flight))
            group.num_closed = min(num_closed, self.group_size - 1)
            self.queue.append(group)

    def drop(self, which: int = 0) -> None:
        """The trainer gives a group up and refunds its seats."""
        if self.queue:
            self._drop(self.queue[which % len(self.queue)])

    def take_step(self) -> bool:
        """A step, if its groups are there; afterwards a version, if it is time for one."""
        if self.max_staleness is not None:
            for group in [group for group in self.queue if self._is_stale(group)]:
                self._drop(group)
        if len(self.queue) < self.groups_per_step:
            return False
        if not self.first_come:
            self.queue.sort(key=lambda group: group.number)
        batch, self.queue = self.queue[: self.groups_per_step], self.queue[self.groups_per_step :]
        alive = [*self.in_flight, *self.queue]
        for position, group in enumerate(batch):
            ahead = [*self.trained[self.saved_trained :], *(self._taken(one, 0) for one in batch[:position])]
            overtaken_by = sum(one.group.number > group.number for one in ahead) * self.group_size
            self.trained.append(self._taken(group, overtaken_by))
        assert all(one not in alive for one in batch)
        self.step += 1
        self.account.begin(self.step, len(batch) * self.group_size)
        self._tell()
        if self.account.is_due:
            self.publish()
        return True

    def publish(self) -> None:
        before = self.account.consumed_seats
        self.version += 1
        self.account.publish(next_sync_step=self._next_sync_step())
        self._published[self.version] = self.account.consumed_seats
        self.shortest_period = min(self.shortest_period, self.account.consumed_seats - before)
        self._tell()

    def commit(self) -> None:
        """The engines take the newest version."""
        self.held = self.version
        self.admission.take_held(HeldVersion(incarnation=str(self.incarnation), policy_version=self.held))

    def checkpoint(self) -> None:
        self.saved = _Saved(step=self.step, version=self.version, trained=len(self.trained))

    def restart_trainer(self) -> None:
        """From its checkpoint: what was trained since comes again, first; numbers of versions that were lost come again."""
        again = [one.group for one in self.trained[self.saved.trained :]]
        del self.trained[self.saved.trained :]
        self.queue = [*again, *self.queue]
        self.incarnation += 1
        self.step, self.version, self.origin = self.saved.step, self.saved.version, self.saved.version
        self.refunded = 0
        self._begin(self.admission, accounted=len(self.queue) * self.group_size)

    def restart_rollouter(self) -> None:
        """Another process plays on what the journal says is in flight."""
        accounted = len(self.queue) * self.group_size + self.taken_since_origin
        self.admission = Admission()
        self._meet(accounted)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, admission: Admission, *, accounted: int) -> None:
        self.admission = admission
        self.saved_trained = len(self.trained)
        self.account = StepAccount(begun_step=self.step, sync_step=self._next_sync_step())
        self._published = {self.version: 0}
        self._meet(accounted)

    def _meet(self, accounted: int) -> None:
        self.admission.rebase(
            Resumption(
                origin_version=self.origin, accounted=accounted, incarnation=str(self.incarnation), dropped=self.refunded
            ),
            in_flight=len(self.in_flight) * self.group_size,
        )
        self.commit()
        self._tell()

    def _tell(self) -> None:
        self.admission.take_trainer(
            incarnation=str(self.incarnation),
            origin_version=self.origin,
            policy_version=self.version,
            num_refunded=self.refunded,
            **self.account.said(),
        )

    def _next_sync_step(self) -> int:
        return next_sync_step(self.step, trigger_parameter_sync_step=self.trigger, num_steps=NEVER)

    def _taken(self, group: Group, overtaken_by: int) -> Trained:
        return Trained(group=group, incarnation=self.incarnation, version=self.version, overtaken_by=overtaken_by)

    def _is_stale(self, group: Group) -> bool:
        assert self.max_staleness is not None
        return group.incarnation == self.incarnation and self.version - group.version > self.max_staleness

    def _drop(self, group: Group) -> None:
        self.queue.remove(group)
        self.dropped.append(group)
        self.refunded += self.group_size
        self._tell()


def age_bound(one: Trained) -> int:
    """What pacing promises of a group that `overtaken_by` seats overtook, while the period does not change."""
    return math.ceil(one.group.threshold + Fraction(one.overtaken_by, one.group.period))
