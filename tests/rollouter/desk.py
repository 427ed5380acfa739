"""A dispatcher at work on a fake bus and a fake engine: one life of the rollouter's process, which may be cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from configs.schema import Settings
from rollouter.admission import Admission, HeldVersion
from rollouter.codec import Codec
from rollouter.data.sources import Rows
from rollouter.dispatch import Situation
from rollouter.failure_notes import FailureNotes
from rollouter.live import LiveView
from rollouter.prompts import prepare
from rollouter.run_in_hand import RunInHand, take_up
from rollouter.tasks import Row, load_rows
from sample_bus.protocols import Link
from tests.fakes.fake_engine import FakeEngine, FakeTokenizer
from tests.fakes.fake_producer import FakeProducer
from tests.rollouter.playing import make_runner

CODEC = Codec(FakeTokenizer())
DEADLINE_S = 60.0


class Desk:
    """What one process has: made by `open_desk`."""

    def __init__(self, run: RunInHand, producer: FakeProducer, admission: Admission, situation: Situation) -> None:
        self.run = run
        self.producer = producer
        self.admission = admission
        self.situation = situation
        self.books = run.keeper.books
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.run.dispatcher.run())

    def drain(self) -> None:
        self.situation.draining = True
        self.run.dispatcher.wake()

    async def ended(self) -> None:
        """Wait for its end. Raises what it ended with."""
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task
        self.run.keeper.close("drained")

    async def cut_off(self) -> None:
        """End it as a death would: nothing is noted any more."""
        self.run.keeper.release()
        self.producer.die()
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))

    def refund(self, count: int) -> None:
        """The trainer has given so many records back, in all."""
        self.admission.take_trainer(incarnation="first", origin_version=0, policy_version=0, num_refunded=count)
        self.run.dispatcher.wake()


@asynccontextmanager
async def open_desk(
    settings: Settings,
    producer: FakeProducer,
    engine: FakeEngine,
    *,
    loop: Any = None,
    rows: Rows | list[Row] | None = None,
    num_samples_needed: int | None = None,
    process: str = "p",
) -> AsyncIterator[Desk]:
    """Take the run up on the producer's stream; cut off at the end if it is still at work."""
    admission = Admission()
    situation = Situation(num_samples_needed=num_samples_needed)
    live = LiveView(settings)
    rows = load_rows("addition") if rows is None else rows
    run: RunInHand | None = None

    def rebase() -> bool:
        if run is not None and admission.incarnation is None:
            books = run.keeper.books
            beyond = books.num_recorded_from(producer.resumption.next_seq)
            admission.rebase(producer.resumption, in_flight=books.in_flight + beyond)
        return True

    run = await take_up(
        settings,
        cast(Link, producer),
        prompts=prepare(rows, settings.data, CODEC, seed=settings.seed, max_prompt_tokens=100),
        runner=make_runner(
            engine,
            loop=loop,
            timeout_s=settings.rollouter.rollout_timeout_s,
            max_model_len=settings.engine.max_model_len,
            progress_interval_s=settings.rollouter.progress_interval_s,
        ),
        admission=admission,
        live=live,
        situation=situation,
        stop_token_ids=CODEC.stop_token_ids(["\n"]),
        process=process,
        rebase=rebase,
        wake=lambda: None,
        on_change=lambda: None,
        notes=FailureNotes(),
    )
    rebase()
    admission.take_held(HeldVersion(incarnation="first", policy_version=0))
    admission.take_trainer(incarnation="first", origin_version=0, policy_version=0, num_refunded=0)
    desk = Desk(run, producer, admission, situation)
    try:
        yield desk
    finally:
        await desk.cut_off()


def desk_settings(run_dir: Path, **changes: Any) -> Settings:
    """Settings of a run whose budget is wide; `rollouter` as a mapping."""
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "group_size": 4,
        "samples_per_step": 8,
        "staleness_threshold": 1000.0,
        "sampling": {"max_tokens": 8},
        "engine": {"max_model_len": 128},
        "data": {"held_out_fraction": 0.0},
        "evaluation": {"at_start": False, "at_end": False},
        "bus": {"max_queued_samples": 100_000},
    }
    return Settings.model_validate({**values, **changes})
