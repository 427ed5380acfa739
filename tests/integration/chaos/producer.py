"""A process that admits groups and plays their seats, with a journal as the rollouter keeps it. It may be killed at any moment.

python -m tests.integration.chaos.producer PLACE RUN_DIR

Invariant: a group is journaled before its seats start; a seat's record is journaled when it is durable, or found in the stream
by the next process. While `RUN_DIR/enough` is not there it admits; then it plays what is admitted to its end, publishes that it
has ended with its counts, writes RollouterEnded and exits 0 once the run's end is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections import Counter
from pathlib import Path

import structlog

from sample_bus import outflow
from sample_bus.closed_seat import ClosedSeat
from sample_bus.journal import (
    ROLLOUTER_FILE,
    AttemptFailed,
    GroupAdmitted,
    Record,
    RollouterBegan,
    RollouterEnded,
    SampleOffered,
    SeatClosed,
    journal_dir,
    read_journal,
)
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import EndOfRun, RolloutCounts, RollouterState, RollouterStatus
from sample_bus.protocols import Link, Resumption
from sample_bus.sample import Sample, SampleId
from sample_bus.spool import Spool
from tests.integration.chaos import rollouts
from tests.sample_bus.conformance.places import Place

MAX_OPEN_GROUPS = 6
SEGMENT_BYTES = 64 << 10
"""Of the spool's files here: so small that they are begun, retired and used again all the time."""
Seat = tuple[int, int]
"""(issue, seat)."""


