"""Rollouts that a death cut off go on from what they had recorded; what cannot be continued begins anew; no tool runs twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import EngineUnavailable
from agent_loop.session import Session
from agent_loop.task import Task
from configs.schema import Settings
from rollouter.admission import HeldVersion
from rollouter.books import Books
from rollouter.failures import FailureReason
from rollouter.progress import read_progress
from rollouter.seat_policy import MAX_INTERRUPTIONS
from sample_bus.journal import AttemptFailed, GroupAdmitted, RollouterBegan, read_journal
from sample_bus.messages import Recovery, WeightRound
from sample_bus.sample import Sample
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_producer import FakeProducer, Stream
from tests.fakes.slow_engine import SlowEngine, reply_of
from tests.rollouter.desk import CODEC, DEADLINE_S, Desk, desk_settings, open_desk

SHORTEST, LONGEST = 110, 130


async def _staged(announced: WeightRound, engine: str, nonce: str) -> None:
    return


async def slow_engine(version: int = 0, **changes: Any) -> SlowEngine:
    engine = SlowEngine(**{"shortest": SHORTEST, "longest": LONGEST, "tokens_per_s": 1e6, **changes})
    announced = WeightRound(
        policy_version=version, incarnation="i", address="", manifest_digest="d", num_tensors=1, total_bytes=1, announced_at=0.0
    )
    await engine.sync(announced, _staged)
    return engine


def settings_of(run_dir: Path, **rollouter: Any) -> Settings:
    """A turn is asked for in slices of about 32 tokens."""
    return desk_settings(
        run_dir,
        sampling={"max_tokens": 200, "stop": ()},
        engine={"max_model_len": 512},
        rollouter={"progress_interval_s": 1e-9, **rollouter},
    )


class Stopping(SlowEngine):
    """Never answers the requests of a rollout after its `after`th."""

    __slots__ = ("after", "asked", "stuck", "stuck_at")

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        name = request_id.rpartition("-")[0]
        self.asked[name] = self.asked.get(name, 0) + 1
        if self.asked[name] > self.after:
            self.stuck.add(name)
            self.stuck_at.set()
            await asyncio.Event().wait()
        return await SlowEngine.generate(self, prompt_ids, sampling, request_id=request_id)


async def stopping_engine(after: int, version: int = 0) -> Stopping:
    engine = Stopping(shortest=SHORTEST, longest=LONGEST, tokens_per_s=1e6)
    engine.after, engine.asked, engine.stuck, engine.stuck_at = after, {}, set(), asyncio.Event()
    announced = WeightRound(
        policy_version=version, incarnation="i", address="", manifest_digest="d", num_tensors=1, total_bytes=1, announced_at=0.0
    )
    await engine.sync(announced, _staged)
    return engine


async def _all_stuck(engine: Stopping, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(engine.stuck) < count:
            engine.stuck_at.clear()
            await engine.stuck_at.wait()


async def _finish(desk: Desk) -> None:
    desk.drain()
    await desk.ended()


def _failures(run_dir: Path) -> list[AttemptFailed]:
    path = run_dir / "journal" / "run-1" / "rollouter.log"
    return [record for record in read_journal(path) if isinstance(record, AttemptFailed)]


def _samples(stream: Stream) -> list[Sample]:
    return [record for record in stream.records if isinstance(record, Sample)]


def _check_replies(stream: Stream) -> None:
    for sample in _samples(stream):
        reply = reply_of(sample.rollout_id, shortest=SHORTEST, longest=LONGEST)
        assert sample.tokens[sample.loss_mask == 1].tolist() == reply


async def test_rollouts_go_on_from_their_recorded_slices(tmp_path: Path) -> None:
    """B38: cut off in the third slice of a turn; the next process asks for the rest only, under the next attempt's number."""
    settings, stream = settings_of(tmp_path), Stream()
    engine = await stopping_engine(after=2)
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=8) as desk:
        desk.start()
        await _all_stuck(engine, 8)
        first_tokens = engine.generated_tokens
    assert desk.run.keeper.recovery is None

    second = await slow_engine()
    async with open_desk(settings, FakeProducer(stream), second, num_samples_needed=8, process="q") as desk:
        recovery = desk.run.keeper.recovery
        desk.start()
        await _finish(desk)
    assert recovery == Recovery(
        process=2, continued=8, restarted=0, tokens_kept=first_tokens, tokens_lost_at_most=recovery.tokens_lost_at_most
    )
    assert recovery.tokens_lost_at_most > 0
    _check_replies(stream)
    samples = _samples(stream)
    assert first_tokens + second.generated_tokens == sum(sample.num_trained_tokens for sample in samples), "none twice"
    assert {sample.attempt for sample in samples} == {1}
    assert {(failure.reason, failure.then) for failure in _failures(tmp_path)} == {("interrupted", "continue")}
    assert sum(failure.kept_tokens for failure in _failures(tmp_path)) == first_tokens
    assert desk.books.counts().retried == 0


