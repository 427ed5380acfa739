"""Sessions in slices and sessions taken up again: the same tokens, no work done twice, or a plain refusal."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import Diverged, EngineUnavailable, LoopError
from agent_loop.loop import AgentLoop, is_resumable
from agent_loop.progress import Noted, Piece, Sampled, Shown, num_sampled
from agent_loop.session import Session
from agent_loop.single_turn import SingleTurn
from agent_loop.slices import FIRST_TOKENS, Slices
from agent_loop.task import Task
from tests.agent_loop.scripted import Letters, ScriptedEngine, generation
from tests.fakes.fake_clock import FakeClock

STOP = 7
TASK = Task(task_id="t", prompt_ids=np.array([50, 51], np.int32), prompt_text="", ground_truth="", data_source="test")


class Greedy:
    """An engine at temperature 0: the next token is a function of the whole context; now and then it aborts."""

    def __init__(self, *, version: int = 0, abort_every: int = 0) -> None:
        self.version = version
        self.asked: list[int] = []
        self.request_ids: list[str] = []
        self._abort_every = abort_every

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        self.asked.append(sampling.max_tokens)
        self.request_ids.append(request_id)
        context = prompt_ids.tolist()
        new: list[int] = []
        limit = sampling.max_tokens
        aborts = self._abort_every and len(self.asked) % self._abort_every == 0
        if aborts:
            limit //= 2
        while len(new) < limit and (not new or new[-1] not in sampling.stop_token_ids):
            new.append((sum((i + 1) * t for i, t in enumerate(context)) + 3 * len(context)) % 41)
            context.append(new[-1])
        stopped = bool(new) and new[-1] in sampling.stop_token_ids
        return generation(
            new,
            end="stop" if stopped else "abort" if aborts else "length",
            runs=((0, self.version),),
        )


class Kept:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.outstanding = 0
        self.is_spoiled = False

    def asked(self, num_tokens: int) -> None:
        self.outstanding = num_tokens

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.outstanding = 0

    async def add_sampled(self, piece: Piece) -> None:
        self.add(piece)

    def spoil(self) -> None:
        self.is_spoiled = True


class Tools:
    """Turns with a tool call between them; resumable."""

    resumable = True

    def __init__(self, num_turns: int = 3) -> None:
        self.num_turns = num_turns
        self.calls: list[int] = []

    async def run(self, task: Task, session: Session) -> None:
        session.append(task.prompt_ids)
        for number in range(self.num_turns):
            turn = await session.generate()

            async def call(turn: Generation = turn, number: int = number) -> list[int]:
                self.calls.append(number)
                return [60 + number, int(turn.token_ids[-1])]

            session.append(await session.once(call))
        await session.generate()


def session_of(engine: Any, recorder: Kept, *, restored: tuple[Piece, ...] = (), slices: int | None = 16) -> Session:
    sampling = SamplingParams(temperature=1.0, max_tokens=100, seed=7, stop_token_ids=(STOP,))
    return Session(
        engine, sampling, rollout_id="r", max_model_len=2000, codec=Letters(), recorder=recorder, restored=restored,
        slices=None if slices is None else _of_size(slices),
    )  # fmt: skip


def _of_size(size: int) -> Slices:
    slices = Slices(lambda: 1.0, clock=FakeClock())
    slices.next_size = lambda context: size  # type: ignore[method-assign]
    return slices


def play(loop: AgentLoop, session: Session) -> None:
    asyncio.run(loop.run(TASK, session))


async def test_slices_add_up_to_the_budget_and_end_at_the_stop_token() -> None:
    """B68: 100 in all in slices of 16; the seventh asks for 4."""
    engine = ScriptedEngine(*[generation([5] * 16, end="length")] * 6, generation([5] * 4, end="length"))
    session = session_of(engine, Kept())
    session.append([1])
    turn = await session.generate()
    assert [sampling.max_tokens for sampling in engine.samplings] == [16] * 6 + [4]
    assert (turn.token_ids.size, turn.stop_reason, session.num_turns) == (100, "length", 1)
    assert len({sampling.seed for sampling in engine.samplings}) == 7

    stops = ScriptedEngine(generation([5] * 16, end="length"), generation([5] * 15 + [STOP], end="stop"))
    session = session_of(stops, Kept())
    session.append([1])
    assert (await session.generate()).stop_reason == "stop"
    assert len(stops.prompts) == 2


async def test_a_slice_that_the_model_length_cut_ends_the_turn() -> None:
    engine = ScriptedEngine(generation([5] * 10, end="length"))
    session = session_of(engine, Kept())
    session.append([1])
    assert (await session.generate()).stop_reason == "length"


async def test_first_slice_is_short_whatever_the_turn_may_be() -> None:
    engine = Greedy()
    session = session_of(engine, Kept(), slices=None)
    session._slices = Slices(lambda: 1.0, clock=FakeClock())
    session.append([1])
    await session.generate()
    assert engine.asked[0] == FIRST_TOKENS


@given(st.integers(1, 64), st.integers(0, 3), st.integers(0, 4))
def test_slices_change_no_token_at_temperature_0(size: int, abort_every: int, num_turns: int) -> None:
    """B68 with aborts in between."""
    abort_every = abort_every and abort_every + 1
    whole, cut = session_of(Greedy(), Kept(), slices=None), session_of(Greedy(abort_every=abort_every), Kept(), slices=size)
    play(Tools(num_turns), whole)
    play(Tools(num_turns), cut)
    a, b = whole.trajectory(), cut.trajectory()
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.loss_mask.tolist() == b.loss_mask.tolist()
    assert (a.num_turns, a.stop_reason, a.num_prompt_tokens) == (b.num_turns, b.stop_reason, b.num_prompt_tokens)


@given(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_a_session_cut_off_anywhere_ends_as_if_it_had_not_been(size: int, cuts: list[int]) -> None:
    """B38, B166: cut off after any piece, again and again; every recorded tool result is used, no tool runs again for it."""
    straight = session_of(Greedy(), Kept(), slices=size)
    play(Tools(), straight)
    tools, pieces = Tools(), []
    for cut in cuts:
        recorder = Kept()
        recorder.pieces = list(pieces)
        play(tools, session_of(Greedy(), recorder, restored=tuple(pieces), slices=size))
        pieces = recorder.pieces[: len(pieces) + cut]
    last = session_of(Greedy(), kept := Kept(), restored=tuple(pieces), slices=size)
    before = len(tools.calls)
    play(tools, last)
    assert last.trajectory().tokens.tolist() == straight.trajectory().tokens.tolist()
    assert last.trajectory().num_turns == straight.num_turns
    assert len(tools.calls) - before == 3 - sum(isinstance(piece, Noted) for piece in pieces)
    assert num_sampled([*pieces, *kept.pieces]) == int(straight.trajectory().loss_mask.sum())


async def test_what_was_restored_is_not_asked_for_and_the_rest_of_the_budget_is() -> None:
    """B68: 60 of 100 restored; the engine is asked for 40, under a number of its own."""
    done = (
        Shown(token_ids=TASK.prompt_ids),
        Sampled(generation=generation([5] * 60, end="abort", runs=((0, 3), (20, 4))), ends_turn=None),
    )
    engine = ScriptedEngine(generation([6] * 40, end="length", runs=((0, 9),)))
    session = session_of(engine, Kept(), restored=done, slices=None)
    await SingleTurn().run(TASK, session)
    got = session.trajectory()
    assert [sampling.max_tokens for sampling in engine.samplings] == [40]
    assert engine.prompts == [[50, 51] + [5] * 60]
    assert engine.request_ids == ["r-2"]
    assert (got.version_starts.tolist(), got.versions.tolist()) == ([0, 2, 22, 62], [-1, 3, 4, 9])
    assert got.kept_cache.tolist() == [0, 0, 1, 0]
    assert got.behavior_logprobs[2] == pytest.approx(-0.01)


async def test_a_turn_that_was_whole_when_it_was_cut_off_asks_no_engine() -> None:
    done = (Shown(token_ids=TASK.prompt_ids), Sampled(generation=generation([5, STOP]), ends_turn="stop"))
    engine = ScriptedEngine()
    session = session_of(engine, Kept(), restored=done)
    await SingleTurn().run(TASK, session)
    assert session.trajectory().tokens.tolist() == [50, 51, 5, STOP]


async def test_a_budget_that_shrank_below_what_is_restored_ends_the_turn() -> None:
    done = (Shown(token_ids=TASK.prompt_ids), Sampled(generation=generation([5] * 120, end="length"), ends_turn=None))
    session = session_of(ScriptedEngine(), Kept(), restored=done)
    await SingleTurn().run(TASK, session)
    assert session.trajectory().stop_reason == "length"


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((Shown(token_ids=np.array([1], np.int32)),), "showed 2 tokens where it showed something else"),
        ((Sampled(generation=generation([5]), ends_turn="stop"),), "showed 2 tokens where it took a turn"),
        ((Shown(token_ids=TASK.prompt_ids), Noted(value=b"1")), "asked for a turn where it had work done"),
        (
            (
                Shown(token_ids=TASK.prompt_ids),
                Sampled(generation=generation([5]), ends_turn="stop"),
                Shown(token_ids=TASK.prompt_ids),
            ),
            "ended where it showed something else",
        ),
    ],
)
async def test_a_loop_that_does_something_else_than_was_recorded_is_refused(pieces: tuple[Piece, ...], words: str) -> None:
    session = session_of(ScriptedEngine(), Kept(), restored=pieces)

    async def whole() -> None:
        await SingleTurn().run(TASK, session)
        session.trajectory()

    with pytest.raises(Diverged, match=words):
        await whole()


async def test_work_is_done_once_and_its_failure_is_not_noted() -> None:
    """B166"""
    recorder = Kept()
    session = session_of(ScriptedEngine(), recorder)

    async def works() -> dict[str, Any]:
        return {"rows": (1, 2)}

    async def fails() -> None:
        raise ValueError("tool is down")

    async def odd() -> object:
        return object()

    assert await session.once(works) == {"rows": [1, 2]}
    with pytest.raises(ValueError, match="tool is down"):
        await session.once(fails)
    with pytest.raises(LoopError, match="no plain data"):
        await session.once(odd)
    again = session_of(ScriptedEngine(), Kept(), restored=tuple(recorder.pieces))
    assert await again.once(fails) == {"rows": [1, 2]}


async def test_a_failed_turn_leaves_nothing_to_continue() -> None:
    """The loop may go on from a failure that a replay would not meet."""
    recorder = Kept()
    session = session_of(ScriptedEngine(generation([5] * 16, end="length"), EngineUnavailable("down")), recorder)
    session.append([1])
    with pytest.raises(EngineUnavailable):
        await session.generate()
    assert recorder.is_spoiled


def test_loops_say_whether_they_can_be_continued() -> None:
    class Plain:
        async def run(self, task: Task, session: Session) -> None:
            return

    assert is_resumable(SingleTurn())
    assert not is_resumable(Plain())
