"""The tool-calling loop: calls are made once, cut ones never, and every way of going wrong is an observation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import ToolError
from agent_loop.loop import LoopSetup, load_agent_loop
from agent_loop.progress import Noted, Piece
from agent_loop.session import Session
from agent_loop.task import Task
from agent_loop.tool_calling import ToolCalling
from agent_loop.toolbox import ToolBox
from agent_loop.tools import FunctionTool
from configs.schema import ToolSettings
from tests.agent_loop.chat_models import FAMILIES, make_codec
from tests.agent_loop.scripted import ScriptedEngine, generation
from tests.agent_loop.test_segments import Kept

CODEC = make_codec(FAMILIES["qwen2.5"])
END = "<|im_end|>"
TASK = Task(
    task_id="t",
    prompt_ids=np.array([1], np.int32),
    prompt_text="2*3",
    ground_truth="6",
    data_source="d",
    messages=({"role": "user", "content": "2*3"},),
)


class Calculator:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def multiply(self, a: int, b: int) -> int:
        """Multiplies."""
        self.asked.append((a, b))
        return a * b


def call(a: Any, b: Any, name: str = "multiply") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"


def said(text: str, *, end: bool = True) -> Generation:
    tokens = CODEC.encode(text + (END if end else ""))
    return generation(tokens, end="stop" if end else "length")


def session_of(
    *turns: Generation | Exception, recorder: Kept | None = None, restored: Sequence[Piece] = (), max_model_len: int = 4096
) -> Session:
    sampling = SamplingParams(temperature=1.0, max_tokens=1000)
    return Session(
        ScriptedEngine(*turns),
        sampling,
        rollout_id="r.0",
        max_model_len=max_model_len,
        codec=CODEC,
        recorder=recorder,
        restored=restored,
    )


async def play(session: Session, calculator: Calculator | None = None, **changes: Any) -> Calculator:
    calculator = calculator or Calculator()
    settings = ToolSettings(**changes)
    box = ToolBox(settings, [FunctionTool(calculator.multiply)])
    try:
        await ToolCalling(box, settings).run(TASK, session)
    finally:
        await box.close()
    return calculator


def text_of(session: Session) -> str:
    return CODEC.decode_whole(session.trajectory().tokens.tolist())


async def test_a_call_is_made_and_its_result_shown() -> None:
    session = session_of(said(call(2, 3)), said("6"))
    calculator = await play(session)
    assert calculator.asked == [(2, 3)]
    got = session.trajectory()
    assert "<tool_response>\n6\n</tool_response>" in text_of(session)
    assert CODEC.decode_whole(got.tokens[got.loss_mask == 1].tolist()) == call(2, 3) + END + "6" + END
    assert (got.num_turns, got.stop_reason) == (2, "stop")
    assert got.counts == {"tool_calls": 1, "tool_calls_returned": 1}


async def test_the_tools_are_told_to_the_model() -> None:
    session = session_of(said("6"))
    await play(session)
    assert '"name": "multiply"' in text_of(session)


async def test_malformed_calls_are_answered_and_the_rollout_goes_on() -> None:
    """B157, B158: counted, and the cap of turns holds."""
    odd = ["", "{", '{"name": "multiply"}', '{"name": "Multiply", "arguments": {"a": 1, "b": 2}}', "[1]", "NaN"]
    session = session_of(*(said(f"<tool_call>{text}</tool_call>") for text in odd), said("6"))
    calculator = await play(session)
    assert calculator.asked == []
    counts = session.trajectory().counts
    assert counts == {"tool_calls": len(odd), "tool_parse_errors": len(odd)}
    assert text_of(session).count("<tool_response>\nError: ") == len(odd)


async def test_a_call_that_the_token_limit_cut_is_never_executed() -> None:
    """B66: tagged as truncated, and no format error."""
    whole = call(2, 3)
    for text in (whole, whole[:-15]):
        session = session_of(said(text, end=False))
        calculator = await play(session)
        got = session.trajectory()
        assert (calculator.asked, got.stop_reason, got.counts) == ([], "length", {"truncated_turns": 1})


async def test_the_last_turn_makes_no_call() -> None:
    session = session_of(said(call(1, 1)), said(call(2, 2)))
    calculator = await play(session, max_turns=2)
    assert calculator.asked == [(1, 1)]
    assert session.trajectory().counts["tool_calls_refused"] == 1


async def test_calls_beyond_the_rollouts_cap_are_refused() -> None:
    session = session_of(said(call(1, 1) + call(2, 2)), said(call(3, 3)), said("6"))
    calculator = await play(session, max_calls=2)
    assert sorted(calculator.asked) == [(1, 1), (2, 2)]
    assert session.trajectory().counts == {"tool_calls": 3, "tool_calls_returned": 2, "tool_calls_refused": 1}


async def test_an_observation_beyond_the_models_length_ends_the_rollout_as_truncated() -> None:
    """B64, B164: a later turn without room is an end, and no exception."""
    probe = session_of(said(call(2, 3)), said("6"))
    await play(probe)
    whole = probe.trajectory().tokens.size - len(CODEC.encode("6" + END))
    for room, kept in ((0, True), (-1, False)):
        session = session_of(said(call(2, 3)), max_model_len=whole + room)
        await play(session)
        got = session.trajectory()
        assert (got.stop_reason, got.num_turns, got.counts["truncated_rollouts"]) == ("length", 1, 1)
        assert ("<tool_response>" in text_of(session)) is kept


async def test_a_rollout_that_is_continued_does_not_call_again() -> None:
    """B166: the result is noted, whatever happens to the process."""
    recorder = Kept()
    first = session_of(said(call(2, 3)), said("6"), recorder=recorder)
    await play(first)
    cut = next(index for index, piece in enumerate(recorder.pieces) if isinstance(piece, Noted)) + 1
    again = session_of(said("6"), restored=recorder.pieces[:cut])
    calculator = await play(again)
    assert calculator.asked == []
    assert text_of(again) == text_of(first)
    assert again.trajectory().counts == first.trajectory().counts


async def test_a_rollout_that_is_cancelled_leaves_its_tool() -> None:
    """B166: on a hard abort the tool is cancelled."""
    began, cancelled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def slow() -> None:
        loop.call_soon_threadsafe(began.set)
        try:
            await asyncio.Event().wait()
        finally:
            loop.call_soon_threadsafe(cancelled.set)

    settings = ToolSettings()
    box = ToolBox(settings, [FunctionTool(slow)])
    session = session_of(said('<tool_call>{"name": "slow", "arguments": {}}</tool_call>'))
    playing = asyncio.create_task(ToolCalling(box, settings).run(TASK, session))
    async with asyncio.timeout(20):
        await began.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await cancelled.wait()
    await box.close()


async def test_one_rollout_that_fails_leaves_the_others_alone() -> None:
    """B160"""
    settings = ToolSettings(timeout_s=20.0)

    def multiply(a: int, b: int) -> int:
        if a == 350:
            raise MemoryError("no memory")
        return a * b

    box = ToolBox(settings, [FunctionTool(multiply)])
    loop = ToolCalling(box, settings)
    sessions = [session_of(said(call(index, 1)), said("6")) for index in range(40)]
    broken = session_of(said(call(350, 1)), RuntimeError("the engine's answer is odd"))
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(loop.run(TASK, one) for one in [*sessions, broken]), return_exceptions=True)
    await box.close()
    assert [repr(one) for one in results if one is not None] == ['RuntimeError("the engine\'s answer is odd")']
    assert all(session.trajectory().counts["tool_calls_returned"] == 1 for session in sessions)


def test_without_tools_the_loop_is_not_made() -> None:
    """B165"""
    with pytest.raises(ToolError, match=r"tools\.sources: got none"):
        load_agent_loop("tool_calling", LoopSetup(tools=ToolSettings(), environment=None))
