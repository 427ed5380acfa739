"""The dispatcher over deaths, failures and cancellations: every admitted rollout puts exactly one record into the stream."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent_loop.session import Session
from agent_loop.task import Task
from rollouter import dispatch
from rollouter.admission import Hold
from rollouter.bookkeeping import Bookkeeper
from rollouter.errors import AllQuarantined, DataError, TooManyFailures
from rollouter.tasks import Row
from sample_bus.closed_seat import ClosedSeat
from sample_bus.issued import Issued
from sample_bus.journal import GroupAdmitted, read_journal
from sample_bus.sample import Sample
from tests.fakes.fake_engine import Call
from tests.fakes.fake_producer import FakeProducer, Stream
from tests.rollouter.desk import Desk, desk_settings, open_desk
from tests.rollouter.playing import engine_at

NUM_GROUPS = 80


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of rollouts: nothing below an error is logged."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    yield
    structlog.reset_defaults()


def _seats(stream: Stream) -> Counter[tuple[str, int]]:
    return Counter((record.group_id, record.seat) for record in stream.records)


def _closed(stream: Stream) -> list[ClosedSeat]:
    return [record for record in stream.records if isinstance(record, ClosedSeat)]


def _journal(run_dir: Path) -> list[Any]:
    return list(read_journal(run_dir / "journal" / "run-1" / "rollouter.log"))


async def wait_until(desk: Desk, holds: Any) -> None:
    """Wait for what no single event tells: engine, books and stream together."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)


async def _noted(desk: Desk, count: int) -> None:
    """So many records are in the stream and stand in the journal."""
    await wait_until(desk, lambda: desk.books.num_recorded == len(desk.producer.stream.records) == count)


def _erratic(chance: random.Random, share: float) -> Any:
    """Requests take a random short while, and a share of them fails."""

    async def before_reply(call: Call) -> None:
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.004)
        if chance.random() < share:
            raise ConnectionResetError("the test broke it")

    return before_reply


@pytest.mark.parametrize("policy", ["train_survivors", "drop", "refill"])
@pytest.mark.parametrize("seed", range(4))
async def test_deaths_at_any_moment_lose_no_rollout_and_repeat_none(tmp_path: Path, seed: int, policy: str) -> None:
    """B38, B40, B42, B13: whatever was in flight is played on under the same group; the books replayed are the books kept."""
    chance = random.Random(seed)
    settings = desk_settings(
        tmp_path, on_failed_seat=policy, rollouter={"max_attempts": 2, "max_concurrent_rollouts": 24, "max_task_failures": 50}
    )
    stream, lives, before = Stream(), 0, None
    while True:
        engine = await engine_at(0)
        engine.before_reply = _erratic(chance, 0.15)
        producer = FakeProducer(stream, credit=chance.randrange(4, 80))
        stream.committed = chance.randrange(stream.committed, len(stream.records) + 1)
        stream.settled = chance.randrange(stream.settled, len(stream.records) + 1)
        async with open_desk(settings, producer, engine, num_samples_needed=4 * NUM_GROUPS, process=f"p{lives}") as desk:
            lives += 1
            desk.start()
            if lives <= 12:
                await asyncio.sleep(chance.random() * 0.012)
                await desk.cut_off()
                before = desk.books
                assert Bookkeeper(tmp_path, "run-1").books == before
                continue
            producer.credit = 10**9
            producer.settle(0)
            await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.ENOUGH and not desk.books.open_groups)
            desk.drain()
            await desk.ended()
            break
    groups = [record for record in _journal(tmp_path) if isinstance(record, GroupAdmitted)]
    assert [group.issue for group in groups] == list(range(NUM_GROUPS)), f"seed {seed}"
    assert len({group.task_id for group in groups}) == NUM_GROUPS
    assert _seats(stream) == Counter({(group.group_id, seat): 1 for group in groups for seat in range(4)}), f"seed {seed}"
    counts = desk.books.counts()
    assert (counts.admitted, counts.in_flight) == (4 * NUM_GROUPS, 0)
    assert counts.offered == sum(isinstance(record, Sample) for record in stream.records)
    issued = Issued.of(_journal(tmp_path))
    assert issued.problems.texts == [], f"seed {seed}"