class Played:
    """What the journal says of every seat."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.attempts: Counter[Seat] = Counter()
        self.retried = 0
        self.offered: set[Seat] = set()
        self.closed: dict[Seat, str] = {}

    def take(self, record: Record) -> None:
        match record:
            case GroupAdmitted():
                self.num_groups = max(self.num_groups, record.issue + 1)
            case AttemptFailed():
                self.attempts[rollouts.issue_of(record.group_id), record.seat] = record.attempt + 1
                self.retried += record.then == "retry"
            case SampleOffered():
                self.offered.add((rollouts.issue_of(record.group_id), record.seat))
            case SeatClosed():
                self.closed[rollouts.issue_of(record.group_id), record.seat] = record.reason
            case _:
                pass

    def has(self, seat: Seat) -> bool:
        return seat in self.offered or seat in self.closed

    def open_groups(self) -> list[int]:
        seats = range(rollouts.GROUP_SIZE)
        return [issue for issue in range(self.num_groups) if not all(self.has((issue, seat)) for seat in seats)]

    def counts(self) -> RolloutCounts:
        admitted = self.num_groups * rollouts.GROUP_SIZE
        return RolloutCounts(
            admitted=admitted,
            offered=len(self.offered),
            failed=dict(Counter(self.closed.values())),
            retried=self.retried,
            in_flight=admitted - len(self.offered) - len(self.closed),
        )


class Producer:
    def __init__(self, link: Link, journal: JournalWriter, played: Played, resumption: Resumption) -> None:
        self._link = link
        self._journal = journal
        self._played = played
        self._resumption = resumption

    async def reconcile(self) -> None:
        """Journal what an earlier process made durable and could not journal any more."""
        async for sample_id, record in self._link.stored():
            if not self._played.has((rollouts.issue_of(record.group_id), record.seat)):
                self._handed_over(sample_id, record)

    async def run(self, enough: Path) -> None:
        slots = asyncio.Semaphore(MAX_OPEN_GROUPS)
        async with asyncio.TaskGroup() as tasks:
            for issue in self._played.open_groups():
                await slots.acquire()
                tasks.create_task(self._play_group(issue, slots))
            while True:
                await slots.acquire()
                if enough.exists():  # noqa: ASYNC240 - a look at a local directory
                    break
                self._admit(issue := self._played.num_groups)
                tasks.create_task(self._play_group(issue, slots))

    def _admit(self, issue: int) -> None:
        self._write(
            GroupAdmitted(
                at=time.time(),
                group_id=rollouts.group_name(issue),
                task_id=f"task-{issue}",
                issue=issue,
                group_size=rollouts.GROUP_SIZE,
                policy_version=0,
                incarnation=self._resumption.incarnation,
                settings_revision=0,
                temperature=1.0,
                max_tokens=2000,
            )
        )

    async def _play_group(self, issue: int, slots: asyncio.Semaphore) -> None:
        await asyncio.gather(*(self._play(issue, seat) for seat in range(rollouts.GROUP_SIZE)))
        slots.release()

    async def _play(self, issue: int, seat: int) -> None:
        while not self._played.has((issue, seat)):
            attempt = self._played.attempts[issue, seat]
            if attempt >= rollouts.MAX_ATTEMPTS:
                closed = rollouts.closure_of(issue, seat, attempt - 1, incarnation=self._resumption.incarnation)
                self._handed_over(await self._link.close_seat(closed), closed)
                return
            await asyncio.sleep(rollouts.pause_s(issue, seat, attempt))
            if rollouts.fails(issue, seat, attempt):
                self._write(
                    AttemptFailed(
                        at=time.time(),
                        group_id=rollouts.group_name(issue),
                        seat=seat,
                        attempt=attempt,
                        reason="timeout",
                        message="the engine did not answer",
                        then="retry" if attempt + 1 < rollouts.MAX_ATTEMPTS else "close",
                    )
                )
                continue
            made = rollouts.sample_of(issue, seat, attempt, incarnation=self._resumption.incarnation)
            self._handed_over(await self._link.offer(made), made)

    def _handed_over(self, sample_id: SampleId, record: Sample | ClosedSeat) -> None:
        if isinstance(record, ClosedSeat):
            self._write(
                SeatClosed(
                    at=time.time(),
                    group_id=record.group_id,
                    seat=record.seat,
                    attempt=record.attempt,
                    reason=record.reason,
                    id=list(sample_id),
                )
            )
        else:
            self._write(
                SampleOffered(
                    at=time.time(),
                    group_id=record.group_id,
                    seat=record.seat,
                    attempt=record.attempt,
                    id=list(sample_id),
                    num_tokens=record.num_tokens,
                    reward=record.reward,
                    oldest_version=record.oldest_version,
                )
            )

    def _write(self, record: Record) -> None:
        self._journal.write(record)
        self._played.take(record)


async def main(place: Place, run_dir: Path) -> None:
    async with place.link(rollouts.PRODUCER, spool_dir=run_dir / "spool") as link:
        await link.wait_connected(120)
        resumption = link.resumption
        assert resumption is not None
        path = journal_dir(run_dir, resumption.run_id) / ROLLOUTER_FILE
        played = Played()
        journal = JournalWriter(path)
        for record in read_journal(path):
            played.take(record)
        journal.write(
            RollouterBegan(at=time.time(), process=str(os.getpid()), epoch=resumption.epoch, data_fingerprint="chaos")
        )
        producer = Producer(link, journal, played, resumption)
        await producer.reconcile()
        await producer.run(run_dir / "enough")
        in_stream = link.producer_statistics().offered
        ended = RollouterStatus(state=RollouterState.ENDED, detail=str(in_stream), counts=played.counts())
        await link.publish("rollouter", ended)
        with contextlib.closing(journal):
            async for end in link.watch("end", EndOfRun):
                journal.write(
                    RollouterEnded(at=time.time(), reason=end.reason.value, counts=played.counts().model_dump(mode="json"))
                )
                return
        raise AssertionError("the bus closed before the run's end was told")


if __name__ == "__main__":
    vars(outflow)["Spool"] = functools.partial(Spool, segment_bytes=SEGMENT_BYTES)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(Place.from_text(sys.argv[1]), Path(sys.argv[2])))
