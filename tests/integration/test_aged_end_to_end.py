"""What is too old, in whole runs: both daemons, a real bus, a real model; one task of which one seat is always slow."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from configs.loader import load
from configs.schema import Settings
from console.journals import Journals
from rollouter.codec import load_codec
from rollouter.daemon import RollouterDaemon, UserCode
from sample_bus.group_id import num_requeues
from sample_bus.journal import GroupAdmitted, RetriesTaken, RetryAsked, RollouterRecord, StepBegan, journal_dir, read_journal
from sample_bus.messages import RoundResult, WeightRound
from sample_bus.sample import Sample, SampleId
from tests.fakes.fake_engine import Call
from tests.fakes.sampling_engine import SamplingEngine
from tests.integration.test_on_policy_anchor import settings_for
from trainer import daemon as trainer_daemon
from trainer.comparison import Comparison
from trainer.replay import replay
from trainer.replay_request import replay_dir
from trainer.retained import Kept, retained_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HANG_S = 120.0
NUM_STEPS = 8
BOUND = 1
SLOW = "#0@"
"""In the name of each group of the first task issued."""


class Engine(SamplingEngine):
    """Says when it has another version."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Condition()

    async def sync(self, round: WeightRound, wait_staged: Any) -> list[RoundResult]:
        results = await super().sync(round, wait_staged)
        async with self.changed:
            self.changed.notify_all()
        return results


def is_slow(call: Call) -> bool:
    return SLOW in call.request_id and "/0." in call.request_id


async def play(settings: Settings, engine: Engine) -> None:
    rollouter = RollouterDaemon(
        settings,
        UserCode.load(settings),
        open_fleet=lambda settings, *, live, on_change, on_round_result: engine,
        codec_of=lambda model_dir: load_codec(model_dir, trust_remote_code=False),
        drain=asyncio.Event(),
    )
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as daemons:
        daemons.create_task(trainer_daemon.run(settings))
        daemons.create_task(rollouter.run())


def settings(run_dir: Path, on_stale: str) -> Settings:
    """One period ahead and a bound of one: a rollout is too old two versions after it began."""
    return settings_for(
        run_dir,
        num_steps=NUM_STEPS,
        staleness_threshold=1,
        max_staleness=BOUND,
        on_stale=on_stale,
        **{"rollouter.max_requeues": 1, "rollouter.progress_interval_s": 0},
    )


class Outcome:
    """What the run wrote."""

    def __init__(self, run_dir: Path) -> None:
        run_id = (run_dir / "run_id").read_text().strip()
        self.trainer = list(read_journal(journal_dir(run_dir, run_id) / "trainer.log"))
        rollouter = read_journal(journal_dir(run_dir, run_id) / "rollouter.log")
        self.rollouter = [record for record in rollouter if isinstance(record, RollouterRecord)]
        self.books = Journals.of(run_dir).read().books()
        self._kept = Kept(retained_dir(run_dir, run_id))

    def of(self, kind: type) -> list[Any]:
        return [record for record in (*self.trainer, *self.rollouter) if isinstance(record, kind)]

    def steps(self) -> list[tuple[StepBegan, list[Sample]]]:
        return [
            (began, [self._kept.sample(SampleId(*one)) for one in began.samples])
            for began in self.trainer
            if isinstance(began, StepBegan)
        ]

    def dropped(self) -> Counter[str]:
        return Counter({reason: count for reason, count in self.books.dropped.items() if reason.startswith("stale")})


def slow_until_two_versions_later(engine: Engine) -> None:
    async def wait(call: Call) -> None:
        if is_slow(call):
            async with engine.changed:
                await engine.changed.wait_for(lambda: (engine.version or 0) >= call.version + 2)

    engine.before_reply = wait


def check_trained_again(run_dir: Path) -> None:
    """With the recorded weights every bit is the same; with others the first step that they touch differs."""

    def again(*changes: str) -> Comparison:
        changed = load(run_dir / "settings.yaml", [f"run_dir={replay_dir(run_dir)}", *changes], environment={})
        _, comparison = replay(changed, of=run_dir, given={change.partition("=")[0] for change in changes})
        return comparison

    assert again().is_identical
    other = again("stale_weight_base=0.25")
    assert not other.is_identical
    assert any("stale_weight_base" in reason for reason in other.reasons)


@pytest.mark.parametrize("on_stale", ["drop", "retry", "downweight"])
async def test_a_task_that_is_always_too_slow(tmp_path: Path, on_stale: str) -> None:
    """B34: the others are trained meanwhile. Dropped; issued again once and then dropped for good; or trained with less."""
    engine = Engine()
    slow_until_two_versions_later(engine)
    await play(settings(tmp_path / "run", on_stale), engine)
    outcome = Outcome(tmp_path / "run")
    assert outcome.books.closes, outcome.books.problems
    assert len(outcome.steps()) == NUM_STEPS
    slow = [record.group_id for record in outcome.of(GroupAdmitted) if SLOW in record.group_id]
    ages = [
        (began.policy_version - sample.oldest_version, sample.group_id)
        for began, samples in outcome.steps()
        for sample in samples
    ]
    if on_stale == "downweight":
        assert (max(ages)[0], SLOW in max(ages)[1]) == (2, True)
        assert len(slow) == 1
        weighting = [began.weighting for began, _ in outcome.steps()]
        assert all(one["max_staleness"] == BOUND for one in weighting)
        assert outcome.of(RetryAsked) == []
        check_trained_again(tmp_path / "run")
        return
    assert max(ages)[0] <= BOUND
    assert [num_requeues(name) for name in slow] == ([0, 1] if on_stale == "retry" else [0])
    assert [record.group_id for record in outcome.of(RetryAsked)] == slow[:-1]
    assert [one for record in outcome.of(RetriesTaken) for one in record.group_ids] == slow[:-1]
    assert not any(SLOW in group for _, group in ages)


async def test_a_version_waits_for_the_rollout_that_it_would_make_too_old(tmp_path: Path) -> None:
    """Its group is trained in time although it is the last to come, and nothing is dropped for its age."""
    engine = Engine()
    with capture_logs() as lines:

        async def wait(call: Call) -> None:
            while is_slow(call) and not any(line["event"] == "step is held" for line in lines):  # noqa: ASYNC110 - a log
                await asyncio.sleep(0.01)

        engine.before_reply = wait
        await play(settings(tmp_path / "run", "wait"), engine)
    structlog.reset_defaults()
    outcome = Outcome(tmp_path / "run")
    assert outcome.books.closes, outcome.books.problems
    assert outcome.dropped() == {}
    step = [began for began, samples in outcome.steps() if any(SLOW in sample.group_id for sample in samples)]
    assert [began.policy_version for began in step] == [BOUND]
    held = [line["awaits"] for line in lines if line["event"] == "step is held"]
    assert held[0].startswith("version 2 is held (on_stale=wait) for rollouts in flight since version 0")