async def test_thousand_cancelled_rollouts_each_end_definitely_and_leave_nothing_behind(tmp_path: Path) -> None:
    """B42, B160"""
    chance = random.Random(7)
    settings = desk_settings(tmp_path, max_staleness=0, on_failed_seat="drop", rollouter={"max_concurrent_rollouts": 64})
    stream, engine = Stream(), await engine_at(0)

    async def before_reply(call: Call) -> None:
        await asyncio.sleep(0 if chance.random() < 0.5 else 30)

    engine.before_reply = before_reply
    async with open_desk(settings, FakeProducer(stream), engine) as desk:
        desk.start()
        while sum(desk.books.counts().failed.values()) < 1000:
            await asyncio.sleep(chance.random() * 0.003)
            desk.run.dispatcher.cancel_hopeless(1, "first")
        desk.drain()
        await wait_until(desk, lambda: desk.run.dispatcher.cancel_hopeless(1, "first") == 0 and not desk.books.open_groups)
        await desk.ended()
        assert engine.num_running == 0
        assert desk.run.dispatcher.is_idle
    sizes = Counter(record.group_id for record in stream.records)
    assert set(sizes.values()) == {4}
    assert max(_seats(stream).values()) == 1
    assert {record.reason for record in _closed(stream)} <= {"stale", "siblings failed"}
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


class _OneHangs:
    """An agent loop of which one seat of the first task waits for ever, `times` times; the others answer."""

    def __init__(self, seat: int = 1, times: int = 10**9, issue: int = 0) -> None:
        self.mark = f"#{issue}@"
        self.seat = seat
        self.times = times
        self.played: list[str] = []

    async def run(self, task: Task, session: Session) -> None:
        name = session.rollout_id
        self.played.append(name)
        if self.mark in name and name.rsplit("/", 1)[1].startswith(f"{self.seat}.") and self.times > 0:
            self.times -= 1
            await asyncio.Event().wait()
        session.append(task.prompt_ids)
        await session.generate()


async def test_group_deadline_gives_the_stuck_seat_up_and_no_restart_wedges_again(tmp_path: Path) -> None:
    """B13: three are left to be trained; killed before the deadline and taken up again, the group has only the rest of it."""
    settings = desk_settings(tmp_path, rollouter={"group_timeout_s": 0.5, "max_attempts": 3})
    stream, loop = Stream(), _OneHangs()
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 3)
        await desk.cut_off()
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
        desk.drain()
        await desk.ended()
    (closed,) = _closed(stream)
    assert (closed.seat, closed.reason, closed.attempt) == (1, "group deadline", 1)
    assert "(rollouter.group_timeout_s)" in closed.message
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        assert not desk.books.open_groups


async def test_dropped_group_takes_its_siblings_with_it_at_once(tmp_path: Path) -> None:
    settings = desk_settings(tmp_path, on_failed_seat="drop", rollouter={"max_attempts": 1})
    stream, engine = Stream(), await engine_at(0)

    async def before_reply(call: Call) -> None:
        if "/2.0" in call.request_id:
            raise ConnectionResetError("the test broke it")
        await asyncio.Event().wait()

    engine.before_reply = before_reply
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
        assert engine.num_running == 0
    reasons = {record.seat: record.reason for record in _closed(stream)}
    assert reasons == {0: "siblings failed", 1: "siblings failed", 2: "engine unavailable", 3: "siblings failed"} or (
        reasons[2] == "agent loop failed"
    )


async def test_siblings_are_spared_in_vain_work_when_too_few_can_survive(tmp_path: Path) -> None:
    """B76: with min_survivors=3 a second failed seat ends the group."""
    settings = desk_settings(tmp_path, min_survivors=3, rollouter={"max_attempts": 1})
    stream, engine = Stream(), await engine_at(0)

    async def before_reply(call: Call) -> None:
        if "/0.0" in call.request_id or "/1.0" in call.request_id:
            raise ValueError("the test broke it")
        await asyncio.Event().wait()

    engine.before_reply = before_reply
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
    assert Counter(record.reason for record in _closed(stream)) == {"agent loop failed": 2, "siblings failed": 2}


