"""Rounds: every end has a name, what is said twice counts once, and nothing waits beyond its deadline."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import WeightSyncSettings
from sample_bus.messages import (
    Accepted,
    EngineStatus,
    RollouterState,
    RollouterStatus,
    RoundPhase,
    RoundResult,
    RoundState,
    RoundSummary,
    WeightRound,
)
from tests.fakes.fake_control import FakeControl
from trainer.publisher import Publisher
from trainer.rounds import Rounds, row_of, state_of

ENGINES = ("engine-0", "engine-1")
_WORSE_FIRST = [RoundState.ABORTED, RoundState.PARTIALLY_COMMITTED, RoundState.COMMITTED]


def result(engine: str, *, version: int = 1, committed: bool = True, attempt: int = 1) -> RoundResult:
    phase = None if committed else RoundPhase.STAGE
    return RoundResult(
        policy_version=version, engine=engine, committed=committed, attempt=attempt, phase=phase, pause_ms=7.0, message="why"
    )


def rounds(*, version: int = 1, engines: tuple[str, ...] = ENGINES) -> Rounds:
    made = Rounds(announce_timeout_s=10.0, round_timeout_s=60.0)
    made.expect(engines, 0.0)
    made.announce(version, total_bytes=100, now=0.0)
    return made


def state(made: Rounds) -> RoundState:
    assert made.newest is not None
    return made.newest.state


def test_a_round_that_every_engine_committed_is_committed() -> None:
    made = rounds()
    assert state(made) is RoundState.ANNOUNCED
    made.note_staging(1, transfer_bytes=100, now=1.0)
    assert state(made) is RoundState.STAGING
    made.take(result("engine-0"), 2.0)
    assert state(made) is RoundState.STAGING
    made.take(result("engine-1"), 3.0)
    assert state(made) is RoundState.COMMITTED
    summary = made.summary(4.0)
    assert summary is not None
    assert (summary.committed, summary.seconds, summary.version_spread) == (ENGINES, 3.0, 0)
    assert (row_of(summary)["pause_ms_engine-1"], row_of(summary)["transfer_bytes"]) == (7.0, 100)


def test_an_engine_that_says_nothing_is_dropped_at_the_deadline() -> None:
    """B26: the round ends without it."""
    made = rounds()
    made.take(result("engine-0"), 5.0)
    assert made.due_at() == 60.0
    assert made.look(59.0) is RoundState.STAGING
    assert made.look(60.0) is RoundState.PARTIALLY_COMMITTED
    summary = made.summary(60.0)
    assert summary is not None
    assert "round_timeout_s=60" in summary.failed["engine-1"]
    assert made.due_at() is None


def test_a_version_that_nobody_asks_for_is_aborted_at_its_own_deadline() -> None:
    """B01: announced, and never asked for: the trainer goes on, and says so."""
    made = rounds()
    assert made.look(10.0) is RoundState.ABORTED
    summary = made.summary(10.0)
    assert summary is not None
    assert "announce_timeout_s=10" in summary.failed["engine-0"]


def test_nobody_is_late_while_no_engine_lives() -> None:
    """B17, B18: the first version waits for engines that are still starting."""
    made = rounds(engines=())
    assert made.look(1e6) is RoundState.ANNOUNCED
    made.expect(ENGINES, 1e6)
    assert made.due_at() == 1e6 + 10.0


def test_an_engine_that_catches_up_makes_the_round_better() -> None:
    made = rounds()
    made.take(result("engine-0"), 1.0)
    made.take(result("engine-1", committed=False), 2.0)
    assert state(made) is RoundState.PARTIALLY_COMMITTED
    made.take(result("engine-1", attempt=2), 90.0)
    assert state(made) is RoundState.COMMITTED
    made.take(result("engine-1", attempt=3, committed=False), 95.0)
    assert state(made) is RoundState.COMMITTED


def test_a_round_on_which_all_engines_failed_is_aborted() -> None:
    made = rounds()
    for engine in ENGINES:
        made.take(result(engine, committed=False), 1.0)
    assert state(made) is RoundState.ABORTED


def test_a_newer_version_ends_the_round_before() -> None:
    made = rounds()
    assert made.announce(2, total_bytes=1, now=1.0) is RoundState.SUPERSEDED
    made.take(result("engine-0", version=2), 2.0)
    assert made.announce(3, total_bytes=1, now=3.0) is RoundState.PARTIALLY_COMMITTED


def test_a_result_that_comes_again_changes_nothing() -> None:
    """Idempotent by version, engine and attempt."""
    made = rounds()
    assert made.take(result("engine-0"), 1.0)
    assert not made.take(result("engine-0"), 2.0)
    assert not made.take(result("engine-0", committed=False), 2.0)
    assert not made.take(result("engine-0", version=0), 2.0)
    summary = made.summary(3.0)
    assert summary is not None
    assert (summary.num_attempts, summary.seconds) == (1, 1.0)


def test_the_spread_of_versions_is_what_living_engines_hold() -> None:
    made = rounds(version=0)
    for engine in ENGINES:
        made.take(result(engine, version=0), 0.0)
    made.announce(1, total_bytes=1, now=1.0)
    made.take(result("engine-0"), 2.0)
    summary = made.summary(2.0)
    assert summary is not None
    assert summary.version_spread == 1
    made.expect(["engine-0"], 3.0)
    summary = made.summary(3.0)
    assert summary is not None
    assert summary.version_spread == 0


_sets = st.frozensets(st.sampled_from(["a", "b", "c"]))


@given(_sets, _sets, _sets, st.booleans(), st.booleans(), st.booleans())
def test_a_commit_never_counts_for_less(
    committed: frozenset[str], failed: frozenset[str], expected: frozenset[str], begun: bool, late: bool, superseded: bool
) -> None:
    """`committed` says that all who live serve it, and nothing else does."""
    found = state_of(
        committed=committed,
        failed=failed - committed,
        expected=expected,
        has_begun=begun,
        is_late=late,
        is_superseded=superseded,
    )
    assert (found is RoundState.COMMITTED) == bool(committed and expected <= committed)
    if late or superseded:
        assert found not in (RoundState.ANNOUNCED, RoundState.STAGING)


_events = st.lists(
    st.tuples(st.sampled_from(["commit", "fail", "late", "stage"]), st.sampled_from(ENGINES), st.integers(1, 4)), max_size=25
)


@given(_events)
def test_an_end_never_becomes_worse(events: list[tuple[str, str, int]]) -> None:
    made, now, best = rounds(), 0.0, -1
    for what, engine, attempt in events:
        now += 1.0
        match what:
            case "commit" | "fail":
                made.take(result(engine, committed=what == "commit", attempt=attempt), now)
            case "stage":
                made.note_staging(1, transfer_bytes=1, now=now)
            case _:
                now += 61.0
                made.look(now)
        if state(made) in _WORSE_FIRST:
            rank = _WORSE_FIRST.index(state(made))
            assert rank >= min(best, 1)
            assert best < 2 or rank == 2
            best = rank
        else:
            assert best == -1


async def test_an_engine_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """B26: the rollouter says that it died, and the round is what the others made of it."""
    control, said = FakeControl(), asyncio.Queue[RoundSummary]()
    both = tuple(EngineStatus(name=name, state="serving", policy_version=0) for name in ENGINES)
    await control.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, engines=both))
    publisher = Publisher(
        control,
        WeightSyncSettings(),
        incarnation="first",
        socket_dir=tmp_path,
        dtype=torch.float32,
        loop=asyncio.get_running_loop(),
        on_round=said.put_nowait,
    )
    with publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await publisher.announce(lambda: [("a", torch.ones(3))], policy_version=1, executor=executor)
            announced = control.get("round", WeightRound)
            assert announced is not None
            own = {"manifest_digest": announced.manifest_digest}
            await control.request("round.result", result("engine-0").model_copy(update=own), Accepted)
            one = (both[0], both[1].model_copy(update={"is_alive": False}))
            await control.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, engines=one))
            await publisher.follow_engines()
            while (summary := await said.get()).state is not RoundState.COMMITTED:
                pass
            assert summary.committed == ("engine-0",)


async def test_the_deadline_passes_without_anybody_saying_anything(tmp_path: Path) -> None:
    """B02: engines that never answer do not hold the trainer, which says how the round ended."""
    control, said = FakeControl(), asyncio.Queue[RoundSummary]()
    engines = tuple(EngineStatus(name=name, state="serving", policy_version=0) for name in ENGINES)
    dead = EngineStatus(name="engine-2", state="dead", policy_version=None, is_alive=False)
    await control.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, engines=(*engines, dead)))
    publisher = Publisher(
        control,
        WeightSyncSettings(announce_timeout_s=0.05, round_timeout_s=0.1),
        incarnation="first",
        socket_dir=tmp_path,
        dtype=torch.float32,
        loop=asyncio.get_running_loop(),
        on_round=said.put_nowait,
    )
    with publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await publisher.announce(lambda: [("a", torch.ones(3))], policy_version=1, executor=executor)
            while (summary := await said.get()).state is RoundState.ANNOUNCED:
                assert summary.awaited == ENGINES
            assert summary.state is RoundState.ABORTED
            assert set(summary.failed) == set(ENGINES)
            announced = control.get("round", WeightRound)
            assert announced is not None
            other = result("engine-0").model_copy(update={"incarnation": "second", "manifest_digest": "f" * 32})
            await control.request("round.result", other, Accepted)
            for engine in ENGINES:
                own = {"manifest_digest": announced.manifest_digest, "incarnation": "first"}
                await control.request("round.result", result(engine).model_copy(update=own), Accepted)
            while (summary := await said.get()).state is not RoundState.COMMITTED:
                pass
            assert summary.failed == {}
