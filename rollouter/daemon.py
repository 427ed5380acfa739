"""The rollouter daemon: one task group around link, engines, dispatch, following and evaluation.

It connects first, waits for the trainer's model, starts the engines, follows the first version, and only then generates. Ends
with topic `end`, when drained, or with the error that stops it; the trainer hears of the latter.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import structlog

from agent_loop.errors import AgentLoopError
from agent_loop.loop import AgentLoop, load_agent_loop
from agent_loop.rewards import Scoring
from configs.agreed import check_agreement
from configs.errors import ConfigError
from configs.paths import bus_address, held_alone, make_run_dir, socket_dir, sockets_of
from configs.schema import Settings
from configs.signals import ending_signals
from rollouter.adapter_engine import adapter_scale, with_adapter
from rollouter.bookkeeping import known_next
from rollouter.codec import Codec, load_codec
from rollouter.data.framing import Framing
from rollouter.data.measure import Model
from rollouter.data.sources import Rows, open_rows, read_all
from rollouter.engine_pool import EnginePool
from rollouter.engines import EngineFleet
from rollouter.errors import AnotherModel, RunDirInUse, TrainerFailed
from rollouter.loops import setup_of
from rollouter.model_in_use import ModelInUse
from rollouter.pipeline import CHECKED_TASKS, Pipeline
from rollouter.prompts import MAX_ROWS_IN_MEMORY, Prompts, prepare
from rollouter.run_in_hand import RunInHand
from rollouter.scoring import reward_of
from rollouter.weight_cache import WeightCache
from sample_bus.errors import BusError, Ended, PeerLost
from sample_bus.messages import (
    Accepted,
    EndOfRun,
    EndReason,
    Failed,
    LiveSettingsState,
    RollouterState,
    RoundResult,
    TaskRetries,
    TrainerStatus,
)
from sample_bus.open import open_link
from sample_bus.protocols import Link

log = structlog.get_logger()

SWITCH_S = 0.0005
"""How long a thread that asks for the interpreter waits at most. The loop gives it away at each write; Python's default of 5 ms
has it wait that long for it while the bus's thread is busy, hundreds of times in a burst."""
_WAIT_LINE_EVERY_S = 5.0
_CLOSE_TIMEOUT_S = 30.0
_LOCK_FILE = "rollouter.lock"


class OpenFleet(Protocol):
    """Makes the engines of a run; nothing starts yet. `live` gives the settings in force, for what may change while it runs."""

    def __call__(
        self,
        settings: Settings,
        *,
        live: Callable[[], Settings],
        on_change: Callable[[], None],
        on_round_result: Callable[[RoundResult], None],
    ) -> EngineFleet: ...


def open_pool(
    settings: Settings,
    *,
    live: Callable[[], Settings],
    on_change: Callable[[], None],
    on_round_result: Callable[[RoundResult], None],
) -> EngineFleet:
    """The real engines: vLLM servers."""
    sockets = socket_dir(settings)
    cache = WeightCache(
        settings.weight_sync, socket_dir=sockets / "cache", log_file=settings.run_dir / "logs" / "weight-cache.log"
    )
    return EnginePool(
        with_adapter(settings),
        settings.weight_sync,
        socket_dir=sockets,
        log_dir=settings.run_dir / "logs",
        partial_rollout=lambda: live().partial_rollout,
        live=live,
        on_change=on_change,
        on_round_result=on_round_result,
        cache=cache if settings.weight_sync.host_cache else None,
        adapter_scale=adapter_scale(settings),
    )


LoadCodec = Callable[[str], Codec]