async def test_rollouts_of_a_process_that_stopped_in_order_go_on_in_the_same_attempt(tmp_path: Path) -> None:
    settings, stream = settings_of(tmp_path), Stream()
    engine = await stopping_engine(after=1)
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=8) as desk:
        desk.start()
        await _all_stuck(engine, 8)
        desk.run.keeper.close("stopped")
        first_tokens = engine.generated_tokens
    second = await slow_engine()
    async with open_desk(settings, FakeProducer(stream), second, num_samples_needed=8, process="q") as desk:
        desk.start()
        await _finish(desk)
    _check_replies(stream)
    assert first_tokens + second.generated_tokens == sum(sample.num_trained_tokens for sample in _samples(stream))
    assert ({sample.attempt for sample in _samples(stream)}, _failures(tmp_path)) == ({0}, [])


async def test_a_continued_rollout_is_as_old_as_its_first_token(tmp_path: Path) -> None:
    """What was sampled before the death bears its version; the rollout is cancelled when that is hopeless."""
    settings, stream = settings_of(tmp_path), Stream()
    settings = settings.model_copy(update={"max_staleness": 2})
    engine = await stopping_engine(after=1, version=4)
    async with open_desk(settings, FakeProducer(stream), engine, num_samples_needed=4) as desk:
        desk.admission.take_held(HeldVersion(incarnation="first", policy_version=4))
        desk.admission.take_trainer(incarnation="first", origin_version=0, policy_version=4, num_refunded=0)
        desk.start()
        await _all_stuck(engine, 4)
    second = await stopping_engine(after=0, version=6)
    async with open_desk(settings, FakeProducer(stream), second, num_samples_needed=4, process="q") as desk:
        desk.admission.take_held(HeldVersion(incarnation="first", policy_version=6))
        desk.start()
        await _all_stuck(second, 4)
        assert desk.run.dispatcher.cancel_hopeless(6, "first") == 0
        assert desk.run.dispatcher.cancel_hopeless(7, "first") == 4
        await _finish(desk)
    assert {getattr(record, "reason", None) for record in stream.records} == {"stale"}


class _WithTool:
    """Two turns with a tool between them, whose runs are counted beyond the lives of processes."""

    resumable = True
    runs: dict[str, int] = {}  # noqa: RUF012 - shared on purpose

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()

        async def tool() -> int:
            name = session.rollout_id.rpartition(".")[0]
            self.runs[name] = self.runs.get(name, 0) + 1
            return self.runs[name]

        result = await session.once(tool)
        session.append(CODEC.encode(f"{result}+{result}="))
        await session.generate()


async def test_a_tool_whose_result_was_recorded_does_not_run_again(tmp_path: Path) -> None:
    """B166: cut off in the turn after the tool call, twice."""
    settings, stream = settings_of(tmp_path, progress_interval_s=0.0), Stream()
    _WithTool.runs.clear()
    for process in ("p", "q"):
        engine = await stopping_engine(after=1 if process == "p" else 0)
        async with open_desk(
            settings, FakeProducer(stream), engine, loop=_WithTool(), num_samples_needed=4, process=process
        ) as desk:
            desk.start()
            await _all_stuck(engine, 4)
    engine = await slow_engine()
    async with open_desk(settings, FakeProducer(stream), engine, loop=_WithTool(), num_samples_needed=4, process="r") as desk:
        desk.start()
        await _finish(desk)
    assert sorted(_WithTool.runs.values()) == [1, 1, 1, 1]
    for sample in _samples(stream):
        reply = reply_of(sample.rollout_id, shortest=SHORTEST, longest=LONGEST)
        assert (sample.num_turns, sample.attempt) == (2, 2)
        assert sample.tokens[sample.loss_mask == 1].tolist() == [*reply, *reply]
        assert CODEC.decode(sample.tokens.tolist()).count("1+1=") == 1


class _Fickle:
    """Says that it can be continued, and shows something else each time."""

    resumable = True
    num_runs = 0

    async def run(self, task: Task, session: Session) -> None:
        type(self).num_runs += 1
        session.append(CODEC.encode(f"{self.num_runs}+1="))
        await session.generate()


class _Unresumable:
    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        await session.generate()


@pytest.mark.parametrize("loop", [_Fickle, _Unresumable])
async def test_what_cannot_be_continued_begins_anew(tmp_path: Path, loop: type[Any]) -> None:
    settings, stream = settings_of(tmp_path, max_attempts=1), Stream()
    engine = await stopping_engine(after=1 if loop is _Fickle else 0)  # the other one's turn is asked for whole
    async with open_desk(settings, FakeProducer(stream), engine, loop=loop(), num_samples_needed=4) as desk:
        desk.start()
        await _all_stuck(engine, 4)
    second = await slow_engine()
    async with open_desk(settings, FakeProducer(stream), second, loop=loop(), num_samples_needed=4, process="q") as desk:
        desk.start()
        await _finish(desk)
    _check_replies(stream)
    assert len(_samples(stream)) == 4
    assert not desk.books.failures


