"""The rollouter's journal on disk and the books that it keeps: written, replayed, and reconciled with the stream.

Invariant: the books change by records alone, each of which goes to the journal in the same breath. What a process before this
one did without noting it is told again from its stream, so nothing that was offered is played again; what it had in flight is
continued from its progress log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from configs.schema import SamplingSettings
from rollouter.books import Books
from rollouter.errors import DataError
from rollouter.failures import FailureReason
from rollouter.progress import PROGRESS_FILE, Progress, ProgressLog
from rollouter.progress_records import Place
from rollouter.seat_policy import Move, SeatPolicy
from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import JournalError
from sample_bus.group_id import parse
from sample_bus.journal import (
    ROLLOUTER_FILE,
    AttemptFailed,
    GroupAdmitted,
    Offering,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    SeatClosed,
    journal_dir,
    read_journal,
)
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import Recovery
from sample_bus.protocols import Producer, Resumption
from sample_bus.sample import NO_VERSION, Sample, SampleId

log = structlog.get_logger()


class Bookkeeper:
    """Books and journal of one run; belongs to the event loop."""

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        *,
        on_change: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Replay what stands there and open it for writing; blocking. `on_change` is called when the journal can be written no
        more, or again. Raises JournalError, JournalDamaged."""
        self.run_id = run_id
        self.now = now
        self.books = Books()
        self._writer = JournalWriter(journal_dir(run_dir, run_id) / ROLLOUTER_FILE, on_change=on_change)
        self._is_closed = False
        self.recovery: Recovery | None = None
        """What became of the rollouts that the process before had in flight; None before `take_up`, and for the first one."""
        self.progress = ProgressLog(journal_dir(run_dir, run_id) / PROGRESS_FILE)
        for record in read_journal(self._writer.path):
            if not isinstance(record, RollouterRecord):
                raise JournalError(f"{self._writer.path}: got {type(record).__name__}, expected the rollouter's own records")
            self.books.apply(record)

    @property
    def is_blocked(self) -> bool:
        return self._writer.is_blocked

    @property
    def problem(self) -> str:
        """Why the journal cannot be written; empty while it can."""
        return self._writer.problem

    def write(self, record: RollouterRecord) -> None:
        """Note it, in the books and in the journal; nothing once this is closed."""
        if self._is_closed:
            log.debug("noted after the end", record=type(record).__name__)
            return
        self.books.apply(record)
        self._writer.write(record)

    async def durable(self) -> None:
        """Return when everything that was noted stands in the file: at once, unless the disk takes nothing."""
        if self._writer.is_blocked:
            await self._writer.flush()

    async def take_up(
        self,
        producer: Producer,
        resumption: Resumption,
        *,
        process: str,
        fingerprint: str,
        policy: SeatPolicy,
        sampling: SamplingSettings,
    ) -> None:
        """Go on where the process before this one stood, on the stream of `resumption`. `sampling` is what a group is played on
        with of which nothing but its records is left.

        Raises DataError when the data is another one, BusError.
        """
        books, epoch = self.books, resumption.epoch
        if books.fingerprint not in ("", fingerprint):
            raise DataError(
                f"data changed: got tasks with fingerprint {fingerprint}, expected {books.fingerprint}, over which "
                f"{books.next_issue} tasks were issued in run {self.run_id}; bring the data back, or begin another run "
                "(checkpoint.resume=never)"
            )
        was_cut_off, is_first = books.was_cut_off, books.num_processes == 0
        began = RollouterBegan(at=self.now(), process=process, epoch=epoch, data_fingerprint=fingerprint)
        if books.epoch == epoch:
            await self._tell_again(producer, resumption, sampling)
            self.write(began)
        else:
            if not is_first:
                log.warning("records of an older stream are lost", epoch_before=books.epoch, epoch=epoch)
            self.write(began)
            await self._tell_again(producer, resumption, sampling)
        continued = self._usable_progress()
        if not is_first:
            self.recovery = self._recovery(continued)
            log.info("rollouts in flight taken up", **self.recovery.model_dump())
        if was_cut_off:
            self._note_interruptions(policy, continued)
        await asyncio.to_thread(self.progress.start, continued)
        if not is_first:
            log.info("taken up where it stood", open_groups=len(books.open_groups), **books.counts().model_dump())

    def close(self, reason: str) -> None:
        """This process ends in good order: what is in flight is to be played on. Does nothing the second time."""
        if not self._is_closed:
            self.write(RollouterEnded(at=self.now(), reason=reason, counts=self.books.counts().model_dump()))
            self.release()

    def release(self) -> None:
        """Close the file without a word of the end, as a death would."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close()
            self.progress.close()

    async def _tell_again(self, producer: Producer, resumption: Resumption, sampling: SamplingSettings) -> None:
        """Note the records of the stream that a process before this one had no time to note: those that it still holds, and
        those that were committed since."""
        books = self.books
        async for sample_id, record in producer.stored(books.first_unknown):
            if books.knows(sample_id):
                continue
            log.info("record told again from the stream", rollout_id=record.rollout_id, seq=sample_id.seq)
            if books.group(record.group_id) is None:
                log.warning("group taken over from its records: the journal has lost it", group_id=record.group_id)
                self.write(_admission_of(record, sampling, issue=books.next_issue, at=self.now()))
            if isinstance(record, Sample):
                self.write(offered(sample_id, record, record.produced_at))
            else:
                self.write(closed(sample_id, record, record.closed_at))
        for offering, sample_id in books.silently_stored(resumption.next_seq):
            log.info(
                "record was committed before it was noted", group_id=offering.group_id, seat=offering.seat, seq=sample_id.seq
            )
            self.write(_record_of(offering, sample_id))
        missing = resumption.next_seq - books.num_recorded
        if missing and books.num_processes:
            log.warning("records of the stream that the journal knows nothing of", num_records=missing)

    def _usable_progress(self) -> dict[Place, Progress]:
        """What the open seats' present attempts, or those that they go on from, have sampled."""
        return {
            (group_id, number): progress
            for group_id, group in self.books.open_groups.items()
            for number, seat in enumerate(group.seats)
            if seat.is_open and seat.closing is None
            if (progress := self.progress.found.get((group_id, number))) is not None
            if seat.first_attempt <= progress.began.attempt <= seat.attempt and progress.num_tokens
        }

    def _recovery(self, continued: Mapping[Place, Progress]) -> Recovery:
        num_open = sum(
            seat.is_open and seat.closing is None for group in self.books.open_groups.values() for seat in group.seats
        )
        return Recovery(
            process=self.books.num_processes,
            continued=len(continued),
            restarted=num_open - len(continued),
            tokens_kept=sum(progress.num_tokens for progress in continued.values()),
            tokens_lost_at_most=sum(progress.num_asked for progress in self.progress.found.values()),
        )

    def _note_interruptions(self, policy: SeatPolicy, continued: Mapping[Place, Progress]) -> None:
        """The attempts that the death of the process before cut off are over; the next ones get the next numbers, and go on
        from what is in `continued`."""
        for group_id, group in list(self.books.open_groups.items()):
            for number, seat in enumerate(group.seats):
                if not seat.is_open or seat.closing is not None:
                    continue
                progress = continued.get((group_id, number))
                kept_tokens = 0 if progress is None else progress.num_tokens
                move = policy.next_move(
                    FailureReason.INTERRUPTED,
                    num_failed=seat.num_failed,
                    num_interrupted=1 if kept_tokens > seat.kept_tokens else seat.num_interrupted + 1,
                    num_refills=seat.num_refills,
                )
                if move is Move.RETRY and progress is not None:
                    move = Move.CONTINUE
                self.write(
                    AttemptFailed(
                        at=self.now(),
                        group_id=group_id,
                        seat=number,
                        attempt=seat.attempt,
                        reason=FailureReason.INTERRUPTED.value,
                        message="the rollouter was killed while it ran",
                        then=move.value,
                        kept_tokens=kept_tokens if move is Move.CONTINUE else 0,
                    )
                )


