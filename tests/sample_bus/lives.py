"""A model of both daemons that writes their journals, one record a move; either may be killed between any two moves.

It keeps, apart from the journals, what is true: what stands in the weights, what the producer keeps, what is lost. One
producer; groups of two seats; a step takes whole groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sample_bus.books import Copies
from sample_bus.journal import (
    AttemptFailed,
    GroupAdmitted,
    Queued,
    RecordsDropped,
    RecordsGone,
    RollouterBegan,
    RollouterEnded,
    RollouterRecord,
    SampleOffered,
    Saved,
    SeatClosed,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
    TrainerRecord,
)
from sample_bus.position import BusPosition, Settled, StreamPosition
from sample_bus.sample import SampleId

PRODUCER = "rollouter"
GROUP_SIZE = 2
AT = 1000.0


@dataclass(frozen=True, slots=True)
class Record:
    """What lies in the stream."""

    id: SampleId
    group_id: str
    seat: int
    closed: str


@dataclass(slots=True)
class Checkpoint:
    step: int
    streams: dict[int, Settled]
    trained: set[SampleId]
    dropped: dict[SampleId, str]


@dataclass(slots=True)
class TrainerLife:
    """What dies with the process."""

    streams: dict[int, Settled]
    """By epoch."""
    received: dict[int, int]
    """By epoch: next sequence number expected."""
    step: int
    trained: set[SampleId]
    dropped: dict[SampleId, str]
    queue: list[Record] = field(default_factory=list)
    taking: list[Record] | None = None
    to_replay: list[StepBegan] = field(default_factory=list)


class Lives:
    def __init__(self, *, every_steps: int, repeats_began: bool) -> None:
        """`every_steps`: 0 commits at once and never saves. `repeats_began`: a replayed step is noted as begun again."""
        self.every_steps = every_steps
        self.repeats_began = repeats_began
        self.rollouter_log: list[RollouterRecord] = []
        self.trainer_log: list[TrainerRecord] = []
        self.epoch, self.first = 1, 0
        self.kept: list[Record] = []
        self.records: dict[SampleId, Record] = {}
        self.checkpoint: Checkpoint | None = None
        self.trainer: TrainerLife | None = None
        self.rollouter_runs = False
        self.in_flight: list[tuple[str, int]] = []
        self.unnoted: Record | None = None
        self.num_groups = 0
        self.num_failed_attempts: Counter[tuple[str, int]] = Counter()
        self.num_rolled_back = 0
        self.lost: set[tuple[str, int]] = set()
        """Rollouts whose record went with the producer's disk."""

    # ── what is true ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def next_seq(self) -> int:
        return self.first + len(self.kept)

    def copies(self) -> Copies:
        return Copies(producer=PRODUCER, epoch=self.epoch, first=self.first, next_seq=self.next_seq)

    @property
    def in_effect(self) -> set[SampleId]:
        """Samples whose effect is in the weights, or in the checkpoint that the next trainer begins from."""
        if self.trainer is not None:
            return self.trainer.trained
        return self.checkpoint.trained if self.checkpoint is not None else set()

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self) -> list[Callable[[], None]]:
        """What can happen now."""
        moves: list[Callable[[], None]] = [self.start_rollouter] if not self.rollouter_runs else self._rollouter_moves()
        if self.trainer is None:
            moves.append(self.start_trainer)
        else:
            moves += self._trainer_moves(self.trainer)
        return moves

    def _rollouter_moves(self) -> list[Callable[[], None]]:
        if self.unnoted is not None:
            return [self.note_offer, self.kill_rollouter]
        moves = [self.admit, self.kill_rollouter]
        if self.in_flight:
            moves += [self.offer, self.offer, self.offer, self.close_seat, self.fail_attempt]
        return moves

    def _trainer_moves(self, trainer: TrainerLife) -> list[Callable[[], None]]:
        moves = [self.kill_trainer]
        if trainer.taking is not None:
            return [self.finish_step, self.finish_step, *moves]
        if self._next_unreceived(trainer) is not None:
            moves += [self.receive] * 3
        if trainer.to_replay:
            if {record.id for record in trainer.queue} >= self._ids(trainer.to_replay[0]):
                moves += [self.begin_replayed_step] * 3
        elif self._whole_groups(trainer):
            moves += [self.begin_step, self.begin_step, self.drop_group]
        if self.every_steps and not trainer.to_replay:
            moves.append(self.save)
        return moves

    # ── the rollouter ────────────────────────────────────────────────────────────────────────────────────────────────

    def start_rollouter(self) -> None:
        self.rollouter_runs = True
        self.rollouter_log.append(RollouterBegan(at=AT, process="p", epoch=self.epoch, data_fingerprint="f"))
        self._close_broken_groups()
        if self.unnoted is not None:  # found in the stream, not in the journal
            self.note_offer()

    def kill_rollouter(self) -> None:
        self.rollouter_runs = False

    def end_rollouter(self) -> None:
        newest = {(one.group_id, one.seat): one for one in self.rollouter_log if isinstance(one, SampleOffered | SeatClosed)}
        failed = Counter(one.reason for one in newest.values() if isinstance(one, SeatClosed))
        admitted = GROUP_SIZE * self.num_groups
        counts = {
            "admitted": admitted,
            "offered": len(newest) - failed.total(),
            "in_flight": admitted - len(newest),
            "failed": dict(failed),
        }
        self.rollouter_log.append(RollouterEnded(at=AT, reason="finished", counts=counts))
        self.rollouter_runs = False

    def admit(self) -> None:
        group_id = f"g{self.num_groups}"
        self.num_groups += 1
        self.rollouter_log.append(
            GroupAdmitted(
                at=AT,
                group_id=group_id,
                task_id="t",
                issue=self.num_groups - 1,
                group_size=GROUP_SIZE,
                policy_version=0,
                incarnation="i",
                settings_revision=0,
                temperature=1.0,
                max_tokens=8,
            )
        )
        self.in_flight += [(group_id, seat) for seat in range(GROUP_SIZE)]

    def fail_attempt(self) -> None:
        group_id, seat = self.in_flight[0]
        number = self.num_failed_attempts[group_id, seat]
        self.num_failed_attempts[group_id, seat] += 1
        self.rollouter_log.append(
            AttemptFailed(at=AT, group_id=group_id, seat=seat, attempt=number, reason="timeout", message="")
        )

    def offer(self) -> None:
        self._store("")

    def close_seat(self) -> None:
        self._store("timeout")

    def _store(self, closed: str) -> None:
        """It is durable; the note follows, if the process lives."""
        group_id, seat = self.in_flight.pop(0)
        record = Record(SampleId(PRODUCER, self.epoch, self.next_seq), group_id, seat, closed)
        self.kept.append(record)
        self.records[record.id] = record
        self.unnoted = record

    def note_offer(self) -> None:
        record = self.unnoted
        assert record is not None
        self.unnoted = None
        plain = list(record.id)
        if record.closed:
            self.rollouter_log.append(
                SeatClosed(at=AT, group_id=record.group_id, seat=record.seat, attempt=0, reason=record.closed, id=plain)
            )
        else:
            self.rollouter_log.append(
                SampleOffered(
                    at=AT,
                    group_id=record.group_id,
                    seat=record.seat,
                    attempt=0,
                    id=plain,
                    num_tokens=5,
                    reward=1.0,
                    oldest_version=0,
                )
            )

    def lose_spool(self) -> None:
        """The producer's disk is gone. What lay there is lost; of a group that is not whole, the next process closes every
        seat in the new stream."""
        assert not self.rollouter_runs
        assert self.trainer is None
        settled = self.checkpoint.streams.get(self.epoch, Settled()) if self.checkpoint is not None else Settled()
        gone = [record for record in self.kept if not settled.covers(record.id.seq)]
        self.lost |= {(record.group_id, record.seat) for record in gone}
        if self.unnoted is not None:  # nobody knows that it ever lay there
            self.in_flight.insert(0, (self.unnoted.group_id, self.unnoted.seat))
            self.lost.discard(self.in_flight[0])
        self.kept, self.unnoted = [], None
        self.epoch, self.first = self.epoch + 1, 0

    def _close_broken_groups(self) -> None:
        open_groups = {group_id for group_id, _ in self.in_flight}
        broken = {rollout for rollout in self.lost if rollout[0] in open_groups}
        self.lost -= broken
        self.in_flight += sorted(broken - set(self.in_flight))

    # ── the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start_trainer(self) -> None:
        saved = self.checkpoint
        trainer = TrainerLife(
            streams={epoch: _copy(settled) for epoch, settled in saved.streams.items()} if saved else {},
            received={},
            step=saved.step if saved else 0,
            trained=set(saved.trained) if saved else set(),
            dropped=dict(saved.dropped) if saved else {},
        )
        self.trainer_log.append(
            TrainerBegan(
                at=AT,
                incarnation="i",
                step=trainer.step,
                policy_version=trainer.step,
                position=self._position(trainer.streams),
                counts={"trained": len(trainer.trained)},
            )
        )
        self.trainer = trainer
        self._notice_gone(trainer)
        trainer.to_replay = self._plan(trainer)

    def kill_trainer(self) -> None:
        assert self.trainer is not None
        kept = self.checkpoint.trained if self.checkpoint is not None else set()
        self.num_rolled_back += len(self.trainer.trained - kept)
        self.trainer = None

    def end_trainer(self) -> None:
        assert self.trainer is not None
        dropped = Counter(reason for one, reason in self.trainer.dropped.items() if not self.records[one].closed)
        queued = sum(not one.closed for one in (*self.trainer.queue, *(self.trainer.taking or ())))
        counts = {"trained": len(self.trainer.trained), "dropped": dict(dropped), "queued": queued}
        self.trainer_log.append(TrainerEnded(at=AT, reason="finished", message="", counts=counts))

    def receive(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        record = self._next_unreceived(trainer)
        assert record is not None
        trainer.received[self.epoch] = record.id.seq + 1
        trainer.queue.append(record)
        self.trainer_log.append(
            Queued(
                at=AT,
                received_at=AT,
                id=list(record.id),
                group_id=record.group_id,
                seat=record.seat,
                attempt=0,
                closed=record.closed,
            )
        )

    def begin_step(self) -> None:
        assert self.trainer is not None
        self._begin(self._whole_groups(self.trainer)[0], noted=True)

    def begin_replayed_step(self) -> None:
        assert self.trainer is not None
        wanted = self._ids(self.trainer.to_replay[0])
        self._begin([record for record in self.trainer.queue if record.id in wanted], noted=self.repeats_began)

    def finish_step(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        assert trainer.taking is not None
        replayed = bool(trainer.to_replay)
        trainer.step += 1
        self.trainer_log.append(
            StepTrained(at=AT, step=trainer.step, policy_version=trainer.step, loss=0.0, grad_norm=1.0, replayed=replayed)
        )
        trainer.trained |= {record.id for record in trainer.taking if not record.closed}
        self._settle(trainer, trainer.taking)
        trainer.taking = None
        if replayed:
            trainer.to_replay.pop(0)

    def drop_group(self) -> None:
        trainer = self.trainer
        assert trainer is not None
        group = self._whole_groups(trainer)[0]
        self.trainer_log.append(
            RecordsDropped(
                at=AT,
                reason="stale",
                samples=[list(record.id) for record in group if not record.closed],
                closures=[list(record.id) for record in group if record.closed],
            )
        )
        trainer.dropped |= {record.id: "stale" for record in group}
        trainer.queue = [record for record in trainer.queue if record not in group]
        self._settle(trainer, group)

    def save(self) -> None:
        """The checkpoint is durable; its note follows, and the commit."""
        trainer = self.trainer
        assert trainer is not None
        self.checkpoint = Checkpoint(
            step=trainer.step,
            streams={epoch: _copy(settled) for epoch, settled in trainer.streams.items()},
            trained=set(trainer.trained),
            dropped=dict(trainer.dropped),
        )
        self.trainer_log.append(
            Saved(at=AT, step=trainer.step, policy_version=trainer.step, position=self._position(trainer.streams))
        )
        self._free(trainer)

    def _begin(self, records: list[Record], *, noted: bool) -> None:
        trainer = self.trainer
        assert trainer is not None
        if noted:
            self.trainer_log.append(
                StepBegan(
                    at=AT,
                    step=trainer.step + 1,
                    policy_version=trainer.step,
                    samples=[list(record.id) for record in records if not record.closed],
                    closures=[list(record.id) for record in records if record.closed],
                    options={},
                )
            )
        trainer.taking = records
        trainer.queue = [record for record in trainer.queue if record not in records]

    def _settle(self, trainer: TrainerLife, records: list[Record]) -> None:
        for record in records:
            assert trainer.streams.setdefault(record.id.epoch, Settled()).add(record.id.seq), "settled twice"
        if not self.every_steps:
            self._free(trainer)

    def _free(self, trainer: TrainerLife) -> None:
        watermark = trainer.streams.get(self.epoch, Settled()).watermark
        if watermark > self.first:
            self.kept = self.kept[watermark - self.first :]
            self.first = watermark

    def _next_unreceived(self, trainer: TrainerLife) -> Record | None:
        """Next record of the stream that the trainer neither holds nor has settled."""
        settled = trainer.streams.get(self.epoch, Settled())
        for record in self.kept:
            if record.id.seq >= trainer.received.get(self.epoch, 0) and not settled.covers(record.id.seq):
                return record
        return None

    def _whole_groups(self, trainer: TrainerLife) -> list[list[Record]]:
        groups: dict[str, list[Record]] = {}
        for record in trainer.queue:
            groups.setdefault(record.group_id, []).append(record)
        return [group for group in groups.values() if len({record.seat for record in group}) == GROUP_SIZE]

    def _notice_gone(self, trainer: TrainerLife) -> None:
        settled = trainer.streams.setdefault(self.epoch, Settled())
        missing = [seq for seq in range(self.first) if not settled.covers(seq)]
        if missing:
            self.trainer_log.append(
                RecordsGone(
                    at=AT,
                    producer=PRODUCER,
                    epoch=self.epoch,
                    first=missing[0],
                    last=missing[-1] + 1,
                    num_records=len(missing),
                )
            )

    def _plan(self, trainer: TrainerLife) -> list[StepBegan]:
        """Steps after the checkpoint that an earlier process began, as long as their records can come again."""
        latest: dict[int, StepBegan] = {}
        for record in self.trainer_log:
            if isinstance(record, StepBegan):
                latest = {step: began for step, began in latest.items() if step < record.step}
                latest[record.step] = record
        coming = {record.id for record in self.kept}
        plan: list[StepBegan] = []
        while (began := latest.get(trainer.step + 1 + len(plan))) is not None and self._ids(began) <= coming:
            plan.append(began)
        return plan

    def _position(self, streams: dict[int, Settled]) -> list[dict[str, Any]]:
        position = BusPosition(
            streams=tuple(
                StreamPosition(producer=PRODUCER, epoch=epoch, watermark=settled.watermark, beyond=settled.runs())
                for epoch, settled in streams.items()
            )
        )
        return position.as_plain()

    @staticmethod
    def _ids(began: StepBegan) -> set[SampleId]:
        return {SampleId(*one) for one in began.samples + began.closures}


def _copy(settled: Settled) -> Settled:
    return replace(settled, _starts=dict(settled._starts), _ends=dict(settled._ends))
