"""The trainer daemon: one task group around bus, intake, training loop and publisher.

It reads where the run stands (checkpoint, journal), binds the bus at that position, so that a rollouter may come at any time,
then prepares the model, publishes the first version, trains. Ends with topic `end`: finished, drained, stopped (at once) or
failed with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import structlog

from configs.agreed import agreed_values
from configs.command import remember
from configs.listening import check_weight_listener
from configs.live import LiveSettings
from configs.logs import set_level
from configs.paths import bus_address, held_alone, make_run_dir, sockets_of
from configs.schema import Settings
from configs.signals import ending_signals
from sample_bus.errors import PeerLost
from sample_bus.journal import TrainerBegan, TrainerEnded
from sample_bus.journal_writer import JournalWriter
from sample_bus.messages import (
    Accepted,
    EndOfRun,
    EndReason,
    Failed,
    RollouterStatus,
    TrainerState,
)
from sample_bus.open import open_hub
from sample_bus.peers import LossReason
from sample_bus.protocols import Hub
from sample_bus.settings_log import SETTINGS_FILE, SettingsLog
from trainer.age_gate import AgeGate
from trainer.aged import AgeRule, Lineage
from trainer.automatic import AutomaticStaleness
from trainer.bias import BiasBook
from trainer.bias_topic import BiasTopic
from trainer.books import Books
from trainer.clock import ActivityClock
from trainer.commits import Commits
from trainer.errors import RunDirInUse, TrainerError
from trainer.groups import GroupAssembler
from trainer.intake import Intake
from trainer.live_settings import LiveSettingsTopic, Moment, restore
from trainer.model_source import check_source
from trainer.process import TRAINING_THREAD
from trainer.retained import Retained, retained_dir
from trainer.retries import Retries
from trainer.signal import SignalFilter
from trainer.standing import Standing, standing_of
from trainer.status import StatusBoard

log = structlog.get_logger()

_WAIT_LINE_EVERY_S = 10.0
_GOODBYE_TIMEOUT_S = 10.0
_LOCK_FILE = ".trainer.lock"
_STOPPED_AT_ONCE = "stopped at once"
_ANSWERED_BY_TRAINING = ("round.result", "evaluation.result", "weights.check", "weights.checked")
"""Requests that have handlers once the libraries and the model are loaded."""


class _Drained(Exception):
    """Raised when draining is asked for and there is nothing to wait for: training has not begun, or the rollouter is gone."""


class RolloutFailed(TrainerError):
    """Raised when the rollouter says that it cannot go on."""


async def run(settings: Settings) -> None:
    """Train as `settings` say. Returns when the run is finished or was drained; raises what made it fail."""
    incarnation = secrets.token_hex(4)
    drain, stop = asyncio.Event(), asyncio.Event()
    _listen_to_signals(drain, stop)
    check_source(settings.model)
    make_run_dir(settings.run_dir)
    check_weight_listener(settings.weight_sync)
    if settings.weight_sync.transport == "file" and settings.weight_sync.directory is not None:
        make_run_dir(settings.weight_sync.directory, "weight_sync.directory")
    address = bus_address(settings)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(held_alone(settings.run_dir / _LOCK_FILE))
        except BlockingIOError:
            raise RunDirInUse(
                f"{settings.run_dir}: another trainer is at work here; stop it, or give another run_dir"
            ) from None
        held.enter_context(sockets_of(settings))
        standing = standing_of(settings)
        journal = held.enter_context(contextlib.closing(JournalWriter(standing.journal_path)))
        settings_log = held.enter_context(contextlib.closing(SettingsLog(standing.journal_path.with_name(SETTINGS_FILE))))
        live = LiveSettings(settings)
        restore(live, settings_log)
        if live.settings.logging.level != settings.logging.level:
            set_level(live.settings.logging.level)
        async with open_hub(
            settings.bus,
            address=address,
            run=settings.name,
            run_id=standing.run_id,
            incarnation=incarnation,
            quarantine_dir=settings.run_dir / "quarantine",
        ) as hub:
            hub.expect(_ANSWERED_BY_TRAINING)
            hub.set_origin(standing.policy_version)
            hub.seek(standing.position)
            remember(settings)
            log.info(
                "trainer listens",
                address=address,
                run_id=standing.run_id,
                incarnation=incarnation,
                run_dir=str(settings.run_dir),
                step=standing.step,
            )
            daemon = TrainerDaemon(settings, live, settings_log, hub, standing, journal, incarnation=incarnation, drain=drain)
            await _until_over(daemon, stop)


async def _until_over(daemon: TrainerDaemon, stop: asyncio.Event) -> None:
    """Until the daemon has ended by itself, or was told to at once; afterwards nothing of it runs."""
    work = asyncio.ensure_future(daemon.run())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not work.done():
            log.warning("stopping at once")
            work.cancel()
            await asyncio.wait((work,))
    if not work.cancelled():
        work.result()


class TrainerDaemon:
    """Wires the parts and answers the control requests."""

    def __init__(
        self,
        settings: Settings,
        live: LiveSettings,
        settings_log: SettingsLog,
        hub: Hub,
        standing: Standing,
        journal: JournalWriter,
        *,
        incarnation: str,
        drain: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._hub = hub
        self._standing = standing
        self._journal = journal
        self._incarnation = incarnation
        self._drain = drain
        self._live = live
        self._level = live.settings.logging.level
        self._clock = ActivityClock()
        self._retained = Retained(retained_dir(settings.run_dir, standing.run_id)) if settings.bus.retain else None
        cadences = {change.old for change in live.changes if change.key == "checkpoint.every_steps"}
        never_saves = cadences | {live.settings.checkpoint.every_steps} == {0}
        self._commits = Commits(hub, journal, at_once=never_saves)
        self._retries = Retries(run_id=standing.run_id, write=journal.write, history=standing.history.retries)
        gate = AgeGate(
            rule=lambda: AgeRule.of(live.settings),
            lineage=Lineage(incarnation=incarnation, origin_version=standing.policy_version),
            ask=self._retries.ask,
            on_hold=lambda awaits: self._board.set(detail=str(awaits)),
        )
        self._assembler = GroupAssembler(
            on_failed_seat=live.settings.on_failed_seat,
            min_survivors=live.settings.min_survivors,
            stale_reason=gate.stale_reason,
        )
        self._intake = Intake(
            hub,
            groups_per_step=lambda: live.settings.samples_per_step // live.settings.group_size,
            gate=gate,
            assembler=self._assembler,
            signal=SignalFilter(lambda: live.settings.filters, lambda: live.settings.trainer),
            journal=journal,
            books=Books(standing.counts),
            bias=BiasBook(standing.bias),
            history=standing.history,
            retained=self._retained,
            is_full=self._bus_is_full,
            on_change=self._touch,
            on_settled=self._commits.settled,
        )
        for change in live.changes:
            if change.key == "samples_per_step":
                self._intake.note_size(change.old // settings.group_size)
        self._board = StatusBoard(
            hub,
            self._clock,
            incarnation=incarnation,
            origin_version=standing.policy_version,
            step=standing.step,
            num_steps=settings.num_steps,
            agreed=agreed_values(settings),
            counts=self._intake.counts,
            rollouter=lambda: hub.rollouter,
            on_step=lambda summary, replayed: self._automatic.take_step(summary, replayed=replayed),
        )
        settled = standing.counts
        self._board.set(origin_seats=settled.trained + sum(settled.dropped.values()) + settled.closed)
        self._bias_topic = BiasTopic(hub, self._intake.bias)
        self._rollouter_failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._live_settings = LiveSettingsTopic(hub, live, settings_log, moment=self._moment, on_change=self._take_change)
        self._automatic = AutomaticStaleness(live, self._clock, self._live_settings)
        hub.handle("run.failed", Failed, self._take_failure)

    async def run(self) -> None:
        """Everything from the first topic to the last."""
        standing = self._standing
        self._journal.write(
            TrainerBegan(
                at=time.time(),
                incarnation=self._incarnation,
                step=standing.step,
                policy_version=standing.policy_version,
                position=standing.position.as_plain(),
                counts=standing.counts.model_dump(mode="json"),
            )
        )
        self._live_settings.tell_what_was_set_otherwise(standing.history.options)
        await self._live_settings.publish()
        await self._board.flush()
        end = EndOfRun(reason=EndReason.STOPPED, message=_STOPPED_AT_ONCE)
        executor = ThreadPoolExecutor(1, thread_name_prefix=TRAINING_THREAD)
        try:
            async with asyncio.TaskGroup() as tasks:
                side = [
                    tasks.create_task(work)
                    for work in (
                        self._board.run(),
                        self._automatic.run(),
                        self._retries.run(self._hub),
                        self._bias_topic.run(),
                        self._follow_flights(),
                        self._watch_rollouter(),
                        self._say_what_is_awaited(),
                        self._end_when_drained_at_start(),
                    )
                ]
                try:
                    await self._train(executor)
                finally:
                    for task in side:
                        task.cancel()
            end = (
                EndOfRun(reason=EndReason.DRAINED, message="drained on request")
                if self._drain.is_set() and self._board.status.step < self._settings.num_steps
                else EndOfRun(reason=EndReason.FINISHED)
            )
        except ExceptionGroup as failures:
            first = _first(failures)
            if isinstance(first, _Drained):
                end = EndOfRun(reason=EndReason.DRAINED, message=f"drained on request {first}")
                return
            end = EndOfRun(reason=EndReason.FAILED, message=f"{type(first).__name__}: {first}")
            raise first from first.__cause__
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            if self._retained is not None:
                self._retained.close()
            await asyncio.shield(self._say_goodbye(end))

    async def _end_when_drained_at_start(self) -> None:
        """Nothing is in flight before training begins: draining then is stopping."""
        await self._drain.wait()
        if self._board.status.state is TrainerState.STARTING:
            raise _Drained("before the first step")

    async def _train(self, executor: Executor) -> None:
        """Load what brings torch along, then train, unless the rollouter gives up first: nothing more would come."""
        self._board.enter(TrainerState.STARTING, "loading libraries")
        training = await asyncio.get_running_loop().run_in_executor(executor, importlib.import_module, "trainer.training")
        around = training.Surroundings(
            settings=self._settings,
            live=self._live,
            hub=self._hub,
            board=self._board,
            clock=self._clock,
            intake=self._intake,
            commits=self._commits,
            journal=self._journal,
            retained=self._retained,
            checkpoint=self._standing.checkpoint,
            history=self._standing.history,
            run_id=self._standing.run_id,
            incarnation=self._incarnation,
            drain=self._drain,
            executor=executor,
        )
        running = asyncio.ensure_future(training.train(around))
        try:
            await asyncio.wait((running, self._rollouter_failed), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise RolloutFailed(self._rollouter_failed.result())
            await running
        finally:
            running.cancel()
            await asyncio.wait((running,))

    async def _watch_rollouter(self) -> None:
        """Raise PeerLost when no rollouter comes, or one is lost and `bus.on_lost` is `fail` or its deadline passes."""
        connect_timeout_s = self._settings.bus.connect_timeout_s
        await self._hub.wait_rollouter(connect_timeout_s)
        self._board.touch()
        async for lost in self._hub.rollouter_lost():
            self._board.touch()
            if self._board.status.state is TrainerState.ENDED or self._rollouter_failed.done():
                return
            if self._drain.is_set():
                raise _Drained("after the rollouter had left")
            if self._live.settings.bus.on_lost == "fail" and lost.reason is not LossReason.REPLACED:
                raise PeerLost(f"rollouter {lost}")
            log.warning(
                "rollouter lost, waiting for it", rollouter=lost.name, reason=str(lost.reason), deadline_s=connect_timeout_s
            )
            name = await self._hub.wait_rollouter(connect_timeout_s)
            self._intake.note_streams(self._hub.position())
            log.info("rollouter is back", rollouter=name)
            self._board.touch()

    async def _follow_flights(self) -> None:
        """What the rollouter has in flight, and which tasks it has issued again."""
        async for status in self._hub.watch("rollouter", RollouterStatus):
            self._retries.take(status.retries_taken)
            self._intake.take_status(status)

    async def _say_what_is_awaited(self) -> None:
        """No silent wait: while the trainer waits, a line every few seconds names what for."""
        while True:
            await asyncio.sleep(_WAIT_LINE_EVERY_S)
            status, waited_s = self._board.status, self._board.state_age_s()
            if status.state not in (TrainerState.WAITING, TrainerState.EVALUATING) or waited_s < _WAIT_LINE_EVERY_S:
                continue
            rollouter = self._hub.get("rollouter", RollouterStatus)
            log.info(
                "waiting",
                awaits=status.detail,
                lacks=self._lacks() if status.state is TrainerState.WAITING else "the rollouter's answer",
                rollouter=f"{rollouter.state}: {rollouter.detail}" if rollouter else "not connected",
                waited_s=round(waited_s, 1),
            )

    def _lacks(self) -> str:
        """What the next batch lacks, and whether there is room for it at all."""
        held = self._hub.consumer_statistics()
        text = self._intake.waiting_for()
        if self._bus_is_full():
            text += (
                f"; the bus is full with {held.queued} records ({held.queued_bytes} bytes): if no group among them can become "
                "whole, raise bus.max_queued_samples or bus.max_queued_bytes"
            )
        return text

    def _bus_is_full(self) -> bool:
        bus, held = self._settings.bus, self._hub.consumer_statistics()
        return held.queued >= bus.max_queued_samples or held.queued_bytes >= bus.max_queued_bytes

    async def _take_failure(self, failure: Failed) -> Accepted:
        if not self._rollouter_failed.done():
            self._rollouter_failed.set_result(failure.message)
        return Accepted()

    def _moment(self) -> Moment:
        status = self._board.status
        return Moment(
            next_step=self._standing.step + self._intake.num_batches_bound + 1,
            next_version=status.policy_version + (2 if status.state is TrainerState.PUBLISHING else 1),
        )

    def _take_change(self, settings: Settings) -> None:
        """Live settings have changed: what does not read them at each decision is told."""
        if settings.logging.level != self._level:
            self._level = settings.logging.level
            set_level(self._level)
        if settings.checkpoint.every_steps:
            self._commits.hold()
        self._assembler.obey(on_failed_seat=settings.on_failed_seat, min_survivors=settings.min_survivors)
        self._intake.take_change()
        self._board.touch()

    def _touch(self) -> None:
        self._board.touch()
        self._bias_topic.touch()

    async def _say_goodbye(self, end: EndOfRun) -> None:
        """Tell everyone how the run ended and give the rollouter a moment to leave."""
        log.info("run ended", reason=str(end.reason), message=end.message)
        self._journal.write(
            TrainerEnded(
                at=time.time(),
                reason=str(end.reason),
                message=end.message,
                counts=self._intake.counts().model_dump(mode="json"),
            )
        )
        self._board.enter(TrainerState.ENDED, str(end.reason))
        await self._board.flush()
        await self._bias_topic.publish()
        await self._hub.publish("end", end)
        if end.message == _STOPPED_AT_ONCE or not self._has_rollouter():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                async for lost in self._hub.rollouter_lost():
                    if not self._has_rollouter():
                        log.debug("rollouter has left", rollouter=lost.name, reason=str(lost.reason))
                        return

    def _has_rollouter(self) -> bool:
        return self._hub.rollouter is not None


def _listen_to_signals(drain: asyncio.Event, stop: asyncio.Event) -> None:
    """The first SIGTERM, SIGINT or SIGHUP drains, the second stops at once."""

    def on_signal() -> None:
        if drain.is_set():
            stop.set()
        else:
            log.info("draining: the step in progress is finished, then the run ends; a second signal stops at once")
            drain.set()

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first