async def test_an_attempt_that_failed_is_not_continued(tmp_path: Path) -> None:
    """A retry begins from the pristine prompt (B36), also when the process dies right after the failure was noted."""
    settings, stream = settings_of(tmp_path, max_attempts=3), Stream()
    engine = _Failing(await stopping_engine(after=1), fails={".0-1"})
    async with open_desk(settings, FakeProducer(stream), cast(FakeEngine, engine), num_samples_needed=4) as desk:
        desk.start()
        await _all_stuck(engine.engine, 8)  # each in its attempts 0 and 1
    second = await slow_engine()
    async with open_desk(settings, FakeProducer(stream), second, num_samples_needed=4, process="q") as desk:
        desk.start()
        await _finish(desk)
    _check_replies(stream)
    assert {sample.attempt for sample in _samples(stream)} == {2}
    sizes = {size for name, size in engine.asked if name.endswith(("0-0", "1-0"))}
    assert len(sizes) == 1, "both attempts began with the prompt"


class _Failing:
    """An engine some of whose requests get no answer."""

    def __init__(self, engine: Stopping, *, fails: set[str]) -> None:
        self.engine = engine
        self.asked: list[tuple[str, int]] = []
        self._fails = tuple(fails)

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        self.asked.append((request_id, prompt_ids.size))
        if request_id.endswith(self._fails):
            self.engine.stuck.add(request_id)
            raise EngineUnavailable("down")
        return await self.engine.generate(prompt_ids, sampling, request_id=request_id)


def test_deaths_without_gain_in_a_row_end_a_rollout_and_gains_start_the_count_anew() -> None:
    """B13: what kills this process is given up at last; what only lives long is not."""
    books = Books()
    books.apply(RollouterBegan(at=0.0, process="p", epoch=1, data_fingerprint="f"))
    books.apply(
        GroupAdmitted(
            at=0.0, group_id="g", task_id="t", issue=0, group_size=1, policy_version=0, incarnation="i", settings_revision=0,
            temperature=1.0, max_tokens=8,
        )
    )  # fmt: skip
    seat = books.open_groups["g"].seats[0]

    def die(kept_tokens: int, then: str = "continue") -> None:
        books.apply(
            AttemptFailed(
                at=0.0, group_id="g", seat=0, attempt=seat.attempt, reason=FailureReason.INTERRUPTED.value, message="",
                then=then, kept_tokens=kept_tokens,
            )
        )  # fmt: skip

    for tokens in range(1, 3 * MAX_INTERRUPTIONS):
        die(tokens)
        assert (seat.num_interrupted, seat.first_attempt) == (1, 0)
    for number in range(2, 5):
        die(seat.kept_tokens)
        assert seat.num_interrupted == number
    die(0, then="retry")
    assert (seat.num_interrupted, seat.first_attempt, seat.kept_tokens) == (5, seat.attempt, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_deaths_and_stops_at_any_moment_leave_every_reply_whole(tmp_path: Path, seed: int) -> None:
    """B38: fifteen lives, some stopped in order, a damaged log among them; each seat brings exactly its reply."""
    chance = random.Random(seed)
    settings, stream = settings_of(tmp_path, max_concurrent_rollouts=16), Stream()
    log = tmp_path / "journal" / "run-1" / "progress.log"
    generated = kept_before_damage = 0
    for life in range(16):
        engine = await slow_engine(tokens_per_s=20_000.0)
        producer = FakeProducer(stream)
        async with open_desk(settings, producer, engine, num_samples_needed=64, process=f"p{life}") as desk:
            desk.start()
            num_calls = 10**6 if life == 15 else chance.randrange(24, 64)
            async with asyncio.timeout(DEADLINE_S):
                while len(stream.records) < 64 and len(engine.calls) < num_calls:  # noqa: ASYNC110 - two things are waited for
                    await asyncio.sleep(0)
            generated += engine.generated_tokens
            if life == 15:
                await _finish(desk)
            elif chance.random() < 0.3:
                desk.run.keeper.close("stopped")
            await desk.cut_off()
        if life == 7 and log.stat().st_size > 200:
            kept_before_damage = sum(progress.num_tokens for progress in read_progress(log).values())
            data = bytearray(log.read_bytes())
            data[len(data) // 2] ^= 0xFF
            log.write_bytes(data)
    _check_replies(stream)
    seats = Counter((sample.group_id, sample.seat) for sample in _samples(stream))
    assert (len(seats), set(seats.values())) == (64, {1}), f"seed {seed}"
    needed = sum(sample.num_trained_tokens for sample in _samples(stream))
    assert needed <= generated <= needed + kept_before_damage, f"seed {seed}: only what damage cost was answered twice"
