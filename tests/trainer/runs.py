"""A trainer's end without a model, as tests drive it: streams, consumer, intake, journal; restarted at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sample_bus.journal import Record, Saved, StepBegan, StepTrained, TrainerBegan, read_journal
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import BiasReport, Counts
from sample_bus.position import BusPosition
from tests.fakes.fake_consumer import FakeConsumer, FakeStreams
from tests.fakes.samples import make_closed, make_sample
from trainer.age_gate import AgeGate
from trainer.aged import AgeRule, Lineage
from trainer.bias import BiasBook
from trainer.books import Books
from trainer.groups import GroupAssembler
from trainer.history import history_of
from trainer.intake import Intake, plain_ids
from trainer.plan import Batch
from trainer.retries import Retries
from trainer.signal import SignalFilter

GROUP_SIZE = 2
GROUPS_PER_STEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What a checkpoint holds of the run."""

    step: int = 0
    position: BusPosition = field(default_factory=BusPosition)
    counts: Counts = field(default_factory=Counts)
    version: int = 0
    bias: BiasReport = field(default_factory=BiasReport)


@dataclass(slots=True)
class Trainer:
    """One process."""

    consumer: FakeConsumer
    intake: Intake
    journal: JournalWriter
    step: int
    version: int
    retries: Retries
    ends_version: bool = False
    """Whether a new version follows the next step."""

    async def begin_step(self) -> Batch:
        """Wait for a batch and write it down, as the loop does."""
        async with asyncio.timeout(30):
            batch = await self.intake.next_batch(lambda: self.version, is_last=lambda: self.ends_version)
        self.journal.write(
            StepBegan(
                at=0.0,
                step=self.step + 1,
                policy_version=self.version,
                samples=plain_ids([one.id for group in batch.groups for one in group.members]),
                closures=plain_ids([one.id for group in batch.groups for one in group.closures]),
                options={"trainer.learning_rate": 0.1},
                weighting={} if batch.weighting is None else batch.weighting.as_plain(),
            )
        )
        return batch

    async def take_step(self) -> Batch:
        batch = await self.begin_step()
        self.finish_step(batch)
        return batch

    def finish_step(self, batch: Batch) -> None:
        self.step += 1
        self.journal.write(
            StepTrained(at=0.0, step=self.step, policy_version=self.version, loss=0.0, grad_norm=0.0, replayed=batch.replayed)
        )
        self.intake.settle_trained(batch)

    def save(self) -> SavedRun:
        saved = SavedRun(
            step=self.step,
            position=self.consumer.position(),
            counts=self.intake.settled_counts(),
            version=self.version,
            bias=self.intake.bias(),
        )
        self.journal.write(Saved(at=0.0, step=self.step, policy_version=self.version, position=saved.position.as_plain()))
        return saved

    async def rest(self) -> None:
        """Everything that was offered has been taken."""
        async with asyncio.timeout(30):
            await self.consumer.idle()
            for _ in range(3):  # what follows losses gets its turns
                await asyncio.sleep(0)


@asynccontextmanager
async def trainer(
    streams: FakeStreams,
    path: Path,
    saved: SavedRun | None = None,
    *,
    max_staleness: int | None = None,
    groups_per_step: int = GROUPS_PER_STEP,
    incarnation: str = "first",
    rule: Callable[[], AgeRule] | None = None,
    signal: SignalFilter | None = None,
    **options: Any,
) -> AsyncIterator[Trainer]:
    """A trainer that goes on from `saved`; leaving is a kill: nothing is closed in good order."""
    saved = saved or SavedRun()
    history = history_of(read_journal(path), step=saved.step, position=saved.position)
    journal = JournalWriter(path)
    journal.write(
        TrainerBegan(
            at=0.0,
            incarnation=incarnation,
            step=saved.step,
            policy_version=saved.version,
            position=saved.position.as_plain(),
            counts=saved.counts.model_dump(mode="json"),
        )
    )
    consumer = FakeConsumer(streams, saved.position)
    retries = Retries(run_id="run", write=journal.write, history=history.retries)
    gate = AgeGate(
        rule=rule or (lambda: AgeRule(max_staleness=max_staleness)),
        lineage=Lineage(incarnation=incarnation, origin_version=saved.version),
        ask=retries.ask,
    )
    intake = Intake(
        consumer,
        groups_per_step=lambda: groups_per_step,
        gate=gate,
        assembler=GroupAssembler(stale_reason=gate.stale_reason, **options),
        signal=signal,
        journal=journal,
        books=Books(saved.counts),
        bias=BiasBook(saved.bias),
        history=history,
    )
    running = [asyncio.ensure_future(intake.run()), asyncio.ensure_future(intake.follow_losses())]
    consumer.connect()
    try:
        yield Trainer(consumer, intake, journal, saved.step, saved.version, retries)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        for task in running:
            assert task.cancelled() or task.exception() is None, task.exception()
        streams.consumer = None
        journal.close()


def offer_group(
    streams: FakeStreams,
    number: int,
    *,
    seats: Sequence[int] = tuple(range(GROUP_SIZE)),
    closed: Sequence[int] = (),
    size: int = GROUP_SIZE,
    version: int = 0,
    reason: str = "timeout",
    rewards: Sequence[float] = (),
    **place: Any,
) -> None:
    """Samples for `seats` with their `rewards` (0 where there are none), closed seats for `closed`."""
    for seat, reward in zip_longest(seats, rewards, fillvalue=0.0):
        made = make_sample(group_id=f"g{number}", seat=int(seat), group_size=size, policy_version=version, reward=float(reward))
        streams.offer(made, **place)
    for seat in closed:
        streams.offer(make_closed(group_id=f"g{number}", seat=seat, group_size=size, reason=reason), **place)


def names(batch: Batch) -> list[str]:
    return [group.group_id for group in batch.groups]


def records(path: Path, *kinds: type[Record]) -> list[Any]:
    return [record for record in read_journal(path) if isinstance(record, kinds)]