async def run(settings: Settings, *, open_fleet: OpenFleet = open_pool, codec_of: LoadCodec | None = None) -> None:
    """Serve the run until it ends or this process is drained. Raises ConfigError, RunDirInUse, and what made it fail.

    The first SIGTERM, SIGINT or SIGHUP drains, the second stops at once.
    """
    sys.setswitchinterval(SWITCH_S)
    make_run_dir(settings.run_dir)
    user = UserCode.load(settings)
    drain, stop = asyncio.Event(), asyncio.Event()
    _listen_to_signals(drain, stop)
    daemon = RollouterDaemon(settings, user, open_fleet=open_fleet, codec_of=codec_of or _codec_loader(settings), drain=drain)
    with ExitStack() as held:
        try:
            held.enter_context(held_alone(settings.run_dir / _LOCK_FILE))
        except BlockingIOError:
            raise RunDirInUse(
                f"{settings.run_dir}: another rollouter is at work here; stop it, or give another run_dir"
            ) from None
        held.enter_context(sockets_of(settings))
        await _until_over(daemon, stop)


async def _until_over(daemon: RollouterDaemon, stop: asyncio.Event) -> None:
    work = asyncio.create_task(daemon.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            log.warning("stopping at once")
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.wait((work,))
    if not work.cancelled():
        work.result()


class UserCode:
    """What the settings name by path; imported before anything else starts."""

    def __init__(self, *, rows: Rows, loop: AgentLoop, reward: Scoring) -> None:
        self.rows = rows
        self.loop = loop
        self.reward = reward

    @classmethod
    def load(cls, settings: Settings) -> UserCode:
        """Raises ConfigError."""
        try:
            loop = load_agent_loop(settings.rollouter.agent_loop, setup_of(settings))
        except AgentLoopError as error:
            raise ConfigError(str(error)) from error
        return cls(rows=_checked_rows(settings), loop=loop, reward=reward_of(settings))


class RollouterDaemon:
    """Wires the parts; owns link and engines."""

    def __init__(
        self, settings: Settings, user: UserCode, *, open_fleet: OpenFleet, codec_of: LoadCodec, drain: asyncio.Event
    ) -> None:
        self._settings = settings
        self._user = user
        self._codec_of = codec_of
        self._drain = drain
        self._pipeline: Pipeline | None = None
        self._link: Link | None = None
        self._ended_by = ""
        self._model: ModelInUse | None = None
        self._fleet = open_fleet(settings, live=self._settings_in_force, on_change=self._touch, on_round_result=self._catch_up)

    @property
    def run_in_hand(self) -> RunInHand | None:
        """The run that is played now."""
        return None if self._pipeline is None else self._pipeline.run_in_hand

    async def run(self) -> None:
        """Everything from the first greeting to the last engine's end."""
        address = bus_address(self._settings)
        try:
            async with open_link(
                self._settings.bus,
                address=address,
                name="rollouter",
                role="rollouter",
                spool_dir=self._settings.run_dir / "spool",
                known_next=lambda run_id, epoch: known_next(self._settings.run_dir, run_id, epoch),
            ) as link:
                self._link = link
                log.info("rollouter started", address=address, run_dir=str(self._settings.run_dir))
                async with self._user.reward.running():
                    await self._serve(link)
        finally:
            await asyncio.shield(self._close_fleet())

    async def _serve(self, link: Link) -> None:
        pipeline = self._pipeline = Pipeline(
            self._settings, link, self._fleet, loop=self._user.loop, reward=self._user.reward, process=secrets.token_hex(3)
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._work(link, pipeline))
                side = [
                    tasks.create_task(part)
                    for part in (
                        pipeline.board.run(),
                        self._watch_settings(link, pipeline),
                        self._watch_trainer(link, pipeline),
                        self._watch_retries(link, pipeline),
                        self._watch_resumptions(link, pipeline),
                        self._watch_loss(link),
                        self._say_what_is_awaited(pipeline),
                    )
                ]
                side += [tasks.create_task(part) for part in (self._watch_end(link, work), self._watch_drain(pipeline, work))]
                await asyncio.wait((work,))
                for part in side:
                    part.cancel()
        except ExceptionGroup as failures:
            first = first_of(failures)
            self._ended_by = f"failed: {type(first).__name__}: {first}"
            await self._tell_failure(link, pipeline, first)
            raise first from first.__cause__
        finally:
            await asyncio.shield(self._say_goodbye(link, pipeline))

    async def _work(self, link: Link, pipeline: Pipeline) -> None:
        bus = self._settings.bus
        pipeline.enter(RollouterState.STARTING, "waiting for the trainer")
        await link.wait_connected(bus.connect_timeout_s)
        await self._fleet.launch()
        self._model = model = await self._wait_for_model(link, pipeline)
        try:
            await self._play(pipeline, model.directory, model.dtype)
        finally:
            await asyncio.shield(pipeline.close_loops())

    async def _play(self, pipeline: Pipeline, model_dir: str, dtype: str) -> None:
        pipeline.enter(RollouterState.STARTING, "loading the tokenizer and the tools")
        codec = await asyncio.to_thread(self._codec_of, model_dir)
        framing = await pipeline.open_tools(codec)
        pipeline.enter(RollouterState.STARTING, "loading the tasks")
        pipeline.build(await asyncio.to_thread(self._prepare, model_dir, codec, framing), codec)
        engines = len(self._settings.engine.urls) or self._settings.engine.num_engines
        pipeline.enter(RollouterState.STARTING_ENGINES, f"{engines} engines")
        await self._fleet.start(model_dir, dtype)
        gc.freeze()  # what stays for good need not be looked through by each full collection, which stops the loop
        pipeline.enter(None, "")
        await pipeline.run()

    def _prepare(self, model_dir: str, codec: Codec, framing: Framing) -> Prompts:
        """Blocking: the tasks, encoded."""
        settings = self._settings
        room = settings.engine.max_model_len - settings.sampling.max_tokens
        max_prompt_tokens = min(settings.data.max_prompt_tokens, room)
        prompts = prepare(
            self._user.rows,
            settings.data,
            codec,
            seed=settings.seed,
            max_prompt_tokens=max_prompt_tokens,
            model=Model(directory=model_dir, trust_remote_code=settings.model.trust_remote_code),
            max_held_out=settings.evaluation.max_tasks,
            framing=framing,
        )
        prompts.source.head(CHECKED_TASKS)  # made here, so that they are at hand on the event loop
        return prompts

    async def _wait_for_model(self, link: Link, pipeline: Pipeline) -> ModelInUse:
        pipeline.enter(RollouterState.STARTING, "waiting for the trainer to prepare the model")
        timeout_s = self._settings.bus.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for status in link.watch("trainer", TrainerStatus):
                    check_agreement(self._settings, status.agreed)
                    model = ModelInUse.of(status)
                    if model is not None:
                        await asyncio.to_thread(model.check_here)
                        return model
        except TimeoutError:
            raise PeerLost(f"the trainer had prepared no model within {timeout_s:g} s (bus.connect_timeout_s)") from None
        raise PeerLost("the bus closed before the trainer had prepared the model")

    # ── what is watched ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch_settings(self, link: Link, pipeline: Pipeline) -> None:
        async for state in link.watch("settings", LiveSettingsState):
            pipeline.take_settings(state)

    async def _watch_trainer(self, link: Link, pipeline: Pipeline) -> None:
        async for status in link.watch("trainer", TrainerStatus):
            check_agreement(self._settings, status.agreed)
            if self._model is not None:
                self._model.check(status)
            pipeline.take_trainer(status)

    async def _watch_retries(self, link: Link, pipeline: Pipeline) -> None:
        async for retries in link.watch("retries", TaskRetries):
            pipeline.take_retries(retries)

    async def _watch_resumptions(self, link: Link, pipeline: Pipeline) -> None:
        async for _ in link.resumptions():
            pipeline.rebase()
            pipeline.wake()

    async def _watch_drain(self, pipeline: Pipeline, work: asyncio.Task[None]) -> None:
        await self._drain.wait()
        pipeline.drain()
        if not pipeline.is_running:
            work.cancel()

    async def _watch_loss(self, link: Link) -> None:
        bus = self._settings.bus
        async for _ in link.resumptions():
            break
        while True:
            lost = await link.wait_lost()
            if self._settings_in_force().bus.on_lost == "fail":
                raise PeerLost(str(lost))
            log.warning("trainer lost, waiting for it", silent_s=round(lost.silent_s, 1), deadline_s=bus.connect_timeout_s)
            await link.wait_connected(bus.connect_timeout_s)
            log.info("trainer is back")

    async def _watch_end(self, link: Link, work: asyncio.Task[None]) -> None:
        """Stop the work when the run is over. Raises TrainerFailed when it is over by a failure."""
        async for end in link.watch("end", EndOfRun):
            log.info("run ended", reason=end.reason.value, message=end.message)
            self._ended_by = end.reason.value
            if end.reason is EndReason.FAILED:
                raise TrainerFailed(f"the trainer failed: {end.message}")
            work.cancel()
            return

    async def _say_what_is_awaited(self, pipeline: Pipeline) -> None:
        """No silent wait: while nothing is generated, a line every few seconds names what is awaited."""
        waited_s = 0.0
        before = ""
        while True:
            await asyncio.sleep(_WAIT_LINE_EVERY_S)
            status = pipeline.status()
            now = f"{status.state}: {status.detail}"
            waited_s = waited_s + _WAIT_LINE_EVERY_S if now == before else 0.0
            before = now
            if waited_s and status.state not in (RollouterState.GENERATING, RollouterState.ENDED):
                trainer = None if self._link is None else self._link.get("trainer", TrainerStatus)
                says = "not connected" if trainer is None else f"{trainer.state}: {trainer.detail}"
                log.info("waiting", state=status.state.value, awaits=status.detail, trainer=says, waited_s=waited_s)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _tell_failure(self, link: Link, pipeline: Pipeline, error: Exception) -> None:
        if isinstance(error, (PeerLost, Ended, TrainerFailed, AnotherModel)):
            return
        try:
            await pipeline.board.publish()  # what failed before, while somebody still watches
            await link.request("run.failed", Failed(message=f"{type(error).__name__}: {error}"), Accepted)
        except BusError as unheard:
            log.warning("the trainer did not hear of the failure", why=str(unheard))

    async def _say_goodbye(self, link: Link, pipeline: Pipeline) -> None:
        pipeline.close(self._ended_by or (EndReason.DRAINED.value if self._drain.is_set() else EndReason.STOPPED.value))
        pipeline.enter(RollouterState.ENDED, "")
        try:
            await pipeline.board.publish()
        except BusError as error:
            log.debug("last state not published", why=str(error))

    async def _close_fleet(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._fleet.close()
        except TimeoutError:
            log.error("engines did not stop", deadline_s=_CLOSE_TIMEOUT_S)

    def _settings_in_force(self) -> Settings:
        return self._settings if self._pipeline is None else self._pipeline.settings

    # ── from the engines ─────────────────────────────────────────────────────────────────────────────────────────────

    def _touch(self) -> None:
        if self._pipeline is not None:
            self._pipeline.board.change()

    def _catch_up(self, result: RoundResult) -> None:
        if self._pipeline is not None:
            self._pipeline.take_catch_up(result)


def first_of(failures: BaseExceptionGroup[Exception]) -> Exception:
    """The first error in a tree of groups."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception)
    return first


def _checked_rows(settings: Settings) -> Rows:
    """The rows of the data, the first MAX_ROWS_IN_MEMORY of them read and checked. Raises DataError."""
    rows = open_rows(settings.data)
    read_all(rows, at_most=MAX_ROWS_IN_MEMORY)
    return rows


def _codec_loader(settings: Settings) -> LoadCodec:
    return lambda model_dir: load_codec(model_dir, trust_remote_code=settings.model.trust_remote_code)


def _listen_to_signals(drain: asyncio.Event, stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if drain.is_set():
            stop.set()
        else:
            log.info("draining: rollouts in flight are finished, then this process ends; a second signal stops at once")
            drain.set()

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, on_signal)
