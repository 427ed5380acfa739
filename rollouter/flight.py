"""One rollout in the air: its attempts, and the record that it ends with.

Invariant: a flight ends with its sample in the stream, with its closed seat in the stream, or because the run is over; a result
that comes after it was given up is refused. Every failure is noted before what follows from it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from agent_loop.errors import Diverged
from configs.shortened import shortened
from rollouter.admission import Admission, HeldVersion
from rollouter.attempts import Attempts
from rollouter.bookkeeping import Bookkeeper, closed, offered, offering_of
from rollouter.books import GroupBook
from rollouter.errors import GivenUp
from rollouter.failure_notes import FailureNotes
from rollouter.failures import NO_FAULT, TASK_FAULT, FailureReason, FailureStreak, reason_of
from rollouter.rollouts import Plan, sample_of
from rollouter.seat_policy import Move, SeatPolicy
from rollouter.task_quarantine import TaskQuarantine
from rollouter.turnstile import Turnstile
from sample_bus.closed_seat import MAX_MESSAGE, ClosedSeat
from sample_bus.errors import BusError, Ended, RunChanged, SampleTooLarge, WireError
from sample_bus.journal import AttemptFailed, TaskQuarantined
from sample_bus.protocols import Producer
from sample_bus.sample import Sample

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    plan: Plan
    group: GroupBook
    since: HeldVersion
    """What the engines held when its current attempt began: no token of it is older."""
    offering: bool = False
    """Its record is on its way to the stream: too late to give it up."""
    given_up: tuple[FailureReason, str] | None = None
    """Why, and in which words."""
    stop: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def go_on(self) -> None:
        """Another attempt follows, whatever ended the one before."""
        self.offering = False
        if self.given_up is not None:
            self.given_up = None
            self.stop = asyncio.get_running_loop().create_future()

    def give_up(self, reason: FailureReason, message: str) -> bool:
        """End its attempt, or the first one before it begins; False if it is too late, or done already."""
        if self.offering or self.given_up is not None:
            return False
        self.given_up = (reason, message)
        self.stop.set_result(None)
        return True


class Cockpit:
    """Flies rollouts. What several flights share."""

    def __init__(
        self,
        *,
        admission: Admission,
        keeper: Bookkeeper,
        attempts: Attempts,
        producer: Producer,
        policy: Callable[[], SeatPolicy],
        quarantine: TaskQuarantine,
        max_task_failures: int,
        streak: FailureStreak,
        turnstile: Turnstile,
        is_current: Callable[[], bool],
        notes: FailureNotes,
    ) -> None:
        """`policy` is asked at each failure; `is_current` before anything is counted: it notices a new trainer, and says
        whether the run is still the one in hand."""
        self._admission = admission
        self._keeper = keeper
        self._attempts = attempts
        self._producer = producer
        self._policy = policy
        self._quarantine = quarantine
        self._max_task_failures = max_task_failures
        self._streak = streak
        self._turnstile = turnstile
        self._notes = notes
        self._turn = asyncio.Lock()
        self.is_current = is_current
        self.on_end: Callable[[Flight], None] = lambda flight: None
        self.on_refill: Callable[[Flight, FailureReason], None] = lambda flight, reason: None
        self.on_lost_group: Callable[[Flight], None] = lambda flight: None

    async def fly(self, flight: Flight) -> None:
        """To the end. Raises TooManyFailures, errors of the bus."""
        try:
            await self._turnstile.enter()
            await self._keeper.durable()  # no attempt begins before its admission stands in the journal
            seat = flight.group.seats[flight.plan.seat]
            if seat.closing is None:
                await self._play(flight)
            else:
                await self._close(flight, FailureReason(seat.closing.reason))
        except (Ended, RunChanged):
            pass  # nobody counts any more
        finally:
            self.on_end(flight)

    def is_lost(self, group: GroupBook) -> bool:
        """Whether the trainer will drop the group for the seats that are closed already."""
        reasons = [
            seat.closing.reason if seat.closing else FailureReason(seat.closed) for seat in group.seats if seat.is_closed
        ]
        size, closed_seats = len(group.seats), len(reasons)
        return any(self._policy().is_in_vain(reason, group_size=size, num_closed=closed_seats) for reason in reasons)

    async def close(self) -> None:
        """End attempts that were left to themselves."""
        await self._attempts.close()

    async def _play(self, flight: Flight) -> None:
        """Attempts until one brings a sample, or the seat is closed."""
        place, progress = (flight.plan.group_id, flight.plan.seat), self._keeper.progress
        seat = flight.group.seats[flight.plan.seat]
        while True:
            number = seat.attempt
            recording = progress.begin(place, number, self._admission.held or flight.since)
            flight.since = recording.held
            plan = replace(flight.plan, incarnation=flight.since.incarnation)
            try:
                episode = await self._attempts.play(plan, number, flight.stop, recording)
                sample = sample_of(plan, number, episode, now=self._keeper.now)
                await self._offer(flight, sample)
            except GivenUp as error:
                reason, message = flight.given_up or (FailureReason.AGENT_LOOP_FAILED, str(error))
            except Exception as error:  # user code may raise anything; it fails this attempt and nothing else
                if isinstance(error, Diverged) and recording.restored:
                    log.warning("rollout cannot be continued, begins anew", rollout_id=plan.rollout_id, error=str(error))
                    continue
                if isinstance(error, BusError) and not isinstance(error, (WireError, SampleTooLarge)):
                    raise
                reason, message = reason_of(error), f"{type(error).__name__}: {error}"
                if reason is FailureReason.AGENT_LOOP_FAILED:
                    log.warning("agent loop failed", rollout_id=plan.rollout_id, attempt=number, exc_info=error)
            else:
                progress.end(place)
                return
            if not self.is_current():
                return
            progress.end(place)
            if self._failed(flight, number, reason, message) is Move.CLOSE:
                await self._close(flight, reason)
                return
            flight.go_on()

    async def _offer(self, flight: Flight, sample: Sample) -> None:
        sample.validate()
        flight.offering = True
        await self._announce(sample)
        sample_id = await self._producer.offer(sample)
        if not self.is_current():
            return
        self._keeper.write(offered(sample_id, sample, self._keeper.now()))
        self._admission.stored(sample_id.seq)
        self._streak.succeeded()
        log.debug(
            "sample offered",
            rollout_id=sample.rollout_id,
            reward=sample.reward,
            num_tokens=sample.num_tokens,
            oldest_version=sample.oldest_version,
        )

    async def _announce(self, record: Sample | ClosedSeat) -> None:
        """Note that the record is handed to the bus next, in the order in which records are: the caller does so at once when
        this returns, before anything else runs."""
        async with self._turn:
            await self._keeper.durable()
            self._keeper.write(offering_of(record, self._keeper.now()))
            await self._keeper.durable()

    def refused(self, flight: Flight, message: str) -> None:
        """The trainer's end could not decode the seat's record: `fly` closes the seat, once more if it was closed already.
        Raises TooManyFailures."""
        seat = flight.group.seats[flight.plan.seat]
        reason = FailureReason(seat.closed or FailureReason.BAD_SAMPLE)
        self._note(flight, seat.attempt, reason, message, Move.CLOSE)
        if reason in NO_FAULT:  # the refusal is one all the same: two ends that never agree must not go on for ever
            self._streak.failed(flight.plan.rollout_id, FailureReason.BAD_SAMPLE, message)

    def lost(self, flight: Flight, message: str) -> None:
        """The seat's sample was lost on the way: `fly` plays it once more. Nobody's fault, so nothing is counted against it."""
        self._note(flight, flight.group.seats[flight.plan.seat].attempt, FailureReason.INTERRUPTED, message, Move.RETRY)

    def _failed(self, flight: Flight, number: int, reason: FailureReason, message: str) -> Move:
        """An attempt failed: what follows. Raises TooManyFailures."""
        seat = flight.group.seats[flight.plan.seat]
        move = self._policy().next_move(
            reason, num_failed=seat.num_failed + 1, num_interrupted=seat.num_interrupted, num_refills=seat.num_refills
        )
        self._note(flight, number, reason, message, move)
        return move

    def _note(self, flight: Flight, number: int, reason: FailureReason, message: str, move: Move) -> None:
        plan, message = flight.plan, shortened(message, MAX_MESSAGE)
        self._notes.add(reason, message, is_evaluation=False)
        log.warning(
            "rollout attempt failed",
            rollout_id=plan.rollout_id,
            attempt=number,
            reason=reason.value,
            error=message,
            then=move.value,
        )
        self._keeper.write(
            AttemptFailed(
                at=self._keeper.now(),
                group_id=plan.group_id,
                seat=plan.seat,
                attempt=number,
                reason=reason.value,
                message=message,
                then=move.value,
            )
        )
        if move is Move.RETRY:
            return
        if reason in TASK_FAULT:
            self._consider_quarantine(plan)
        if move is Move.REFILL:
            self.on_refill(flight, reason)
        elif self._policy().is_in_vain(reason, group_size=plan.group_size, num_closed=flight.group.num_closed):
            self.on_lost_group(flight)
        self._streak.failed(plan.rollout_id, reason, message)

    def _consider_quarantine(self, plan: Plan) -> None:
        task, books = plan.task, self._keeper.books
        failures = books.failures.get(task.task_id)
        if failures is None or failures.count < self._max_task_failures or task.task_id in books.quarantined:
            return
        now = self._keeper.now()
        self._quarantine.put(task, failures, now)
        self._keeper.write(TaskQuarantined(at=now, task_id=task.task_id, num_failures=failures.count))

    async def _close(self, flight: Flight, reason: FailureReason) -> None:
        """Put the seat's closing into the stream."""
        plan = flight.plan
        closing = flight.group.seats[plan.seat].closing
        assert closing is not None, f"{plan.rollout_id} is to be closed and was not given up"
        flight.offering = True
        seat = ClosedSeat(
            task_id=plan.task.task_id,
            group_id=plan.group_id,
            rollout_id=plan.rollout_id,
            attempt=closing.attempt,
            seat=plan.seat,
            group_size=plan.group_size,
            data_source=plan.task.data_source,
            reason=reason.value,
            message=shortened(closing.message, MAX_MESSAGE),
            settings_revision=plan.settings_revision,
            incarnation=flight.since.incarnation,
            closed_at=self._keeper.now(),
        )
        await self._announce(seat)
        sample_id = await self._producer.close_seat(seat)
        if not self.is_current():
            return
        self._keeper.write(closed(sample_id, seat, self._keeper.now()))
        self._admission.stored(sample_id.seq)
        log.info("seat closed", rollout_id=plan.rollout_id, reason=reason.value)
