"""A process that trains as the trainer does, with weights that are only a digest. It may be killed at any moment.

python -m tests.integration.chaos.consumer PLACE RUN_DIR

The trainer's own intake, journal, commits and checkpoints; a step folds its samples, in their order, into a digest and a list
(`weights`). Each step has a learning rate drawn at random, as if someone turned it all the time: a step that is taken again has
the one that the journal names, or its loss is another. Ends when the producer has ended and all of it is trained or dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
import time
from pathlib import Path

import structlog

from configs.schema import BusSettings, CheckpointSettings, Settings
from sample_bus.journal import Saved, StepBegan, StepTrained, TrainerBegan, TrainerEnded
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import EndOfRun, EndReason, RollouterState, RollouterStatus
from sample_bus.open import open_hub
from sample_bus.protocols import Hub
from tests.integration.chaos import rollouts
from tests.integration.chaos.weights import Weights
from tests.sample_bus.conformance.places import Place
from trainer.age_gate import AgeGate
from trainer.aged import AgeRule, Lineage
from trainer.books import Books
from trainer.checkpoint import DIRECTORY, load, save_checkpoint
from trainer.commits import Commits
from trainer.groups import GroupAssembler
from trainer.intake import Intake, plain_ids
from trainer.plan import Batch
from trainer.run_state import RunState
from trainer.standing import Standing, standing_of

EVERY_STEPS = 3
STEP_S = 0.01
GOODBYE_S = 60.0
RATE = "trainer.learning_rate"


class Trainer:
    def __init__(self, settings: Settings, hub: Hub, standing: Standing, journal: JournalWriter, incarnation: str) -> None:
        self._settings = settings
        self._hub = hub
        self._standing = standing
        self._journal = journal
        self._incarnation = incarnation
        self._weights = Weights()
        if standing.checkpoint is not None:
            load(standing.checkpoint, {"weights": self._weights})
        self._step = standing.step
        self._changed = asyncio.Event()
        self._commits = Commits(hub, journal, at_once=False)
        self._intake = Intake(
            hub,
            groups_per_step=lambda: settings.samples_per_step // settings.group_size,
            gate=AgeGate(rule=AgeRule, lineage=Lineage(incarnation=incarnation)),
            assembler=GroupAssembler(on_failed_seat=settings.on_failed_seat, min_survivors=settings.min_survivors),
            journal=journal,
            books=Books(standing.counts),
            history=standing.history,
            on_change=self._changed.set,
            on_settled=self._commits.settled,
        )

    async def run(self) -> None:
        self._journal.write(
            TrainerBegan(
                at=time.time(),
                incarnation=self._incarnation,
                step=self._standing.step,
                policy_version=0,
                position=self._standing.position.as_plain(),
                counts=self._standing.counts.model_dump(mode="json"),
            )
        )
        async with asyncio.TaskGroup() as tasks:
            side = [tasks.create_task(work) for work in (self._intake.run(), self._intake.follow_losses())]
            everything = tasks.create_task(self._everything_received())
            while (batch := await self._next_batch(everything)) is not None:
                await self._train(batch)
                if self._step % EVERY_STEPS == 0:
                    await self._save()
            await self._save()
            self._intake.close_unfinished()
            for task in side:
                task.cancel()
        counts = self._intake.counts().model_dump(mode="json")
        self._journal.write(TrainerEnded(at=time.time(), reason=EndReason.FINISHED.value, message="", counts=counts))
        await self._hub.publish("end", EndOfRun(reason=EndReason.FINISHED))
        async with asyncio.timeout(GOODBYE_S):
            async for _ in self._hub.rollouter_lost():
                if self._hub.rollouter is None:
                    break

    async def _next_batch(self, everything: asyncio.Task[None]) -> Batch | None:
        """The next one; None when no more can come."""
        batch = asyncio.ensure_future(self._intake.next_batch(lambda: 0))
        try:
            await asyncio.wait((batch, everything), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # a batch that is there needs no longer
            return batch.result() if batch.done() else None
        finally:
            batch.cancel()

    async def _everything_received(self) -> None:
        """Return when the producer has ended and each record of its stream was received."""
        async for status in self._hub.watch("rollouter", RollouterStatus):
            if status.state is RollouterState.ENDED:
                break
        while (counts := self._intake.counts()).received + counts.closed < int(status.detail):
            self._changed.clear()
            await self._changed.wait()

    async def _train(self, batch: Batch) -> None:
        members = [leased for group in batch.groups for leased in group.members]
        rate = batch.options[RATE] if batch.options is not None else random.random()
        self._step += 1
        self._journal.write(
            StepBegan(
                at=time.time(),
                step=self._step,
                policy_version=0,
                samples=plain_ids([leased.id for leased in members]),
                closures=plain_ids([lease.id for group in batch.groups for lease in group.closures]),
                options={RATE: rate},
            )
        )
        await self._journal.flush()
        await asyncio.sleep(STEP_S)
        loss = self._weights.train([leased.sample for leased in members], rate)
        self._journal.write(
            StepTrained(at=time.time(), step=self._step, policy_version=0, loss=loss, grad_norm=1.0, replayed=batch.replayed)
        )
        self._intake.settle_trained(batch)

    async def _save(self) -> None:
        await self._journal.flush()
        state = RunState(
            run_id=self._standing.run_id,
            incarnation=self._incarnation,
            step=self._step,
            policy_version=0,
            position=self._hub.position(),
            counts=self._intake.settled_counts(),
        )
        save_checkpoint(self._settings.run_dir / DIRECTORY, {"weights": self._weights}, state=state, keep=2)
        self._journal.write(Saved(at=time.time(), step=self._step, policy_version=0, position=state.position.as_plain()))
        await self._journal.flush()
        self._commits.saved(state.position)


def settings_of(bus: BusSettings, run_dir: Path) -> Settings:
    return Settings(
        run_dir=run_dir,
        group_size=rollouts.GROUP_SIZE,
        samples_per_step=2 * rollouts.GROUP_SIZE,
        bus=bus,
        checkpoint=CheckpointSettings(every_steps=EVERY_STEPS, keep=2, resume="auto"),
    )


async def main(place: Place, run_dir: Path) -> None:
    settings = settings_of(place.settings(), run_dir)
    standing = standing_of(settings)
    incarnation = secrets.token_hex(4)
    with contextlib.closing(JournalWriter(standing.journal_path)) as journal:
        async with open_hub(
            settings.bus,
            address=place.address,
            run=settings.name,
            run_id=standing.run_id,
            incarnation=incarnation,
            quarantine_dir=run_dir / "quarantine",
        ) as hub:
            hub.set_origin(0)
            hub.seek(standing.position)
            await Trainer(settings, hub, standing, journal, incarnation).run()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(Place.from_text(sys.argv[1]), Path(sys.argv[2])))