async def test_refill_fills_the_seat_with_a_fresh_rollout(tmp_path: Path) -> None:
    """B13: next attempt numbers, a seed of its own; the group has a whole deadline again."""
    settings = desk_settings(
        tmp_path, on_failed_seat="refill", rollouter={"group_timeout_s": 0.2, "max_attempts": 3, "max_task_failures": 3}
    )
    stream, loop, engine = Stream(), _OneHangs(times=2), await engine_at(0)
    async with open_desk(settings, FakeProducer(stream), engine, loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
        assert (desk.books.counts().retried, desk.books.counts().offered) == (2, 4)
    attempts = {record.seat: record.attempt for record in stream.records}
    assert attempts == {0: 0, 1: 2, 2: 0, 3: 0}
    assert len({call.sampling.seed for call in engine.calls}) == 4


async def test_seat_that_no_rollout_fills_is_closed_after_so_many_and_its_task_quarantined(tmp_path: Path) -> None:
    """B13: then the survivors go on."""
    settings = desk_settings(
        tmp_path, on_failed_seat="refill", rollouter={"group_timeout_s": 0.05, "max_attempts": 1, "max_task_failures": 2}
    )
    stream, loop = Stream(), _OneHangs()
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
        assert desk.books.counts().quarantined_tasks == 1
    (closed,) = _closed(stream)
    assert (closed.seat, closed.attempt, closed.reason) == (1, 2, "group deadline")
    assert len(list((tmp_path / "quarantine" / "tasks").glob("*.json"))) == 1


async def test_record_that_the_trainers_end_refuses_closes_its_seat(tmp_path: Path) -> None:
    """B54, B55"""
    settings = desk_settings(tmp_path)
    stream = Stream()
    producer = FakeProducer(stream)
    async with open_desk(settings, producer, await engine_at(0), num_samples_needed=8) as desk:
        desk.start()
        await _noted(desk, 8)
        refused = stream.records[5]
        rejection = producer.reject(5, "behavior_logprobs[3]: got nan")
        desk.run.dispatcher.take_rejection(rejection)
        await _noted(desk, 9)
        desk.run.dispatcher.take_rejection(rejection)  # told again: it is not the seat's record any more
        desk.drain()
        await desk.ended()
        assert desk.books.counts().failed == {"bad sample": 1}
    closed = stream.records[8]
    assert isinstance(closed, ClosedSeat)
    assert (closed.group_id, closed.seat, closed.reason) == (refused.group_id, refused.seat, "bad sample")
    assert closed.message == "behavior_logprobs[3]: got nan"
    assert Issued.of(_journal(tmp_path)).problems.texts == []


async def test_refused_closed_seat_is_closed_once_more_for_its_own_reason_and_not_for_ever(tmp_path: Path) -> None:
    settings = desk_settings(tmp_path, max_staleness=0, rollouter={"max_consecutive_failures": 3, "max_concurrent_rollouts": 4})
    stream = Stream()
    producer = FakeProducer(stream)
    async with open_desk(settings, producer, await engine_at(0), loop=_OneHangs(), num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 3)
        desk.run.dispatcher.cancel_hopeless(1, "first")
        for refusals in range(3):
            await _noted(desk, 4 + refusals)
            desk.run.dispatcher.take_rejection(producer.reject(3 + refusals, "reason: got ''"))
        with pytest.raises(ExceptionGroup) as raised:
            await desk.ended()
    (error,) = raised.value.exceptions
    assert isinstance(error, TooManyFailures)
    assert "bad sample: reason: got ''" in str(error)
    assert [(closed.seat, closed.reason) for closed in _closed(stream)] == [(1, "stale")] * 3
    assert Issued.of(_journal(tmp_path)).problems.texts == []


async def test_task_that_keeps_failing_is_issued_no_more_over_restarts_until_it_is_released(tmp_path: Path) -> None:
    """B13, B34: and it is issued again at once on a live run, once its file is gone."""
    settings = desk_settings(tmp_path, rollouter={"max_attempts": 1, "max_task_failures": 2, "max_consecutive_failures": 1000})
    rows = [Row(prompt=f"{n}+{n}=", ground_truth=str(2 * n), data_source="d", task_id=f"t{n}") for n in (1, 2, 3)]
    stream = Stream()

    def poison(call: Call) -> None:
        if call.request_id.startswith("t2#"):
            raise ValueError("poison")

    async def life(groups: int) -> Desk:
        engine = await engine_at(0, before_reply=poison)
        needed = len(stream.records) + 4 * groups
        async with open_desk(settings, FakeProducer(stream), engine, rows=rows, num_samples_needed=needed) as desk:
            desk.start()
            await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.ENOUGH and not desk.books.open_groups)
            if groups == 9:
                for path in (tmp_path / "quarantine" / "tasks").glob("*.json"):
                    path.unlink()
                desk.situation.num_samples_needed = needed + 12
                desk.run.dispatcher.wake()
                await wait_until(desk, lambda: desk.admission.outstanding == needed + 12 and not desk.books.open_groups)
        return desk

    await life(3)
    before = Counter(record.group_id.split("#")[0] for record in stream.records)
    assert before == {"t1": 4, "t2": 4, "t3": 4}
    desk = await life(8)
    assert desk.books.counts().quarantined_tasks == 1
    assert Counter(record.group_id.split("#")[0] for record in stream.records) == {"t1": 20, "t2": 4, "t3": 20}
    await life(9)
    assert Counter(record.group_id.split("#")[0] for record in stream.records)["t2"] == 8