def offered(sample_id: SampleId, sample: Sample, at: float) -> SampleOffered:
    """What the journal says of a sample in the stream."""
    return SampleOffered(
        at=at,
        group_id=sample.group_id,
        seat=sample.seat,
        attempt=sample.attempt,
        id=list(sample_id),
        num_tokens=sample.num_tokens,
        reward=sample.reward,
        oldest_version=sample.oldest_version,
    )


def closed(sample_id: SampleId, seat: ClosedSeat, at: float) -> SeatClosed:
    """What the journal says of a closed seat in the stream."""
    return SeatClosed(
        at=at, group_id=seat.group_id, seat=seat.seat, attempt=seat.attempt, reason=seat.reason, id=list(sample_id)
    )


def offering_of(record: Sample | ClosedSeat, at: float) -> Offering:
    """What the journal says of a record that is about to be handed to the bus."""
    if isinstance(record, ClosedSeat):
        return Offering(at=at, group_id=record.group_id, seat=record.seat, attempt=record.attempt, closed=record.reason)
    return Offering(
        at=at,
        group_id=record.group_id,
        seat=record.seat,
        attempt=record.attempt,
        closed="",
        num_tokens=record.num_tokens,
        reward=record.reward,
        oldest_version=record.oldest_version,
    )


def _record_of(offering: Offering, sample_id: SampleId) -> SampleOffered | SeatClosed:
    """What stands in the stream, by what was said of it before."""
    if offering.closed:
        return SeatClosed(
            at=offering.at,
            group_id=offering.group_id,
            seat=offering.seat,
            attempt=offering.attempt,
            reason=offering.closed,
            id=list(sample_id),
        )
    return SampleOffered(
        at=offering.at,
        group_id=offering.group_id,
        seat=offering.seat,
        attempt=offering.attempt,
        id=list(sample_id),
        num_tokens=offering.num_tokens,
        reward=offering.reward,
        oldest_version=offering.oldest_version,
    )


def _admission_of(record: Sample | ClosedSeat, sampling: SamplingSettings, *, issue: int, at: float) -> GroupAdmitted:
    """What the admission of the record's group must have been; `issue` is taken when its id does not tell its number."""
    name = parse(record.group_id)
    return GroupAdmitted(
        at=at,
        group_id=record.group_id,
        task_id=record.task_id,
        issue=issue if name is None else name.issue,
        group_size=record.group_size,
        policy_version=record.oldest_version if isinstance(record, Sample) else NO_VERSION,
        incarnation=record.incarnation,
        settings_revision=record.settings_revision,
        temperature=record.temperature if isinstance(record, Sample) else sampling.temperature,
        max_tokens=sampling.max_tokens,
    )


def known_next(run_dir: Path, run_id: str, epoch: int) -> int:
    """Number behind the last record of that stream that the journal of the run knows to be stored; 0: none. Raises
    JournalError."""
    records = read_journal(journal_dir(run_dir, run_id) / ROLLOUTER_FILE)
    ids = (record.id for record in records if isinstance(record, SampleOffered | SeatClosed))
    return max((seq + 1 for _, of, seq in ids if of == epoch), default=0)
