"""From the bus to whole groups, fresh enough to train.

Consumes leased records; produces batches of whole groups; settles what it drops. Invariant: every record that was received is
queued here, handed out in exactly one batch, or dropped with a counted reason; the journal says which, and after a restart the
same records are handed out and dropped again before anything new is decided.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from sample_bus.journal import Id, Queued, Record, RecordsDropped, RecordsGone
from sample_bus.messages import BiasReport, Counts, RollouterStatus
from sample_bus.position import BusPosition
from sample_bus.protocols import Consumer, Gone, Lease, LeasedClosure
from sample_bus.sample import SampleId
from trainer.age_gate import AgeGate
from trainer.batch_size import BatchSize
from trainer.bias import BiasBook
from trainer.books import Books
from trainer.groups import Dropped, DropReason, Group, GroupAssembler, described, group_key
from trainer.history import History
from trainer.plan import Abandoned, Batch, Place, ReplayPlan
from trainer.signal import SignalFilter

log = structlog.get_logger()


class Journal(Protocol):
    def write(self, record: Record) -> None: ...


class Keeper(Protocol):
    """What keeps leased records beyond the run (`trainer.retained.Retained`)."""

    def keep(self, lease: Lease) -> None: ...


class Intake:
    """Owns every record between the bus and the optimizer."""

    def __init__(
        self,
        consumer: Consumer,
        *,
        groups_per_step: Callable[[], int],
        gate: AgeGate,
        assembler: GroupAssembler,
        signal: SignalFilter | None = None,
        journal: Journal,
        books: Books | None = None,
        bias: BiasBook | None = None,
        history: History | None = None,
        retained: Keeper | None = None,
        is_full: Callable[[], bool] = lambda: False,
        on_change: Callable[[], None] = lambda: None,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        """`groups_per_step` and the gate's rule are asked at each batch; `is_full` says whether the bus takes no more records.
        `on_change` is called when counts move, `on_settled` when records were settled."""
        history = history or History()
        self._consumer = consumer
        self._groups_per_step = groups_per_step
        self._gate = gate
        self._rollouter: RollouterStatus | None = None
        self._assembler = assembler
        self._signal = signal or SignalFilter()
        self._journal = journal
        self._books = books or Books()
        self._bias = bias or BiasBook()
        self._plan = ReplayPlan(history)
        self._known = dict(history.known)
        self._retained = retained
        self._is_full = is_full
        self._size = BatchSize(groups_per_step())
        self._num_batches = 0
        self._on_change = on_change
        self._on_settled = on_settled
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self._epochs: dict[str, int] = {}
        for key, reason in history.closed_groups.items():
            assembler.remember(key, reason)
        if self._plan.is_active:
            steps = [planned.step for planned in history.steps]
            log.info("steps are taken again as before", first=steps[0], last=steps[-1], drops=len(history.drops))

    @property
    def num_batches_bound(self) -> int:
        """Batches handed out, and those that are to be handed out as an earlier process took them: later ones are open to
        whatever is set until they are taken."""
        return self._num_batches + self._plan.num_steps

    def note_size(self, groups: int) -> None:
        """What is under way may have been admitted while a step took so many groups."""
        self._size.note(groups)

    def take_change(self) -> None:
        """A setting that is asked for here is another one now."""
        self.note_size(self._groups_per_step())
        self._changed.set()

    async def run(self) -> None:
        """Take records from the bus until cancelled."""
        while True:
            self._take(await self._consumer.lease())

    async def follow_losses(self) -> None:
        """Book what producers have no more, until cancelled."""
        async for gone in self._consumer.gone():
            self._lose(gone)

    async def next_batch(self, policy_version: Callable[[], int], *, is_last: Callable[[], bool] = lambda: False) -> Batch:
        """A step that is to be taken again, else the oldest whole groups, as many as a step takes; waits for them.

        Groups that are too old are dropped first. `is_last`: whether a new version follows the step; with on_stale=wait the
        step is then held for what that version would make too old.
        """
        while True:
            version = policy_version()
            batch = self._plan.next_batch() if self._plan.is_active else self._fresh_batch(version, is_last=is_last())
            if batch is not None:
                if batch.options is None:
                    batch = replace(batch, weighting=self._gate.weighting(version))
                self._gate.taken()
                self._signal.taken()
                self._num_batches += 1
                self._on_change()
                return batch
            self._changed.clear()
            try:
                async with asyncio.timeout(self._gate.left_s()):
                    await self._changed.wait()
            except TimeoutError:
                pass  # held long enough

    def take_status(self, status: RollouterStatus) -> None:
        """What the rollouter says of itself and of what it has in flight."""
        self._rollouter = status
        if self._gate.take_status(status):
            self._changed.set()

    def rollouter_row(self) -> dict[str, float]:
        """What the rollouter said last, for a step's metrics; nothing before it said anything."""
        status = self._rollouter
        if status is None:
            return {}
        return {
            "rollouter/in_flight": status.counts.in_flight,
            "rollouter/generated_tokens_per_s": status.generated_tokens_per_s,
            "rollouter/loop_lag_ms": status.loop_lag_ms,
        }

    def note_streams(self, position: BusPosition) -> None:
        """Producers came back. One that has lost its stream opened another, the last of its own in `position`: groups of the
        lost one are given up now, since their places may be what the new one waits for."""
        for producer, epoch in {stream.producer: stream.epoch for stream in position.streams}.items():
            if self._epochs.get(producer, epoch) != epoch:
                self._begin_epoch(producer, epoch)
                self._on_change()

    def settle_trained(self, batch: Batch) -> None:
        """The batch's effect is in the weights."""
        self._consumer.acknowledge([lease.id for group in batch.groups for lease in group.records])
        for group in batch.groups:
            self._books.train(group, num_rolled_back=sum(self._gate.has_lost(leased.sample) for leased in group.members))
            self._bias.train(group, batch.weighting)
            if batch.replayed:  # not assembled here: what else came for it is late
                self._drop(self._assembler.close(group_key(group.records[0]), DropReason.DUPLICATE_SEAT))
        self._on_settled()
        self._on_change()

    def close_unfinished(self) -> None:
        """The run is over: nothing more will be trained."""
        self._drop(self._assembler.close_all(DropReason.UNFINISHED))
        leftover = tuple(lease for group in self._ready for lease in group.records)
        self._ready.clear()
        self._drop(Dropped(reason=DropReason.UNFINISHED, records=(*self._plan.give_up(), *leftover)))

    def counts(self) -> Counts:
        """The trainer's side of the ledger."""
        return self._books.counts(self._consumer.consumer_statistics())

    def bias(self) -> BiasReport:
        """What was trained against what age cost, since the run began."""
        return self._bias.report()

    def settled_counts(self) -> Counts:
        """The same without what is queued: what belongs to the bus's position."""
        return self._books.settled(self._consumer.consumer_statistics())

    def waiting_for(self) -> str:
        """What the next batch still lacks, in words."""
        if self._plan.is_active:
            return self._plan.awaits()
        if self._gate.awaits is not None:
            return f"{self._gate.awaits}, at most {self._gate.left_s() or 0.0:.0f} s more"
        text = f"groups {len(self._ready)} of {self._groups_per_step()}, records in open groups {self._assembler.num_waiting}"
        oldest = self._assembler.oldest_open()
        if oldest is not None:
            group_id, seats = oldest
            text += f", oldest open group {group_id} lacks seats {list(seats)}"
        return text + self._signal.awaits()

    def signal_row(self) -> dict[str, float]:
        """Columns of a step's row of metrics: the groups that came for it, and those of them without a signal."""
        return self._signal.row()

    def _fresh_batch(self, policy_version: int, *, is_last: bool) -> Batch | None:
        self._gate.decide()
        self._drop_stale(policy_version)
        wanted = self._groups_per_step()
        is_full = self._is_full()
        size = self._size.choose(wanted, ready=len(self._ready), is_full=is_full)
        if size is None:
            return None
        if is_last and not is_full and self._is_held(size, policy_version):
            return None
        if size < wanted:
            log.warning("the bus is full: a smaller batch makes room for the size that was set", groups=size, of=wanted)
        return Batch(groups=tuple(self._ready.popleft() for _ in range(size)))

    def _take(self, lease: Lease) -> None:
        if self._retained is not None:
            self._retained.keep(lease)
        who, closed = described(lease), isinstance(lease, LeasedClosure)
        self._journal.write(
            Queued(
                at=time.time(),
                received_at=lease.received_at,
                id=list(lease.id),
                group_id=who.group_id,
                seat=who.seat,
                attempt=who.attempt,
                closed=lease.closed.reason if isinstance(lease, LeasedClosure) else "",
            )
        )
        self._books.receive(closed=closed)
        self._known.pop(lease.id, None)
        if self._epochs.get(lease.id.producer) != lease.id.epoch:
            self._begin_epoch(lease.id.producer, lease.id.epoch)
        place = self._plan.take(lease)
        if isinstance(place, Dropped):
            self._drop(place)
            if place.reason is not DropReason.DUPLICATE_SEAT:
                self._drop(self._assembler.close(group_key(lease), place.reason))
        elif place is Place.HELD:
            self._changed.set()
        else:
            self._seat(lease)
        if self._size.is_raised(self._groups_per_step()):
            self._changed.set()  # the bus may be full now
        self._on_change()

    def _seat(self, lease: Lease) -> None:
        outcome = self._assembler.add(lease)
        if isinstance(outcome, Dropped):
            self._drop(outcome)
        elif isinstance(outcome, Group):
            reason = self._signal.drop_reason(outcome, groups_per_step=self._groups_per_step())
            if reason is not None:
                self._drop(Dropped(reason=reason, records=outcome.records))
                return
            self._ready.append(outcome)
            self._changed.set()

    def _begin_epoch(self, producer: str, epoch: int) -> None:
        """A producer's stream begins here. If there was another one, what it held and did not bring is lost."""
        self._epochs[producer] = epoch
        self._drop(self._assembler.close_other_epochs(producer, epoch))
        lost = sorted(one for one in self._known if one.producer == producer and one.epoch != epoch)
        self._leave(self._plan.lose_epochs_but(producer, epoch))
        for first, last in _runs(lost):
            self._write_gone(
                Gone(
                    producer=producer,
                    epoch=first.epoch,
                    first=first.seq,
                    last=last.seq + 1,
                    num_records=last.seq - first.seq + 1,
                ),
                DropReason.PRODUCER_LOST,
            )

    def _lose(self, gone: Gone) -> None:
        self._leave(self._plan.lose(gone))
        self._write_gone(gone, DropReason.LOST_WITH_TRAINER)
        self._on_change()

    def _write_gone(self, gone: Gone, reason: DropReason) -> None:
        """Book records that will never come; the groups whose seats they were will never be whole."""
        lost = [
            one
            for one in self._known
            if one.producer == gone.producer and one.epoch == gone.epoch and gone.first <= one.seq < gone.last
        ]
        num_closures = 0
        for one in lost:
            known = self._known.pop(one)
            num_closures += known.closed
            if not self._plan.is_refused(one):
                self._drop(self._assembler.close(known.key, reason))
        log.warning(
            "records are gone",
            reason=str(reason),
            producer=gone.producer,
            epoch=gone.epoch,
            first=gone.first,
            last=gone.last - 1,
            num_records=gone.num_records,
        )
        self._journal.write(
            RecordsGone(
                at=time.time(),
                producer=gone.producer,
                epoch=gone.epoch,
                first=gone.first,
                last=gone.last,
                num_records=gone.num_records,
                reason=str(reason),
            )
        )
        self._books.lose(gone.num_records - num_closures, reason)

    def _leave(self, abandoned: Abandoned | None) -> None:
        """The plan's rest cannot be taken: its records go the usual way."""
        if abandoned is None:
            return
        log.warning(
            "steps cannot be taken again as before",
            steps=list(abandoned.steps),
            reason=abandoned.why,
            records_there=len(abandoned.held),
        )
        for lease in abandoned.held:
            self._seat(lease)
        self._changed.set()

    def _is_held(self, size: int, policy_version: int) -> bool:
        return self._gate.holds(self._ready, self._assembler.open_groups(), policy_version=policy_version, groups_per_step=size)

    def _drop_stale(self, policy_version: int) -> None:
        fresh: list[Group] = []
        for group in self._ready:
            reason = self._gate.drop_reason(group, policy_version)
            if reason is None:
                fresh.append(group)
            else:
                self._drop(Dropped(reason=reason, records=group.records))
        self._ready = deque(self._gate.ordered(fresh))

    def _drop(self, dropped: Dropped) -> None:
        if not dropped.records:
            return
        if dropped.reason is DropReason.STALE_RETRIED:
            for group_id, task_id in {(who.group_id, who.task_id) for who in map(described, dropped.records)}:
                self._gate.ask(group_id, task_id)
        self._journal.write(
            RecordsDropped(
                at=time.time(),
                reason=str(dropped.reason),
                samples=plain_ids(dropped.samples),
                closures=plain_ids(dropped.closures),
            )
        )
        self._consumer.acknowledge([lease.id for lease in dropped.records], dropped=True)
        self._books.drop(dropped)
        self._bias.drop(dropped)
        log.info(
            "samples dropped",
            reason=str(dropped.reason),
            num_samples=len(dropped.samples),
            num_closed_seats=len(dropped.closures),
            rollouts=[described(lease).rollout_id for lease in dropped.records][:8],
        )
        self._on_settled()
        self._on_change()


def plain_ids(ids: Sequence[SampleId]) -> list[Id]:
    """As the journal writes them."""
    return [list(one) for one in ids]


def _runs(ids: Sequence[SampleId]) -> list[tuple[SampleId, SampleId]]:
    """(first, last) of each run of consecutive numbers of sorted ids."""
    runs: list[tuple[SampleId, SampleId]] = []
    for one in ids:
        if runs and runs[-1][1] == one._replace(seq=one.seq - 1):
            runs[-1] = (runs[-1][0], one)
        else:
            runs.append((one, one))
    return runs
