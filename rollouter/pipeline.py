"""The working parts of the rollouter and the wires between them: who is told what when something changes.

Invariant: a version counts for admission only after the engines committed it; a new trainer is noticed before anything is
counted for the old one; what belongs to one run never counts in another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from agent_loop.loop import AgentLoop
from agent_loop.rewards import Scoring
from configs.errors import ConfigError
from configs.schema import Settings
from rollouter.admission import Admission, HeldVersion, Hold
from rollouter.codec import Codec
from rollouter.data.framing import Framing
from rollouter.dispatch import Situation
from rollouter.engines import EngineFleet
from rollouter.evaluation import Evaluator
from rollouter.failure_notes import FailureNotes
from rollouter.follow import Follower
from rollouter.live import LiveView
from rollouter.loop_lag import LoopLag
from rollouter.loops import Loops, setup_of
from rollouter.prompts import Prompts
from rollouter.reports import Reports
from rollouter.rollouts import Runner
from rollouter.run_in_hand import RunInHand, take_up
from rollouter.scoring import Scorer, Shaping
from rollouter.status import Rate, StatusBoard
from rollouter.weight_check import WeightChecker
from sample_bus.messages import (
    LiveSettingsState,
    RolloutCounts,
    RollouterState,
    RollouterStatus,
    RoundResult,
    TaskRetries,
    TrainerStatus,
    WeightRound,
)
from sample_bus.protocols import Link
from sample_bus.staleness import seats_of_run

log = structlog.get_logger()

CHECKED_TASKS = 256
"""Tasks at the head of the data whose agent loops are made before anything starts; those of later ones as they come."""


class Pipeline:
    """Dispatch, following, evaluation and status of one process."""

    def __init__(
        self,
        settings: Settings,
        link: Link,
        fleet: EngineFleet,
        *,
        loop: AgentLoop,
        reward: Scoring,
        process: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._link = link
        self._fleet = fleet
        self._loop = loop
        self._loops: Loops | None = None
        self._reward = reward
        self._process = process
        self._clock = clock
        self._live = LiveView(settings)
        self._admission = Admission()
        self._situation = Situation()
        self._phase: tuple[RollouterState, str] | None = (RollouterState.STARTING, "")
        self._rate = Rate()
        self._lag = LoopLag()
        self._failures = FailureNotes(lambda: self.board.change())
        self._wakened = asyncio.Event()
        self._prompts: Prompts | None = None
        self._runner: Runner | None = None
        self._stop_token_ids: tuple[int, ...] = ()
        self.run_in_hand: RunInHand | None = None
        self._taken_up = asyncio.Event()
        self._another_run = asyncio.Event()
        self.is_running = False
        """Rollouts may be in flight."""
        self._evaluator: Evaluator | None = None
        self._reports = Reports(link, settings.bus)
        self._follower = Follower(
            engines=fleet,
            control=link,
            reports=self._reports,
            catch_up_timeout_s=settings.engine.start_timeout_s + settings.weight_sync.round_timeout_s,
            on_announced=self._announced,
            on_held=self._take_held,
            on_change=self.wake,
        )
        self._checker = WeightChecker(engines=fleet, control=link, reports=self._reports)
        self.board = StatusBoard(link, self.status, heartbeat_interval_s=settings.bus.heartbeat_interval_s)

    def build(self, prompts: Prompts, codec: Codec) -> None:
        """The parts that need the model's tokenizer. Raises ConfigError."""
        settings = self._settings
        self._check(prompts)
        stop_token_ids = self._stop_token_ids = codec.stop_token_ids(settings.sampling.stop)
        loops = self._made_loops()
        loops.check([*prompts.held_out, *prompts.source.head(CHECKED_TASKS)])
        loops.check_template(codec)
        runner = self._runner = Runner(
            loop=self._loop,
            loop_of=loops.of,
            engine=self._fleet,
            codec=codec,
            scorer=Scorer(self._reward, codec, lambda: Shaping.of(self._live.settings)),
            max_model_len=settings.engine.max_model_len,
            timeout_s=lambda: self._live.settings.rollouter.rollout_timeout_s,
            seed=settings.seed,
            progress_interval_s=self._progress_interval_s,
        )
        self._evaluator = Evaluator(
            tasks=prompts.held_out,
            runner=runner,
            control=self._link,
            reports=self._reports,
            live=self._live,
            stop_token_ids=stop_token_ids,
            held=lambda: self._follower.held,
            on_change=self.wake,
            notes=self._failures,
        )
        evaluator = self._evaluator
        self._situation.evaluating = lambda: evaluator.has_precedence
        self._prompts = prompts

    async def open_tools(self, codec: Codec) -> Framing:
        """Make the agent loops that the settings name, see whether the model's chat template fits them, and load the tools that
        they tell; what they put around prompts.

        Raises ConfigError.
        """
        loops = self._made_loops()
        loops.make_named()
        loops.check_template(codec)
        await loops.open_tools()
        return loops.framing()

    async def close_loops(self) -> None:
        """Harmless where none was opened, and a second time."""
        if self._loops is not None:
            await self._loops.close()

    def _made_loops(self) -> Loops:
        """Raises ConfigError."""
        if self._loops is None:
            rollouter = self._settings.rollouter
            self._loops = Loops(
                self._loop,
                default_path=rollouter.agent_loop,
                names=rollouter.agent_loops,
                setup=setup_of(self._settings),
            )
        return self._loops

    async def run(self) -> None:
        """Follow, evaluate and dispatch until drained. Raises what stops the run."""
        assert self._evaluator is not None, "run before build"
        assert self._loops is not None, "run before build"
        try:
            await self._loops.open()
            await self._follow_and_play()
        finally:
            await asyncio.shield(self.close_loops())

    async def _follow_and_play(self) -> None:
        assert self._evaluator is not None, "run before build"
        async with asyncio.TaskGroup() as tasks:
            side = [
                tasks.create_task(part)
                for part in (
                    self._fleet.supervise(),
                    self._follower.run(),
                    self._follower.report_catch_ups(),
                    self._evaluator.run(),
                    self._checker.run(),
                    self._watch_rejections(),
                    self._lag.run(),
                )
            ]
            while not await self._play_run():
                pass
            for part in side:
                part.cancel()

    @property
    def settings(self) -> Settings:
        """The settings in force, live changes included."""
        return self._live.settings

    def close(self, reason: str) -> None:
        """Note the end of this process in the journal. Does nothing the second time."""
        if self.run_in_hand is not None:
            self.run_in_hand.keeper.close(reason)

    # ── what is told to it ───────────────────────────────────────────────────────────────────────────────────────────

    def take_settings(self, state: LiveSettingsState) -> None:
        """Live settings; they hold from the next decision on."""
        self._live.take(state)
        trainer = self._link.get("trainer", TrainerStatus)
        if trainer is not None:
            self._count_needed(trainer)
        self.wake()

    def take_trainer(self, status: TrainerStatus) -> None:
        """The trainer's state: its origin, its newest version, and what it dropped."""
        self.rebase()
        self._admission.take_trainer(
            incarnation=status.incarnation,
            origin_version=status.origin_version,
            policy_version=status.policy_version,
            num_refunded=status.counts.refunded,
            consumed_seats=status.consumed_seats,
            demand=status.demand,
        )
        self._count_needed(status)
        self.wake()

    def take_retries(self, retries: TaskRetries) -> None:
        """Tasks that the trainer wants issued again."""
        if self.run_in_hand is not None:
            self.run_in_hand.retries.take(retries)
            self.wake()

    def take_catch_up(self, result: RoundResult) -> None:
        """An engine that was started again, or on which a round failed, has caught up or failed to."""
        self._follower.take_catch_up(result)

    def rebase(self) -> bool:
        """If another trainer took this producer, count from its origin. False when it has another run than the one in hand, or
        another stream of it: nothing counts any more until that is taken up."""
        resumption, run = self._link.resumption, self.run_in_hand
        if resumption is None or run is None:
            return False
        if not run.is_of(resumption):
            if not self._another_run.is_set():
                log.warning("another run began", run_id=resumption.run_id, before=run.keeper.run_id, epoch=resumption.epoch)
                self._another_run.set()
                self._admission.forget()
            return False
        if resumption.incarnation != self._admission.incarnation:
            if self._admission.incarnation is not None:
                log.warning("another trainer took over", incarnation=resumption.incarnation, accounted=resumption.accounted)
            books = run.keeper.books
            in_flight = books.in_flight + books.num_recorded_from(resumption.next_seq)
            self._admission.rebase(resumption, in_flight=in_flight)
        return True

    def drain(self) -> None:
        """Admit nothing more; end once nothing is in flight."""
        self._situation.draining = True
        self.wake()

    def wake(self) -> None:
        """Something that decisions read has changed."""
        self._wakened.set()
        self.board.change()
        if self.run_in_hand is not None:
            self.run_in_hand.dispatcher.wake()

    def enter(self, phase: RollouterState | None, detail: str) -> None:
        """Name the phase of the daemon; None: the parts speak for themselves."""
        self._phase = None if phase is None else (phase, detail)
        if phase is not None:
            log.info("rollouter state", state=phase.value, detail=detail)
        self.board.change()

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────

    def status(self) -> RollouterStatus:
        """Topic `rollouter`, as of now."""
        state, detail = self._state()
        held = self._follower.held
        self._rate.take(self._clock(), self._fleet.generated_tokens)
        return RollouterStatus(
            state=state,
            detail=detail,
            policy_version=None if held is None else held.policy_version,
            settings_revision=self._live.revision,
            counts=self._counts(),
            engines=self._fleet.statuses(),
            generated_tokens=self._fleet.generated_tokens,
            generated_tokens_per_s=self._rate.per_s(),
            loop_lag_ms=round(self._lag.recent_ms, 1),
            recovery=None if self.run_in_hand is None else self.run_in_hand.keeper.recovery,
            incarnation=self._admission.incarnation,
            oldest_in_flight_version=None if self.run_in_hand is None else self.run_in_hand.dispatcher.oldest_in_flight(),
            retries_taken=() if self.run_in_hand is None else self.run_in_hand.retries.taken(),
            failures=self._failures.all(),
        )

    def _counts(self) -> RolloutCounts:
        return RolloutCounts() if self.run_in_hand is None else self.run_in_hand.keeper.books.counts()

    def _state(self) -> tuple[RollouterState, str]:
        if self._phase is not None:
            return self._phase
        in_flight = self._counts().in_flight
        if self._situation.draining:
            return RollouterState.DRAINING, f"{in_flight} rollouts in flight"
        if self._follower.held is None:
            return RollouterState.WAITING_FOR_WEIGHTS, "the trainer's first policy version"
        if self._follower.is_syncing:
            return RollouterState.SYNCING, f"from policy version {self._follower.held.policy_version}"
        if self._evaluator is not None and self._evaluator.is_running:
            return RollouterState.EVALUATING, f"policy version {self._follower.held.policy_version}"
        holding = Hold.NO_TRAINER if self.run_in_hand is None else self.run_in_hand.dispatcher.holding
        words = "" if holding is None else holding.value
        if holding is Hold.JOURNAL and self.run_in_hand is not None:
            words = f"{words}: {self.run_in_hand.keeper.problem}"
        problem = self._link.producer_statistics().problem
        if problem:
            words = f"the bus takes no records: {problem}"
        if in_flight == 0 and holding is not None:
            return RollouterState.AT_LIMIT, words
        return RollouterState.GENERATING, f"{in_flight} in flight, no new ones meanwhile: {words}" if words else ""

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _progress_interval_s(self) -> float:
        """0 where a turn is to be sampled by one version: new weights wait for a request's end, and a slice would be one."""
        settings = self._live.settings
        return 0.0 if settings.partial_rollout == "finish" else settings.rollouter.progress_interval_s

    def _count_needed(self, status: TrainerStatus) -> None:
        """What the run's steps take from the trainer's origin on, as long as steps stay as large as they are."""
        settings = self._live.settings
        if status.demand is not None:
            self._situation.num_samples_needed = seats_of_run(
                status.demand, num_steps=status.num_steps, samples_per_step=settings.samples_per_step
            )
        elif status.num_steps:
            before_origin = status.origin_version * settings.samples_per_period
            self._situation.num_samples_needed = status.num_steps * settings.samples_per_step - before_origin

    def _announced(self, announced: WeightRound) -> None:
        if self.run_in_hand is not None:
            cancelled = self.run_in_hand.dispatcher.cancel_hopeless(announced.policy_version, announced.incarnation)
            if cancelled:
                log.info("hopeless rollouts cancelled", rollouts=cancelled, policy_version=announced.policy_version)

    def _take_held(self, held: HeldVersion | None) -> None:
        self._admission.take_held(held)
        if self._evaluator is not None:
            self._evaluator.wake()
        self.wake()

    async def _play_run(self) -> bool:
        """Take the run of the trainer up and play it. True when it was drained; False when another one is to be taken up."""
        run = await self._take_up()
        playing = asyncio.create_task(self._dispatch(run))
        changing = asyncio.create_task(self._another_run.wait())
        try:
            await asyncio.wait((playing, changing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()
            if not playing.done():
                playing.cancel()
                await asyncio.wait((playing,))
            if not playing.cancelled():
                playing.exception()  # seen: whoever cancels this knows the reason already
        if not self._another_run.is_set():
            playing.result()
            return True
        if not playing.cancelled() and playing.exception() is not None:
            log.info("rollouts of the run before ended", error=str(playing.exception()))
        self.run_in_hand = None
        run.keeper.close("another run began")
        return False

    async def _dispatch(self, run: RunInHand) -> None:
        """Until drained, once the engines hold a version and the trainer has said from where it counts and what is set."""
        while not self._live.has_state or self._admission.hold(run.dispatcher.conditions()) in (
            Hold.NO_TRAINER,
            Hold.NO_WEIGHTS,
        ):
            self._wakened.clear()
            await self._wakened.wait()
        self.is_running = True
        settings = self._live.settings
        trainer = self._link.get("trainer", TrainerStatus)
        settled = None if trainer is None else trainer.origin_seats
        if settled is None:
            settled = self._admission.origin_version * settings.samples_per_period
        run.leave_out(-(-(settled + self._admission.outstanding) // settings.group_size))
        await run.dispatcher.run()

    async def _take_up(self) -> RunInHand:
        assert self._prompts is not None, "run before build"
        assert self._runner is not None, "run before build"
        self._another_run.clear()
        run = await take_up(
            self._settings,
            self._link,
            prompts=self._prompts,
            runner=self._runner,
            admission=self._admission,
            live=self._live,
            situation=self._situation,
            stop_token_ids=self._stop_token_ids,
            process=self._process,
            rebase=self.rebase,
            wake=self.wake,
            on_change=self.board.change,
            notes=self._failures,
        )
        self.run_in_hand = run
        self._taken_up.set()
        self.rebase()
        trainer = self._link.get("trainer", TrainerStatus)
        if trainer is not None:
            self.take_trainer(trainer)
        retries = self._link.get("retries", TaskRetries)
        if retries is not None:
            self.take_retries(retries)
        self.wake()
        return run

    async def _watch_rejections(self) -> None:
        async for rejection in self._link.rejections():
            while self.run_in_hand is None:
                self._taken_up.clear()
                await self._taken_up.wait()
            self.run_in_hand.dispatcher.take_rejection(rejection)

    def _check(self, prompts: Prompts) -> None:
        settings = self._settings
        evaluation = settings.evaluation
        if not prompts.held_out and (evaluation.at_start or evaluation.at_end or evaluation.every_versions):
            raise ConfigError(
                f"data.held_out_fraction={settings.data.held_out_fraction} leaves no task to evaluate: raise it, or set "
                "evaluation.at_start=false evaluation.at_end=false evaluation.every_versions=0"
            )
        groups_per_step = settings.samples_per_step // settings.group_size
        if prompts.source.num_tasks < groups_per_step:
            log.warning(
                "fewer tasks than a step takes groups: some come several times in it",
                tasks=prompts.source.num_tasks,
                groups_per_step=groups_per_step,
                max_prompt_tokens=settings.data.max_prompt_tokens,
            )
        remaining = prompts.source.remaining
        needed = settings.num_steps * settings.samples_per_step // settings.group_size
        if remaining is not None and remaining < needed:
            tasks = remaining // (settings.data.num_epochs or 1)
            steps = remaining // (settings.samples_per_step // settings.group_size)
            epochs = -(-needed // tasks)
            raise ConfigError(
                f"data.num_epochs={settings.data.num_epochs} passes over {tasks} tasks give {remaining} groups, num_steps="
                f"{settings.num_steps} need {needed}: set data.num_epochs>={epochs} or num_steps<={steps}"
            )
