"""The working parts of the rollouter and the wires between them: who is told what when something changes.

Invariant: a version counts for admission only after the engines committed it; a new trainer is noticed before anything is
counted for the old one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from agent_loop.loop import AgentLoop
from agent_loop.rewards import Reward
from configs.errors import ConfigError
from configs.schema import Settings
from rollouter.admission import Admission, HeldVersion, Hold
from rollouter.codec import Codec
from rollouter.dispatch import Dispatcher, Situation
from rollouter.engines import EngineFleet
from rollouter.evaluation import Evaluator
from rollouter.follow import Follower
from rollouter.live import LiveView
from rollouter.prompts import Prompts
from rollouter.reports import Reports
from rollouter.rollouts import Runner
from rollouter.scoring import Scorer
from rollouter.status import Rate, StatusBoard
from sample_bus.messages import LiveSettingsState, RollouterState, RollouterStatus, RoundResult, TrainerStatus, WeightRound
from sample_bus.protocols import Link

log = structlog.get_logger()


class Pipeline:
    """Dispatch, following, evaluation and status of one process."""

    def __init__(
        self,
        settings: Settings,
        link: Link,
        fleet: EngineFleet,
        *,
        loop: AgentLoop,
        reward: Reward,
        process: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._link = link
        self._fleet = fleet
        self._loop = loop
        self._reward = reward
        self._process = process
        self._clock = clock
        self._live = LiveView(settings)
        self._admission = Admission(samples_per_period=settings.samples_per_period)
        self._situation = Situation()
        self._phase: tuple[RollouterState, str] | None = (RollouterState.STARTING, "")
        self._rate = Rate()
        self._wakened = asyncio.Event()
        self._prompts: Prompts | None = None
        self._dispatcher: Dispatcher | None = None
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
        self.board = StatusBoard(link, self.status, heartbeat_interval_s=settings.bus.heartbeat_interval_s)

    def build(self, prompts: Prompts, codec: Codec) -> None:
        """The parts that need the model's tokenizer. Raises ConfigError."""
        settings = self._settings
        self._check(prompts)
        stop_token_ids = codec.stop_token_ids(settings.sampling.stop)
        runner = Runner(
            loop=self._loop,
            engine=self._fleet,
            codec=codec,
            scorer=Scorer(self._reward, codec),
            max_model_len=settings.engine.max_model_len,
            timeout_s=settings.rollouter.rollout_timeout_s,
            seed=settings.seed,
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
        )
        evaluator = self._evaluator
        self._situation.evaluating = lambda: evaluator.has_precedence
        self._prompts = prompts
        self._dispatcher = Dispatcher(
            admission=self._admission,
            source=prompts.source,
            runner=runner,
            producer=self._link,
            reports=self._reports,
            live=self._live,
            stop_token_ids=stop_token_ids,
            situation=self._situation,
            process=self._process,
            on_change=self.board.change,
            rebase=self.rebase,
        )

    async def run(self) -> None:
        """Follow, evaluate and dispatch until drained. Raises what stops the run."""
        assert self._dispatcher is not None, "run before build"
        assert self._evaluator is not None, "run before build"
        async with asyncio.TaskGroup() as tasks:
            side = [
                tasks.create_task(part)
                for part in (
                    self._fleet.supervise(),
                    self._follower.run(),
                    self._follower.report_catch_ups(),
                    self._evaluator.run(),
                )
            ]
            await self._until_admission_can_begin()
            self.is_running = True
            await self._dispatcher.run()
            for part in side:
                part.cancel()

    # ── what is told to it ───────────────────────────────────────────────────────────────────────────────────────────

    def take_settings(self, state: LiveSettingsState) -> None:
        """Live settings; they hold from the next decision on."""
        self._live.take(state)
        self.wake()

    def take_trainer(self, status: TrainerStatus) -> None:
        """The trainer's state: its origin, its newest version, and what it dropped."""
        self.rebase()
        self._admission.take_trainer(
            incarnation=status.incarnation,
            origin_version=status.origin_version,
            policy_version=status.policy_version,
            num_dropped=sum(status.counts.dropped.values()),
        )
        settings = self._settings
        if status.num_steps:
            before_origin = status.origin_version * settings.samples_per_period
            self._situation.num_samples_needed = status.num_steps * settings.samples_per_step - before_origin
        self.wake()

    def take_catch_up(self, result: RoundResult) -> None:
        """An engine that was started again, or on which a round failed, has caught up or failed to."""
        self._follower.take_catch_up(result)

    def rebase(self) -> None:
        """If another trainer took this producer, count from its origin."""
        resumption = self._link.resumption
        if resumption is not None and resumption.incarnation != self._admission.incarnation:
            is_another = self._admission.incarnation is not None
            self._admission.rebase(resumption)
            if is_another and self._dispatcher is not None:
                broken = self._dispatcher.forget_arrived()
                log.warning("another trainer took over", incarnation=resumption.incarnation, broken_groups=broken)

    def drain(self) -> None:
        """Admit nothing more; end once nothing is in flight."""
        self._situation.draining = True
        self.wake()

    def wake(self) -> None:
        """Something that decisions read has changed."""
        self._wakened.set()
        self.board.change()
        if self._dispatcher is not None:
            self._dispatcher.wake()

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
            counts=self._admission.counts(),
            engines=self._fleet.statuses(),
            generated_tokens=self._fleet.generated_tokens,
            generated_tokens_per_s=self._rate.per_s(),
        )

    def _state(self) -> tuple[RollouterState, str]:
        if self._phase is not None:
            return self._phase
        if self._situation.draining:
            return RollouterState.DRAINING, f"{self._admission.in_flight} rollouts in flight"
        if self._follower.held is None:
            return RollouterState.WAITING_FOR_WEIGHTS, "the trainer's first policy version"
        if self._follower.is_syncing:
            return RollouterState.SYNCING, f"from policy version {self._follower.held.policy_version}"
        if self._evaluator is not None and self._evaluator.is_running:
            return RollouterState.EVALUATING, f"policy version {self._follower.held.policy_version}"
        holding = Hold.NO_TRAINER if self._dispatcher is None else self._dispatcher.holding
        if self._admission.in_flight == 0 and holding is not None:
            return RollouterState.AT_LIMIT, holding.value
        return RollouterState.GENERATING, "" if holding is None else holding.value

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _announced(self, announced: WeightRound) -> None:
        if self._dispatcher is not None:
            cancelled = self._dispatcher.cancel_hopeless(announced.policy_version, announced.incarnation)
            if cancelled:
                log.info("hopeless rollouts cancelled", rollouts=cancelled, policy_version=announced.policy_version)

    def _take_held(self, held: HeldVersion | None) -> None:
        self._admission.take_held(held)
        if self._evaluator is not None:
            self._evaluator.wake()
        self.wake()

    async def _until_admission_can_begin(self) -> None:
        """Until the engines hold a version and the trainer has said from where it counts; then leave out the tasks that an
        earlier process issued."""
        assert self._dispatcher is not None, "run before build"
        assert self._prompts is not None, "run before build"
        while self._admission.hold(self._dispatcher.conditions()) in (Hold.NO_TRAINER, Hold.NO_WEIGHTS):
            self._wakened.clear()
            await self._wakened.wait()
        settings = self._settings
        issued_before = self._admission.origin_version * settings.samples_per_period + self._admission.outstanding
        groups = -(-issued_before // settings.group_size)
        if groups:
            log.info("tasks that an earlier process issued are left out", groups=groups)
            self._prompts.source.skip(groups)

    def _check(self, prompts: Prompts) -> None:
        settings = self._settings
        evaluation = settings.evaluation
        if not prompts.held_out and (evaluation.at_start or evaluation.at_end or evaluation.every_versions):
            raise ConfigError(
                f"data.held_out_fraction={settings.data.held_out_fraction} leaves no task to evaluate: raise it, or set "
                "evaluation.at_start=false evaluation.at_end=false evaluation.every_versions=0"
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