async def test_when_all_tasks_are_quarantined_the_run_stops_and_says_where(tmp_path: Path) -> None:
    settings = desk_settings(tmp_path, rollouter={"max_attempts": 1, "max_task_failures": 1, "max_consecutive_failures": 1000})
    rows = [Row(prompt=f"{n}+{n}=", ground_truth=str(2 * n), data_source="d", task_id=f"t{n}") for n in (1, 2, 3)]

    def poison(call: Call) -> None:
        raise ValueError("poison")

    engine = await engine_at(0, before_reply=poison)
    async with open_desk(settings, FakeProducer(Stream()), engine, rows=rows) as desk:
        desk.start()
        with pytest.raises(ExceptionGroup) as raised:
            await desk.ended()
    (error,) = raised.value.exceptions
    assert isinstance(error, AllQuarantined)
    assert f"all 3 tasks are in quarantine ({tmp_path}/quarantine/tasks)" in str(error)


async def test_other_data_than_the_runs_is_refused(tmp_path: Path) -> None:
    """B93"""
    settings = desk_settings(tmp_path)
    stream = Stream()
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), num_samples_needed=8) as desk:
        desk.start()
        await _noted(desk, 8)
    rows = [Row(prompt="1+1=", ground_truth="2", data_source="d")]
    with pytest.raises(DataError, match=r"data changed: got tasks with fingerprint \w+, expected \w+, over which 2 tasks were"):
        async with open_desk(settings, FakeProducer(stream), await engine_at(0), rows=rows):
            pass


async def test_groups_whose_journal_is_lost_are_finished_from_their_records(tmp_path: Path) -> None:
    settings = desk_settings(tmp_path)
    stream, loop = Stream(), _OneHangs(times=1)
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 3)
    (tmp_path / "journal" / "run-1" / "rollouter.log").unlink()
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=8) as desk:
        assert desk.admission.outstanding == 4
        desk.start()
        await _noted(desk, 8)
        assert desk.books.counts().admitted == 8
    assert set(_seats(stream).values()) == {1}
    assert set(Counter(record.group_id for record in stream.records).values()) == {4}


async def test_new_stream_closes_what_the_old_one_held_of_open_groups(tmp_path: Path) -> None:
    """B40: the spool is lost; a group that had records there is closed seat by seat, one that had none is played on."""
    settings = desk_settings(tmp_path)
    stream, loop = Stream(), _OneHangs(times=1)
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=8) as desk:
        desk.start()
        await wait_until(desk, lambda: desk.books.counts().offered == 7)
    stuck = next(iter(desk.books.open_groups))
    fresh = Stream(epoch=2)
    async with open_desk(settings, FakeProducer(fresh), await engine_at(0), loop=loop, num_samples_needed=8) as desk:
        desk.start()
        await _noted(desk, 8)
    assert {(record.group_id, record.seat, record.reason) for record in _closed(fresh)} == {
        (stuck, seat, "siblings lost") for seat in range(4)
    }
    assert Issued.of(_journal(tmp_path)).problems.texts == []


