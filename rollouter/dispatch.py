"""Dispatch: starts groups as admission allows, plays their rollouts, hands their records to the bus.

Invariant: every admitted rollout ends exactly once, by a record in the stream: its sample, or its closed seat. What a process
before this one had in flight is played on, under the same group, seat and count of attempts. Consumes tasks; waits for an event
(version, setting, refund, end of a rollout, a group's deadline), never polls. Ends when drained, or by the first error that
stops the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from agent_loop.engine import SamplingParams
from agent_loop.task import Task
from rollouter.admission import Admission, Conditions, Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.books import GroupBook
from rollouter.errors import AllQuarantined, DataExhausted, RolloutError
from rollouter.failures import FailureReason
from rollouter.flight import Cockpit, Flight
from rollouter.issues import Issues
from rollouter.live import LiveView
from rollouter.outcomes import replay_number, replay_process
from rollouter.prompts import Issue, PromptSource
from rollouter.rollouts import Plan
from sample_bus.group_id import GroupName, num_requeues
from sample_bus.journal import GroupAdmitted
from sample_bus.protocols import Producer, Rejection

log = structlog.get_logger()

PORTION_S = 0.005
"""For so long at most groups are admitted in one turn of the event loop."""


@dataclass(slots=True, kw_only=True)
class Situation:
    """What other components know and a decision reads."""

    num_samples_needed: int | None = None
    evaluating: Callable[[], bool] = field(default=lambda: False)
    draining: bool = False


class Dispatcher:
    """The rollouts of this process in one run."""

    def __init__(
        self,
        *,
        admission: Admission,
        keeper: Bookkeeper,
        source: PromptSource,
        issues: Issues,
        cockpit: Cockpit,
        producer: Producer,
        live: LiveView,
        stop_token_ids: tuple[int, ...],
        situation: Situation,
        process: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`process` names this process in the ids of groups that it admits."""
        self._admission = admission
        self._keeper = keeper
        self._books = keeper.books
        self._source = source
        self._issues = issues
        self._cockpit = cockpit
        self._producer = producer
        self._live = live
        self._stop_token_ids = stop_token_ids
        self._situation = situation
        self._process = process
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._flights: dict[str, dict[int, Flight]] = {}
        """By group and seat."""
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._rejections: list[Rejection] = []
        self._fatal: BaseException | None = None
        self.holding: Hold | None = Hold.NO_TRAINER
        """Why no group starts at the moment."""
        cockpit.on_end, cockpit.on_refill, cockpit.on_lost_group = self._landed, self._refilled, self._lose_group

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight and nothing is timed."""
        return not self._flights and not self._deadlines

    def wake(self) -> None:
        """Something that a decision reads has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Play on what is open, then admit and play until drained. Raises TooManyFailures, DataExhausted, AllQuarantined, and
        errors of the bus."""
        try:
            async with asyncio.TaskGroup() as rollouts:
                for group_id in list(self._books.open_groups):
                    self._start_group(group_id, rollouts)
                while True:
                    self._wake.clear()
                    if self._fatal is not None:
                        raise self._fatal
                    while self._rejections:
                        self._void(self._rejections.pop(0), rollouts)
                    self._admit_all(rollouts)
                    if self._situation.draining and self.is_idle:
                        log.info("drained", **self._books.counts().model_dump(exclude={"failed"}))
                        return
                    await self._wake.wait()
        finally:
            for deadline in self._deadlines.values():
                deadline.cancel()
            await self._cockpit.close()

    def cancel_hopeless(self, published: int, incarnation: str) -> int:
        """Give up rollouts that can no longer arrive within max_staleness of version `published`; how many. None is given up
        where what is too old is trained nevertheless."""
        bound = self._live.settings.max_staleness
        if bound is None or self._live.settings.on_stale == "downweight":
            return 0
        hopeless = [
            flight
            for flight in self._all_flights()
            if flight.since.incarnation == incarnation and published - flight.since.policy_version > bound
        ]
        return _give_up(hopeless, FailureReason.STALE, f"version {published} is published and max_staleness={bound}")

    def oldest_in_flight(self) -> int | None:
        """The oldest version of the trainer that counts here since which a rollout is played."""
        incarnation = self._admission.incarnation
        versions = (flight.since.policy_version for flight in self._all_flights() if flight.since.incarnation == incarnation)
        return min(versions, default=None)

    def take_rejection(self, rejection: Rejection) -> None:
        """The trainer's end could not decode a record: its seat stays empty."""
        self._rejections.append(rejection)
        self.wake()

    def conditions(self) -> Conditions:
        """What a decision reads, now."""
        settings = self._live.settings
        return Conditions(
            group_size=settings.group_size,
            staleness_threshold=settings.staleness_threshold,
            max_concurrent_rollouts=settings.rollouter.max_concurrent_rollouts,
            max_staleness=settings.max_staleness,
            num_samples_needed=self._situation.num_samples_needed,
            num_in_flight=self._books.in_flight,
            num_unsettled=self._producer.producer_statistics().unsettled + self._books.in_flight,
            num_open_seats=sum(len(group.seats) for group in self._books.open_groups.values()),
            samples_per_step=settings.samples_per_step,
            samples_per_period=settings.samples_per_period,
            max_queued_samples=settings.bus.max_queued_samples,
            journal_blocked=self._keeper.is_blocked,
            evaluating=self._situation.evaluating(),
            draining=self._situation.draining,
        )

    # ── admission ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit_all(self, rollouts: asyncio.TaskGroup) -> None:
        """As many as may start, in portions: what else the loop has to do gets its turns in between."""
        self._cockpit.is_current()
        loop = asyncio.get_running_loop()
        until = loop.time() + PORTION_S
        while True:
            hold = self._admission.hold(self.conditions())
            if hold is None:
                issue = self._issues.next()
                if isinstance(issue, Issue):
                    self._admit(issue, rollouts)
                    if loop.time() < until:
                        continue
                    loop.call_soon(self.wake)
                    self._on_change()
                    return
                hold = issue
                if hold is Hold.LOOKING:
                    loop.call_soon(self.wake)
                elif hold is not Hold.READING and not self._flights:
                    raise self._no_task_left(hold)
            if hold is not self.holding:
                self.holding = hold
                log.debug("admission holds", why=hold.value, outstanding=self._admission.outstanding)
            self._on_change()
            return

    def _admit(self, issue: Issue, rollouts: asyncio.TaskGroup) -> None:
        settings = self._live.settings
        held = self._admission.held
        assert held is not None, "a group was admitted and the engines hold no version"
        self.holding = None
        process = replay_process(self._process, issue.replay)
        group_id = str(GroupName(issue.task.task_id, issue.number, process, issue.requeue))
        self._admission.admit(settings.group_size)
        self._keeper.write(
            GroupAdmitted(
                at=self._keeper.now(),
                group_id=group_id,
                task_id=issue.task.task_id,
                issue=issue.number,
                group_size=settings.group_size,
                policy_version=held.policy_version,
                incarnation=held.incarnation,
                settings_revision=self._live.revision,
                temperature=settings.sampling.temperature,
                max_tokens=settings.sampling.max_tokens,
                replaces=issue.replaces,
            )
        )
        self._start_group(group_id, rollouts)
        log.debug(
            "group admitted", group_id=group_id, policy_version=held.policy_version, settings_revision=self._live.revision
        )

    def _no_task_left(self, hold: Hold) -> RolloutError:
        if hold is Hold.QUARANTINED:
            return AllQuarantined(
                f"all {self._source.num_tasks} tasks are in quarantine ({self._issues.quarantine.directory}): `headrace "
                "quarantine list` says why each failed, `headrace quarantine release` has it issued again"
            )
        epochs = self._live.settings.data.num_epochs
        held_back = len(self._books.quarantined)
        words = f", {held_back} of them in quarantine" if held_back else ""
        return DataExhausted(f"data.num_epochs={epochs} passes are over after {self._issues.num_issued} tasks{words}")

    # ── flights ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_group(self, group_id: str, rollouts: asyncio.TaskGroup) -> None:
        """Start the open seats of a group that the books know."""
        group = self._books.open_groups[group_id]
        flights = [self._start(group, number, rollouts) for number, seat in enumerate(group.seats) if seat.is_open]
        if self._cockpit.is_lost(group):
            _give_up(flights, FailureReason.SIBLINGS_FAILED, "a sibling was given up")
        self._arm(group_id, group)

    def _void(self, rejection: Rejection, rollouts: asyncio.TaskGroup) -> None:
        """The record is settled where it was refused: a closed seat takes its place; one that the broker lost is played again.
        Raises TooManyFailures."""
        place = self._books.place_of(rejection.id)
        group = None if place is None else self._books.group(place[0])
        if place is None or group is None:
            log.warning("refused record is not known any more", seq=rejection.id.seq, error=rejection.error)
            return
        flight = self._start(group, place[1], rollouts)
        if rejection.lost and not group.seats[place[1]].closed:
            self._cockpit.lost(flight, rejection.error)
        else:
            self._cockpit.refused(flight, rejection.error)

    def _start(self, group: GroupBook, number: int, rollouts: asyncio.TaskGroup) -> Flight:
        """Start what a seat still has to bring: its rollout, or its closed seat."""
        admitted, group_id = group.admitted, group.admitted.group_id
        held = self._admission.held
        assert held is not None, "a rollout starts and the engines hold no version"
        again = f"+{times}" if (times := num_requeues(group_id)) else ""
        again += f"r{replay}" if (replay := replay_number(group_id)) else ""
        plan = Plan(
            task=self._task_of(admitted),
            group_id=group_id,
            seat=number,
            group_size=admitted.group_size,
            rollout_id=f"{group_id}/{number}",
            seed_key=f"{admitted.task_id}#{admitted.issue}{again}/{number}",
            sampling=SamplingParams(
                temperature=admitted.temperature, max_tokens=admitted.max_tokens, stop_token_ids=self._stop_token_ids
            ),
            settings_revision=admitted.settings_revision,
            incarnation=held.incarnation,
        )
        flight = Flight(plan=plan, group=group, since=held)
        self._flights.setdefault(group_id, {})[number] = flight
        rollouts.create_task(self._fly(flight), name=plan.rollout_id)
        return flight

    def _task_of(self, admitted: GroupAdmitted) -> Task:
        task = self._source.task(admitted.task_id)
        if task is None:
            raise RolloutError(f"group {admitted.group_id}: the data has no task {admitted.task_id!r} any more")
        return task

    async def _fly(self, flight: Flight) -> None:
        """One rollout to its end. Raises nothing: what must stop the run is left in `_fatal`."""
        try:
            await self._cockpit.fly(flight)
        except Exception as error:  # noqa: BLE001 - kept whole and raised by run(), so that siblings end in order
            self._fatal = self._fatal or error
        finally:
            self.wake()

    def _landed(self, flight: Flight) -> None:
        """Its record is in the stream, or the run is over."""
        group_id = flight.plan.group_id
        seats = self._flights[group_id]
        if seats.get(flight.plan.seat) is flight:
            del seats[flight.plan.seat]
        if not seats:
            del self._flights[group_id]
            deadline = self._deadlines.pop(group_id, None)
            if deadline is not None:
                deadline.cancel()

    def _lose_group(self, flight: Flight) -> None:
        """What the siblings still do is in vain."""
        siblings = [sibling for sibling in self._flights[flight.plan.group_id].values() if sibling is not flight]
        _give_up(siblings, FailureReason.SIBLINGS_FAILED, f"rollout {flight.plan.rollout_id} was given up")

    def _refilled(self, flight: Flight, reason: FailureReason) -> None:
        """A fresh rollout takes the seat; after a group's deadline it has a whole one again."""
        if reason is FailureReason.GROUP_DEADLINE:
            self._arm(flight.plan.group_id, flight.group)

    def _arm(self, group_id: str, group: GroupBook) -> None:
        timeout_s = self._live.settings.rollouter.group_timeout_s
        before = self._deadlines.pop(group_id, None)
        if before is not None:
            before.cancel()
        if timeout_s is not None:
            left_s = max(0.0, timeout_s - group.open_for_s(self._keeper.now()))
            self._deadlines[group_id] = asyncio.get_running_loop().call_later(left_s, self._expire, group_id, timeout_s)

    def _expire(self, group_id: str, timeout_s: float) -> None:
        """A group's deadline: seats that have nothing to offer are given up."""
        self._deadlines.pop(group_id, None)
        words = f"its group was open for {timeout_s:g} s (rollouter.group_timeout_s)"
        late = _give_up(self._flights.get(group_id, {}).values(), FailureReason.GROUP_DEADLINE, words)
        log.warning("group deadline", group_id=group_id, given_up=late, timeout_s=timeout_s)

    def _all_flights(self) -> Iterable[Flight]:
        return (flight for seats in self._flights.values() for flight in seats.values())


def _give_up(flights: Iterable[Flight], reason: FailureReason, message: str) -> int:
    """Have them end; how many could still be ended."""
    return sum(flight.give_up(reason, message) for flight in list(flights))
