"""Dispatch: starts groups as admission allows, plays their rollouts, hands the samples to the bus.

Invariant: every admitted rollout ends exactly once: its sample is on the bus, or the trainer is told that its seat stays empty.
Consumes tasks, produces samples; waits for an event (version, setting, drop, end of a rollout), never for a clock. Ends when
drained, or by the first error that stops the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from agent_loop.engine import SamplingParams
from rollouter.admission import Admission, Conditions, HeldVersion, Hold
from rollouter.errors import DataExhausted
from rollouter.failures import FINAL, FailureReason, FailureStreak, reason_of
from rollouter.live import LiveView
from rollouter.prompts import Issue, PromptSource
from rollouter.reports import Reports
from rollouter.rollouts import Episode, Plan, Runner, sample_of
from sample_bus.errors import BusError, Ended, PeerLost
from sample_bus.messages import RolloutCounts, RolloutDropped
from sample_bus.protocols import Producer
from sample_bus.sample import Sample

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    plan: Plan
    since: HeldVersion
    """What the engines held when its current attempt began: no token of it is older."""
    task: asyncio.Task[None] | None = None
    offering: bool = False
    """Its sample is on its way to the bus: too late to give it up."""
    hopeless: FailureReason | None = None
    """Why it was given up while it ran."""


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    """A group of which some seats are in flight."""

    num_in_flight: int
    arrived: list[int] = field(default_factory=list)
    """Seats whose samples the trainer holds."""


@dataclass(slots=True, kw_only=True)
class Situation:
    """What other components know and a decision reads."""

    num_samples_needed: int | None = None
    evaluating: Callable[[], bool] = field(default=lambda: False)
    draining: bool = False


class Dispatcher:
    """The rollouts of this process."""

    def __init__(
        self,
        *,
        admission: Admission,
        source: PromptSource,
        runner: Runner,
        producer: Producer,
        reports: Reports,
        live: LiveView,
        stop_token_ids: tuple[int, ...],
        situation: Situation,
        process: str,
        on_change: Callable[[], None] = lambda: None,
        rebase: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`process` names this process in group ids, so that those of an earlier one stay apart. `rebase` is called before
        each decision and each settlement: it notices a new trainer before anything is counted for the old one."""
        self._admission = admission
        self._source = source
        self._runner = runner
        self._producer = producer
        self._reports = reports
        self._live = live
        self._stop_token_ids = stop_token_ids
        self._situation = situation
        self._process = process
        self._on_change = on_change
        self._rebase = rebase
        self._now = now
        self._wake = asyncio.Event()
        self._in_flight: set[_InFlight] = set()
        self._open_groups: dict[str, _OpenGroup] = {}
        self._broken_groups: dict[str, int] = {}
        self._streak = FailureStreak(limit=live.settings.rollouter.max_consecutive_failures)
        self._fatal: BaseException | None = None
        self.holding: Hold | None = Hold.NO_TRAINER
        """Why no group starts at the moment."""

    def wake(self) -> None:
        """Something that a decision reads has changed."""
        self._wake.set()

    def counts(self) -> RolloutCounts:
        return self._admission.counts()

    async def run(self) -> None:
        """Admit and play until drained. Raises TooManyFailures, DataExhausted, and errors of the bus."""
        async with asyncio.TaskGroup() as rollouts:
            while True:
                self._wake.clear()
                if self._fatal is not None:
                    raise self._fatal
                for group_id, seat in self._broken_groups.items():
                    rollouts.create_task(self._close_group(group_id, seat))
                self._broken_groups.clear()
                self._admit_all(rollouts)
                if self._situation.draining and not self._in_flight:
                    log.info("drained", **self.counts().model_dump(exclude={"failed"}))
                    return
                await self._wake.wait()

    def cancel_hopeless(self, published: int, incarnation: str) -> int:
        """Give up rollouts that can no longer arrive within max_staleness of version `published`; how many."""
        bound = self._live.settings.max_staleness
        if bound is None:
            return 0
        return self._cancel(
            [
                rollout
                for rollout in self._in_flight
                if rollout.since.incarnation == incarnation and published - rollout.since.policy_version > bound
            ],
            FailureReason.STALE,
        )

    def forget_arrived(self) -> int:
        """Another trainer took over, and what the old one held is gone: groups of which some seats had arrived can never be
        whole. Their other seats are given up and the new trainer is told; how many groups."""
        broken = {group_id: group.arrived[0] for group_id, group in self._open_groups.items() if group.arrived}
        for group_id in broken:
            self._open_groups[group_id].arrived.clear()
        self._broken_groups |= broken
        self._cancel([rollout for rollout in self._in_flight if rollout.plan.group_id in broken], FailureReason.SIBLINGS_LOST)
        self.wake()
        return len(broken)

    def _cancel(self, rollouts: list[_InFlight], reason: FailureReason) -> int:
        chosen = [rollout for rollout in rollouts if not rollout.offering and rollout.hopeless is None]
        for rollout in chosen:
            rollout.hopeless = reason
            if rollout.task is not None:
                rollout.task.cancel()
        return len(chosen)

    def conditions(self) -> Conditions:
        """What a decision reads, now."""
        settings = self._live.settings
        return Conditions(
            group_size=settings.group_size,
            staleness_threshold=settings.staleness_threshold,
            max_concurrent_rollouts=settings.rollouter.max_concurrent_rollouts,
            max_staleness=settings.max_staleness,
            num_samples_needed=self._situation.num_samples_needed,
            num_unsettled=self._producer.producer_statistics().unsettled + self._admission.in_flight,
            num_open_seats=len(self._open_groups) * settings.group_size,
            samples_per_step=settings.samples_per_step,
            max_queued_samples=settings.bus.max_queued_samples,
            evaluating=self._situation.evaluating(),
            draining=self._situation.draining,
        )

    def _admit_all(self, rollouts: asyncio.TaskGroup) -> None:
        self._rebase()
        while True:
            hold = self._admission.hold(self.conditions())
            if hold is None:
                issue = self._source.next()
                if issue is not None:
                    self._start(issue, rollouts)
                    continue
                hold = Hold.NO_DATA
                if not self._in_flight:
                    epochs = self._live.settings.data.num_epochs
                    raise DataExhausted(f"data.num_epochs={epochs} passes are over after {self._source.cursor.issued} tasks")
            if hold is not self.holding:
                self.holding = hold
                log.debug("admission holds", why=hold.value, outstanding=self._admission.outstanding)
            self._on_change()
            return

    def _start(self, issue: Issue, rollouts: asyncio.TaskGroup) -> None:
        settings = self._live.settings
        held = self._admission.held
        assert held is not None, "a group was admitted and the engines hold no version"
        self.holding = None
        self._admission.admit(settings.group_size)
        group = f"{issue.task.task_id}#{issue.number}"
        sampling = SamplingParams(
            temperature=settings.sampling.temperature,
            max_tokens=settings.sampling.max_tokens,
            stop_token_ids=self._stop_token_ids,
        )
        self._open_groups[f"{group}@{self._process}"] = _OpenGroup(num_in_flight=settings.group_size)
        for seat in range(settings.group_size):
            plan = Plan(
                task=issue.task,
                group_id=f"{group}@{self._process}",
                seat=seat,
                group_size=settings.group_size,
                rollout_id=f"{group}@{self._process}/{seat}",
                seed_key=f"{group}/{seat}",
                sampling=sampling,
                settings_revision=self._live.revision,
                incarnation=held.incarnation,
            )
            rollout = _InFlight(plan=plan, since=held)
            self._in_flight.add(rollout)
            rollout.task = rollouts.create_task(self._play(rollout), name=plan.rollout_id)
        log.debug("group admitted", group_id=group, policy_version=held.policy_version, settings_revision=self._live.revision)

    async def _play(self, rollout: _InFlight) -> None:
        """One rollout to its end. Raises nothing: what must stop the run is left in `_fatal`."""
        try:
            try:
                await self._attempts(rollout)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if rollout.hopeless is None or task is None or task.uncancel() > 0:
                    raise
                await self._give_up(rollout, rollout.hopeless, "given up while it ran")
        except Ended:
            self._in_flight.discard(rollout)  # the run is over; nobody counts any more
        except Exception as error:  # noqa: BLE001 - kept whole and raised by run(), so that siblings end in order
            self._in_flight.discard(rollout)
            self._fatal = self._fatal or error
        finally:
            self.wake()

    async def _attempts(self, rollout: _InFlight) -> None:
        plan = rollout.plan
        attempts = self._live.settings.rollouter.max_attempts
        for number in range(attempts):
            rollout.since = self._admission.held or rollout.since
            try:
                episode = await self._runner.attempt(plan, number)
                sample = sample_of(plan, number, episode, now=self._now)
                await self._last_chance(rollout)
                rollout.offering = True
                await self._producer.offer(sample)
            except (PeerLost, Ended):
                raise
            except Exception as error:  # user code may raise anything; it fails this attempt and nothing else
                rollout.offering = False
                reason = reason_of(error)
                message = f"{type(error).__name__}: {error}"
                is_last = number + 1 == attempts or reason in FINAL
                log.warning(
                    "rollout attempt failed",
                    rollout_id=plan.rollout_id,
                    attempt=number,
                    reason=reason.value,
                    error=message,
                    gives_up=is_last,
                    exc_info=error if reason is FailureReason.AGENT_LOOP_FAILED else None,
                )
                if is_last:
                    await self._give_up(rollout, reason, message)
                    return
                self._admission.retried()
            else:
                self._arrived(rollout, sample, episode)
                return

    async def _last_chance(self, rollout: _InFlight) -> None:
        """A cancellation that is under way must strike before the sample is on its way, or the rollout would end twice."""
        if rollout.hopeless is not None:
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    def _arrived(self, rollout: _InFlight, sample: Sample, episode: Episode) -> None:
        self._rebase()
        self._leave(rollout, arrived=True)
        self._admission.offered()
        self._streak.succeeded()
        log.debug(
            "sample offered",
            rollout_id=sample.rollout_id,
            reward=episode.reward,
            num_tokens=sample.num_tokens,
            oldest_version=sample.oldest_version,
        )

    async def _give_up(self, rollout: _InFlight, reason: FailureReason, message: str) -> None:
        """The trainer learns that the seat stays empty; then its place in the budget is free."""
        plan = rollout.plan
        rollout.offering = True
        dropped = RolloutDropped(group_id=plan.group_id, seat=plan.seat, reason=reason.value)
        while not await self._reports.send("rollout.failed", dropped):
            pass  # another trainer took over: it must hear of it too
        self._rebase()
        self._leave(rollout, arrived=False)
        self._admission.failed(reason)
        self._streak.failed(plan.rollout_id, reason, message)

    async def _close_group(self, group_id: str, lost_seat: int) -> None:
        try:
            reason = FailureReason.SIBLINGS_LOST.value
            await self._reports.send("rollout.failed", RolloutDropped(group_id=group_id, seat=lost_seat, reason=reason))
        except BusError as error:
            self._fatal = self._fatal or error
            self.wake()

    def _leave(self, rollout: _InFlight, *, arrived: bool) -> None:
        self._in_flight.discard(rollout)
        group = self._open_groups[rollout.plan.group_id]
        group.num_in_flight -= 1
        if arrived:
            group.arrived.append(rollout.plan.seat)
        if group.num_in_flight == 0:
            del self._open_groups[rollout.plan.group_id]
