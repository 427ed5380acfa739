"""A stand-in for the trainer: the real hub with a few lines that lease, acknowledge, commit and publish as the trainer does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_loop.rewards import Scoring, load_reward
from agent_loop.single_turn import SingleTurn
from configs.live import LiveSettings
from configs.schema import Settings
from rollouter.codec import Codec
from rollouter.daemon import RollouterDaemon, UserCode
from rollouter.data.sources import Rows
from rollouter.engines import EngineFleet
from rollouter.tasks import Row, load_rows
from sample_bus.closed_seat import ClosedSeat
from sample_bus.messages import (
    Accepted,
    Counts,
    EndOfRun,
    EndReason,
    EvaluationRequest,
    EvaluationResult,
    Failed,
    LiveSettingsState,
    Message,
    RollouterState,
    RollouterStatus,
    RoundResult,
    SettingChange,
    TrainerState,
    TrainerStatus,
    WeightRound,
)
from sample_bus.open import open_hub
from sample_bus.position import BusPosition
from sample_bus.protocols import Hub, Leased, LeasedClosure
from sample_bus.sample import Sample, SampleId
from tests.fakes.fake_engine import FakeEngine, FakeTokenizer
from trainer.demand import StepAccount

DEADLINE_S = 30.0
"""Against hangs only."""


def make_settings(run_dir: Path, **changes: Any) -> Settings:
    """Settings of a small run; dotted names with `__` for the dot."""
    run_dir.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "run_dir": run_dir,
        "num_steps": 1000,
        "group_size": 4,
        "samples_per_step": 8,
        "staleness_threshold": 0.0,
        "evaluation": {"at_start": False, "at_end": False},
        "sampling": {"max_tokens": 8, "stop": ("\n",)},
        "engine": {"max_model_len": 128},
        "bus": {
            "address": f"ipc://{run_dir}/bus",
            "heartbeat_interval_s": 0.2,
            "heartbeat_timeout_s": 5.0,
            "connect_timeout_s": DEADLINE_S,
        },
    }
    for key, value in changes.items():
        section, _, leaf = key.rpartition("__")
        if section:
            values.setdefault(section, {})[leaf] = value
        else:
            values[key] = value
    return Settings.model_validate(values)


class StandInTrainer:
    """The trainer's end of one run."""

    def __init__(
        self,
        settings: Settings,
        hub: Hub,
        *,
        incarnation: str,
        origin_version: int = 0,
        accounted: int = 0,
        position: BusPosition | None = None,
    ) -> None:
        self.hub = hub
        self.settings = settings
        self.incarnation = incarnation
        self.live = LiveSettings(settings)
        self.origin_version = origin_version
        self.policy_version = origin_version
        self.received = self.trained = self.refunded = 0
        self.dropped: dict[str, int] = {}
        self.samples: list[Sample] = []
        self.closures: list[LeasedClosure] = []
        """Closed seats that came, unsettled."""
        self.account: StepAccount | None = None
        """What it says of the seats that its steps took; None: nothing."""
        self.model: dict[str, Any] = {}
        """Fields of topic `trainer` that say what is trained, and how."""
        self.commits = True
        """What is settled is final at once, as without checkpoints."""
        self.reports: list[Message] = []
        self.reported = asyncio.Condition()
        self.round: WeightRound | None = None
        self.served: tuple[int, ...] = ()
        """Versions, oldest first."""
        self._evaluations: list[EvaluationResult] = []
        hub.set_origin(origin_version, accounted)
        if position is not None:
            hub.seek(position)
        kinds: Sequence[tuple[str, type[Message]]] = (
            ("round.result", RoundResult),
            ("evaluation.result", EvaluationResult),
            ("run.failed", Failed),
        )
        for name, kind in kinds:
            hub.handle(name, kind, self._take)

    async def begin(self) -> None:
        """Publish what a trainer publishes once its model is loaded."""
        await self._say_settings()
        await self.say()

    async def say(self) -> None:
        """Topic `trainer`."""
        await self.hub.publish(
            "trainer",
            TrainerStatus(
                state=TrainerState.WAITING,
                incarnation=self.incarnation,
                origin_version=self.origin_version,
                policy_version=self.policy_version,
                consumed_seats=None if self.account is None else self.account.consumed_seats,
                demand=None if self.account is None else self.account.said()["demand"],
                num_steps=self.settings.num_steps,
                **{"model_dir": "/no/model/is/needed", "model_dtype": "float32"} | self.model,
                counts=Counts(received=self.received, trained=self.trained, dropped=self.dropped, refunded=self.refunded),
                evaluations=tuple(self._evaluations),
            ),
        )

    async def publish(self, policy_version: int, *, staged: dict[str, str] | None = None) -> None:
        """Announce a version, then say so."""
        self.round = WeightRound(
            policy_version=policy_version,
            incarnation=self.incarnation,
            address="unix:/nowhere",
            manifest_digest=f"digest-{policy_version}",
            num_tensors=1,
            total_bytes=1,
            announced_at=0.0,
            staged=staged or ({} if self.round is None else self.round.staged),
            failed={} if self.round is None else self.round.failed,
        )
        self.served = (*self.served, policy_version)[-2:]
        await self.hub.publish("round", self.round)
        self.policy_version = policy_version
        await self.say()

    async def staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        """An engine asks for the weights of `announced`: it has them, if they are of the two newest versions."""
        if self.round is None:
            return
        if announced.policy_version in self.served:
            told = {"staged": {**self.round.staged, engine: nonce}}
        else:
            told = {"failed": {**self.round.failed, nonce: f"version {announced.policy_version} is not served"}}
        self.round = self.round.model_copy(update=told)
        await self.hub.publish("round", self.round)

    async def lease(self, count: int) -> list[Leased]:
        """The next `count` samples, unsettled; closed seats that come before them are put aside."""
        leased: list[Leased] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(leased) < count:
                item = await self.hub.lease()
                if isinstance(item, Leased):
                    leased.append(item)
                else:
                    self.closures.append(item)
        self.received += count
        self.samples += [item.sample for item in leased]
        return leased

    async def lease_closures(self, count: int) -> list[ClosedSeat]:
        """Wait until so many closed seats have been put aside; nothing else may come meanwhile."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.closures) < count:
                item = await self.hub.lease()
                assert isinstance(item, LeasedClosure), f"a sample of {item.sample.rollout_id} came, expected closed seats"
                self.closures.append(item)
        return [item.closed for item in self.closures]

    async def train(self, count: int) -> list[Sample]:
        """The next `count` samples, settled as trained."""
        leased = await self.lease(count)
        self.settle([item.id for item in leased])
        self.trained += count
        return [item.sample for item in leased]

    async def drop(self, count: int, reason: str = "stale") -> None:
        """The next `count` samples, settled as dropped."""
        await self.drop_these(await self.lease(count), reason)

    async def drop_these(self, leased: Sequence[Leased | LeasedClosure], reason: str = "group incomplete") -> None:
        """Settle as dropped: their places are given back."""
        self.settle([item.id for item in leased], dropped=True)
        samples = sum(isinstance(item, Leased) for item in leased)
        self.dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + samples}
        self.refunded += len(leased)
        self.closures = [item for item in self.closures if item not in leased]
        await self.say()

    def settle(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        self.hub.acknowledge(ids, dropped=dropped)
        if self.commits:
            self.hub.commit(self.hub.position())

    async def change(self, **values: Any) -> int:
        """Change live settings; returns the revision."""
        self.live.change({key.replace("__", "."): value for key, value in values.items()}, author="the test", now=1.0)
        await self._say_settings()
        return self.live.revision

    async def evaluate(self, request_id: int, policy_version: int) -> None:
        request = EvaluationRequest(incarnation=self.incarnation, request_id=request_id, policy_version=policy_version)
        await self.hub.publish("evaluate", request)

    async def end(self, reason: EndReason = EndReason.FINISHED, message: str = "") -> None:
        await self.hub.publish("end", EndOfRun(reason=reason, message=message))

    async def wait_report(self, kind: type[Message], count: int = 1) -> list[Any]:
        """The reports of `kind`, once there are `count`."""
        async with asyncio.timeout(DEADLINE_S), self.reported:
            await self.reported.wait_for(lambda: sum(isinstance(report, kind) for report in self.reports) >= count)
        return [report for report in self.reports if isinstance(report, kind)]

    async def wait_status(self, holds: Callable[[RollouterStatus], bool]) -> RollouterStatus:
        """The first state of the rollouter for which `holds` is true."""
        async with asyncio.timeout(DEADLINE_S):
            async for status in self.hub.watch("rollouter", RollouterStatus):
                if holds(status):
                    return status
        raise AssertionError("the bus closed")

    async def _take(self, report: Message) -> Accepted:
        if isinstance(report, EvaluationResult):
            self._evaluations.append(report)
            await self.say()
        async with self.reported:
            self.reports.append(report)
            self.reported.notify_all()
        return Accepted()

    async def _say_settings(self) -> None:
        changes = tuple(
            SettingChange(
                revision=change.revision,
                key=change.key,
                old=change.old,
                new=change.new,
                author=change.author,
                changed_at=change.changed_at,
                scope=change.scope,
            )
            for change in self.live.changes
        )
        await self.hub.publish(
            "settings", LiveSettingsState(revision=self.live.revision, values=self.live.values(), changes=changes)
        )


@asynccontextmanager
async def stand_in_trainer(
    settings: Settings,
    *,
    incarnation: str = "first",
    origin_version: int = 0,
    run_id: str = "run-1",
    accounted: int = 0,
    position: BusPosition | None = None,
) -> AsyncIterator[StandInTrainer]:
    """A trainer that listens; call `begin` to let it speak."""
    async with open_hub(
        settings.bus,
        address=settings.bus.address,
        run="test",
        run_id=run_id,
        incarnation=incarnation,
        quarantine_dir=settings.run_dir / "quarantine",
    ) as hub:
        yield StandInTrainer(
            settings, hub, incarnation=incarnation, origin_version=origin_version, accounted=accounted, position=position
        )


class Running:
    """A rollouter daemon in this process."""

    def __init__(self, settings: Settings, engine: FakeEngine, user: UserCode) -> None:
        self.engine = engine
        self.drain = asyncio.Event()

        def open_fleet(settings: Settings, *, live: Any, on_change: Any, on_round_result: Any) -> EngineFleet:
            engine.on_round_result = on_round_result
            return engine

        self.daemon = RollouterDaemon(
            settings, user, open_fleet=open_fleet, codec_of=lambda model_dir: Codec(FakeTokenizer()), drain=self.drain
        )
        self.task = asyncio.create_task(self.daemon.run())

    async def cut_off(self) -> None:
        """End it as a death would: nothing is noted of its end."""
        run = self.daemon.run_in_hand
        if run is not None:
            run.keeper.release()
        self.task.cancel()
        await asyncio.wait((self.task,), timeout=DEADLINE_S)

    async def ended(self) -> None:
        """Wait for its end. Raises what it ended with."""
        async with asyncio.timeout(DEADLINE_S):
            await self.task


@asynccontextmanager
async def running_rollouter(
    settings: Settings,
    engine: FakeEngine,
    *,
    loop: Any = None,
    reward: str | Scoring = "agent_loop.rewards:exact_match",
    rows: Rows | list[Row] | None = None,
) -> AsyncIterator[Running]:
    """A rollouter daemon, stopped at the end if it still runs."""
    scoring = load_reward(reward) if isinstance(reward, str) else reward
    chosen: Any = load_rows("addition") if rows is None else rows
    user = UserCode(rows=chosen, loop=loop or SingleTurn(), reward=scoring)
    running = Running(settings, engine, user)
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.wait((running.task,), timeout=DEADLINE_S)


def engine_of(trainer: StandInTrainer, **changes: Any) -> FakeEngine:
    """An engine whose stagings the trainer hears of."""
    return FakeEngine(on_stage=trainer.staged, **changes)


async def at_limit(trainer: StandInTrainer, offered: int) -> None:
    """The rollouter has offered so many samples and has nothing in flight."""
    await trainer.wait_status(lambda status: status.counts.offered == offered and status.state is RollouterState.AT_LIMIT)