async def test_full_disk_holds_admission_and_starts_nothing_that_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = desk_settings(tmp_path, rollouter={"max_concurrent_rollouts": 4})
    stream, engine = Stream(), await engine_at(0)
    is_full = False
    write = os.pwritev

    def pwritev(descriptor: int, parts: Any, at: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    gate = asyncio.Event()
    engine.before_reply = lambda call: gate.wait()
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=12) as desk:
        desk.start()
        await wait_until(desk, lambda: engine.num_running == 4)
        is_full = True
        gate.set()
        await wait_until(desk, lambda: desk.run.keeper.is_blocked)
        for _ in range(50):
            await asyncio.sleep(0)
        assert desk.run.keeper.problem == "No space left on device"
        assert len(engine.calls) <= 8
        stored = len(stream.records)
        await asyncio.sleep(0.05)
        desk.run.dispatcher.wake()
        await asyncio.sleep(0.05)
        assert len(stream.records) == stored
        assert desk.run.dispatcher.holding in (Hold.JOURNAL, Hold.CONCURRENCY)
        is_full = False
        await wait_until(desk, lambda: not desk.run.keeper.is_blocked)
        desk.run.dispatcher.wake()
        await _noted(desk, 12)
        desk.drain()
        await desk.ended()
    assert set(_seats(stream).values()) == {1}
    assert Issued.of(_journal(tmp_path)).counts().offered == 12


async def test_refunds_alone_give_admission_back(tmp_path: Path) -> None:
    """B45, B168: a failed rollout by itself gives nothing back; the trainer's refund does."""
    settings = desk_settings(tmp_path, staleness_threshold=0.0, rollouter={"max_attempts": 1})
    stream, broken = Stream(), 2
    engine = await engine_at(0)

    def fail(call: Call) -> None:
        nonlocal broken
        if broken:
            broken -= 1
            raise ValueError("the test broke it")

    engine.before_reply = fail
    async with open_desk(settings, FakeProducer(stream), engine) as desk:
        desk.start()
        await _noted(desk, 8)
        await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.BUDGET)
        desk.refund(3)
        await asyncio.sleep(0.02)
        assert len(stream.records) == 8
        desk.refund(4)
        await _noted(desk, 12)


async def test_budget_after_a_restart_is_what_the_trainer_accounts_for_and_what_is_in_flight(tmp_path: Path) -> None:
    """B29: also when the last offers were stored and never noted."""
    settings = desk_settings(tmp_path, staleness_threshold=0.5)
    stream, loop = Stream(), _OneHangs(times=1)
    producer = FakeProducer(stream)
    async with open_desk(settings, producer, await engine_at(0), loop=loop) as desk:
        producer.before_return = asyncio.Event()
        desk.start()
        await wait_until(desk, lambda: len(stream.records) == 11)
        assert desk.books.counts().offered == 0
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop) as desk:
        assert desk.books.counts().offered == 11
        assert desk.admission.outstanding == 12
        desk.start()
        await _noted(desk, 12)
        await wait_until(desk, lambda: desk.run.dispatcher.holding is Hold.BUDGET)
        assert len(stream.records) == 12
    assert set(_seats(stream).values()) == {1}


async def test_engine_of_a_dead_process_is_asked_under_new_attempt_numbers(tmp_path: Path) -> None:
    """B40: a result of before the death can be told from one of after it."""
    settings = desk_settings(tmp_path)
    stream, loop = Stream(), _OneHangs(times=1)
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 3)
    async with open_desk(settings, FakeProducer(stream), await engine_at(0), loop=loop, num_samples_needed=4) as desk:
        desk.start()
        await _noted(desk, 4)
    assert [record.attempt for record in stream.records if record.seat == 1] == [1]


async def test_groups_are_admitted_in_portions_and_the_loop_has_its_turns_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B160: a step's rollouts do not all begin in one turn of the event loop; all of them begin nevertheless."""
    monkeypatch.setattr(dispatch, "PORTION_S", 0.0)
    gate = asyncio.Event()

    async def hold(call: Call) -> None:
        await gate.wait()

    engine, producer = await engine_at(0, before_reply=hold), FakeProducer(Stream())
    settings = desk_settings(tmp_path, rollouter={"max_concurrent_rollouts": 500})
    async with open_desk(settings, producer, engine, num_samples_needed=500) as desk:
        desk.start()
        admitted = [0]
        async with asyncio.timeout(60):
            while engine.num_running < 500:
                await asyncio.sleep(0)
                admitted.append(len(desk.books.open_groups))
        assert max(after - before for before, after in itertools.pairwise(admitted)) == 1
        assert admitted[-1] == 125
        gate.set()
        desk.drain()
        await desk.ended()
    assert len(producer.stream.records) == 500
