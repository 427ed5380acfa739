"""Calls end by their deadline with words for the model, whatever the tool does."""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent_loop import side_loop
from agent_loop.errors import ToolError, ToolLost, ToolUnavailable
from agent_loop.tool_formats import Call, Malformed
from agent_loop.tool_text import cut
from agent_loop.toolbox import Outcome, Result, ToolBox, load_tools, usable
from agent_loop.tools import FunctionTool, ToolContext
from configs.schema import ToolSettings
from tests.agent_loop.scripted import Letters


def add(a: int, b: int = 2, *, context: ToolContext) -> str:
    """Adds.

    Args:
        a: the first number
        b (int): the second one
    """
    return f"{a + b} for {context.rollout_id}, {dict(context.kwargs)}"


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def sleep_for_ever() -> None:
    threading.Event().wait()


async def block_the_loop() -> None:
    time.sleep(3)  # noqa: ASYNC251 - the point


async def ignore_cancellation() -> None:
    for _ in range(3):
        try:
            await asyncio.sleep(2)
        except asyncio.CancelledError:
            continue


def spin() -> None:
    until = time.monotonic() + 3
    while time.monotonic() < until:
        pass


def leave() -> None:
    raise SystemExit(3)


def stumble() -> None:
    raise ValueError("no such row")


def data() -> dict[str, Any]:
    return {"rows": [1, 2]}


def context_of(tools: list[Callable[..., Any]], **changes: Any) -> Any:
    @asynccontextmanager
    async def opened() -> AsyncIterator[ToolBox]:
        box = ToolBox(ToolSettings(**changes), [FunctionTool(tool) for tool in tools])
        await box.open()
        try:
            yield box
        finally:
            await box.close()

    return opened()


async def make(
    box: ToolBox, *calls: Call | Malformed, calls_left: int = 99, kwargs: Mapping[str, Any] | None = None
) -> list[Result]:
    return await box.make(calls, calls_left=calls_left, rollout_id="r.0", tools_kwargs=kwargs or {}, codec=Letters())


def call(name: str, **arguments: Any) -> Call:
    return Call(name=name, arguments=arguments)


def test_the_schema_comes_from_type_hints_and_docstring() -> None:
    def search(query: str, kind: Literal["web", "news"] = "web", sites: list[str] | None = None) -> str:
        """Looks things up.

        Args:
            query: what to look for
        """
        return query + kind + str(sites)

    tool = FunctionTool(search)
    assert (tool.name, tool.description) == ("search", "Looks things up.")
    schema = tool.parameters
    assert schema["required"] == ["query"]
    assert schema["properties"]["query"] == {"type": "string", "description": "what to look for"}
    assert schema["properties"]["kind"]["enum"] == ["web", "news"]
    assert schema["additionalProperties"] is False
    assert set(FunctionTool(add).parameters["properties"]) == {"a", "b"}


class Size(enum.Enum):
    SMALL = "s"


class Place(pydantic.BaseModel):
    city: str
    size: Size = Size.SMALL


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@traced
async def find(query: str) -> str:
    return f"found {query}"


class Search:
    """Looks things up."""

    async def __call__(self, query: str, *, context: ToolContext) -> str:
        return f"found {query}"

    def again(self, query: str) -> str:
        return f"found {query}"


def rows(query: str) -> Iterator[str]:
    yield f"found {query}"
    yield "more"


async def lines(query: str) -> AsyncIterator[str]:
    yield f"found {query}"


def twice(query: str, times: int) -> str:
    return f"found {query}" * times


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        (find, "find", "found x"),
        (Search(), "Search", "found x"),
        (Search().again, "again", "found x"),
        (functools.partial(twice, times=1), "twice", "found x"),
        (rows, "rows", '["found x","more"]'),
        (lines, "lines", '["found x"]'),
    ],
)
async def test_a_tool_is_called_in_whatever_dress_it_comes(function: Callable[..., Any], name: str, text: str) -> None:
    async with context_of([function]) as box:
        (result,) = await make(box, call(name, query="x"))
    assert (result.outcome, result.text) == (Outcome.RETURNED, text)


async def test_arguments_have_the_types_of_their_hints() -> None:
    def tell(size: Size, place: Place, day: datetime.date, many: tuple[int, ...], few: set[str]) -> str:
        return f"{size.name} {place.city} {place.size.name} {day.year} {many} {few}"

    async with context_of([tell]) as box:
        arguments = {"size": "s", "place": {"city": "Bern"}, "day": "2024-01-02", "many": [1, 2], "few": ["a"]}
        fits, fits_not = await make(
            box, call("tell", **{**arguments, "few": ["a"]}), call("tell", **{**arguments, "size": "x"})
        )
    assert fits.text == "SMALL Bern SMALL 2024 (1, 2) {'a'}"
    assert fits_not.outcome is Outcome.MALFORMED


def test_a_function_that_cannot_be_told_to_a_model_is_refused() -> None:
    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        del a

    def star(*many: int) -> None:
        return None

    for function, words in ((untyped, "has no type hint"), (star, "expected ones that can be given by name")):
        with pytest.raises(ToolError, match=words):
            FunctionTool(function)


async def test_results_come_in_the_order_of_the_calls() -> None:
    async with context_of([add, data]) as box:
        results = await make(box, call("add", a=1), call("data"), call("add", a=5, b=5), kwargs={"add": {"unit": "m"}})
    assert [result.text for result in results] == [
        "3 for r.0, {'unit': 'm'}",
        '{"rows":[1,2]}',
        "10 for r.0, {'unit': 'm'}",
    ]
    assert {result.outcome for result in results} == {Outcome.RETURNED}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (call("Add", a=1), "got the tool name 'Add', expected one of add, stumble"),
        (call("add_numbers", a=1), "got the tool name 'add_numbers'"),
        (call("add", a="one"), "the arguments of add['a'] do not fit: 'one' is not of type 'integer'"),
        (call("add"), "'a' is a required property"),
        (call("add", a=1, c=2), "'c' was unexpected"),
        (call("add", a=1, context={}), "'context' was unexpected"),
        (Malformed(why="got x, expected y"), "got x, expected y"),
    ],
)
async def test_a_call_that_cannot_be_made_is_answered_with_words(made: Call | Malformed, words: str) -> None:
    """B157, B158"""
    async with context_of([add, stumble]) as box:
        (result,) = await make(box, made)
    assert result.outcome is Outcome.MALFORMED
    assert words in result.text
    assert box.parse_error_rate == 1.0


async def test_what_a_tool_raises_is_shown_and_ends_nothing() -> None:
    async with context_of([stumble, leave, add]) as box:
        results = await make(box, call("stumble"), call("leave"), call("add", a=1))
    assert [result.outcome for result in results] == [Outcome.RAISED, Outcome.RAISED, Outcome.RETURNED]
    assert results[0].text == "Error: ValueError: no such row"


@pytest.mark.parametrize("tool", [wait_for_ever, sleep_for_ever, ignore_cancellation, spin, block_the_loop])
async def test_a_tool_that_hangs_is_left_at_the_deadline_and_others_go_on(tool: Callable[..., Any]) -> None:
    """B161, B162"""
    async with context_of([tool, add], timeout_s=0.3) as box:
        began = time.monotonic()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        (hung,) = await make(box, call(tool.__name__))
        assert time.monotonic() - began < 10
        (fine,) = await make(box, call("add", a=1))
        ticking.cancel()
    assert (hung.outcome, hung.text) == (Outcome.TIMED_OUT, f"Error: {tool.__name__} gave no result within 0.3 s.")
    assert fine.outcome is Outcome.RETURNED
    assert ticks > 5


class Overdue(BaseException):
    """No Exception, as the deadlines of gevent and func_timeout are."""


@pytest.mark.parametrize(
    "error",
    [Overdue("x"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseExceptionGroup("g", [Overdue()])],
)
async def test_what_is_no_exception_is_shown_as_one(error: BaseException) -> None:
    def blocking() -> None:
        raise error

    async def waiting() -> None:
        raise error

    async with context_of([blocking, waiting]) as box:
        results = await make(box, call("blocking"), call("waiting"))
    assert [result.outcome for result in results] == [Outcome.RAISED] * 2


async def test_an_error_whose_words_raise_is_shown_by_its_name() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    def mute() -> None:
        raise Mute

    async with context_of([mute]) as box:
        (result,) = await make(box, call("mute"))
    assert (result.outcome, result.text) == (Outcome.RAISED, "Error: Mute: its words raise KeyError")


async def leave_in_a_task() -> None:
    await asyncio.gather(leave_at_once(), asyncio.sleep(0.1))


async def leave_at_once() -> None:
    raise SystemExit(3)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("tool", [leave_in_a_task, stop_the_loop])
async def test_a_tool_that_would_end_its_event_loop_leaves_the_others_working(tool: Callable[..., Any]) -> None:
    async def slow() -> str:
        await asyncio.sleep(0.2)
        return "fine"

    async with context_of([tool, slow]) as box:
        under_way = asyncio.create_task(make(box, call("slow")))
        await asyncio.sleep(0.05)
        await make(box, call(tool.__name__))
        texts = [(await make(box, call("slow")))[0].text, (await under_way)[0].text]
    assert texts == ["fine", "fine"]


async def test_a_tool_that_blocks_its_event_loop_spoils_no_call_of_others() -> None:
    release = threading.Event()
    num_asked = 0

    async def block() -> None:
        release.wait(20)

    async def good() -> str:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.1)
        return "fine"

    async with context_of([block, good], timeout_s=1.5) as box:
        before = asyncio.create_task(make(box, call("good")))
        await asyncio.sleep(0.05)
        blocking = asyncio.create_task(make(box, call("block")))
        await asyncio.sleep(0.05)
        during = asyncio.create_task(make(box, call("good")))
        (blocked,) = await blocking
        results = [(await before)[0], (await during)[0]]
        release.set()
    assert blocked.outcome is Outcome.TIMED_OUT
    assert [result.text for result in results] == ["fine", "fine"]
    assert num_asked == 3, "the one that had begun is made again; the other had not"


async def test_calls_that_hang_are_bounded_in_number_and_end_no_other_tool() -> None:
    """B161: their threads cannot be ended."""
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return "late"

    async with context_of([hang, add], timeout_s=0.05, max_concurrent=3, retries=0) as box:
        before = threading.active_count()
        assert [(await make(box, call("hang")))[0].outcome for _ in range(3)] == [Outcome.TIMED_OUT] * 3
        with pytest.raises(ToolUnavailable, match="tool hang: 3 calls of it were given up and do not end"):
            await make(box, call("hang"))
        assert threading.active_count() - before <= 4
        assert (await make(box, call("add", a=1)))[0].outcome is Outcome.RETURNED
        release.set()
        for thread in threading.enumerate():
            if thread.name == "tool-hang":
                await asyncio.to_thread(thread.join, 20)
        assert (await make(box, call("hang")))[0].text == "late"


async def test_caps_refuse_the_calls_beyond_them() -> None:
    async with context_of([add], max_calls_per_turn=2) as box:
        results = await make(box, *(call("add", a=1) for _ in range(4)))
        left = await make(box, *(call("add", a=1) for _ in range(3)), calls_left=1)
    assert [result.outcome for result in results] == [Outcome.RETURNED] * 2 + [Outcome.REFUSED] * 2
    assert [result.outcome for result in left] == [Outcome.RETURNED] + [Outcome.REFUSED] * 2


async def test_no_more_calls_run_at_once_than_allowed() -> None:
    running = most = 0

    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    async with context_of([count], max_concurrent=3, max_calls_per_turn=20) as box:
        await make(box, *(call("count") for _ in range(12)))
    assert most == 3


async def test_an_unavailable_tool_is_tried_again_and_then_fails_the_rollout() -> None:
    """An infrastructure failure is neither an observation nor a reward."""
    asked = 0

    def flaky(times: int) -> str:
        nonlocal asked
        asked += 1
        if asked <= times:
            raise ToolUnavailable("backend down")
        return "up"

    async with context_of([flaky], retries=1) as box:
        (result,) = await make(box, call("flaky", times=1))
        assert result.text == "up"
        asked = 0
        with pytest.raises(ToolUnavailable, match="tool flaky was unavailable 2 times: backend down"):
            await make(box, call("flaky", times=9))


async def test_many_malformed_calls_raise_an_alarm_once(caplog: pytest.LogCaptureFixture) -> None:
    """B158"""
    import structlog

    async with context_of([add], parse_error_alert=0.3) as box:
        with structlog.testing.capture_logs() as logs:
            for _ in range(60):
                await make(box, Malformed(why="x"))
    assert [entry["event"] for entry in logs].count("many tool calls are malformed") == 1


@given(st.text(max_size=400), st.integers(1, 60))
def test_an_output_is_cut_by_tokens_and_never_within_a_character(text: str, limit: int) -> None:
    """B65: characters of four bytes, a token each byte."""

    class Bytes(Letters):
        def encode(self, text: str) -> list[int]:
            return list(text.encode(errors="surrogatepass"))

    shown = cut(text, limit, Bytes())
    assert len(shown.encode()) <= limit
    assert shown == text or text.startswith(shown.removesuffix("\n[cut]"))
    assert (shown == text) == (len(text.encode()) <= limit)


def test_sources_that_are_not_there_are_named() -> None:
    for path, words in (
        ("pythonn", "expected `python`, `sandbox`, `mcp:…` or `module:name`"),
        ("no.such.module:x", "does not import"),
        ("tests.agent_loop.test_toolbox:missing", "does not import"),
        ("tests.agent_loop.test_toolbox:F", "does not import"),
        ("tests.agent_loop.scripted:Letters", "got type at"),
    ):
        with pytest.raises(ToolError, match=words):
            load_tools(path)
    assert [tool.name for tool in load_tools("tests.agent_loop.test_toolbox:data")] == ["data"]


async def test_two_tools_of_one_name_are_refused() -> None:
    box = ToolBox(ToolSettings(sources=("python",)), [FunctionTool(add)])
    await box.open()
    with pytest.raises(ToolError, match="two tools with the name 'python'"):
        await box.open()


async def python(code: str, **changes: Any) -> Result:
    async with context_of([], sources=("python",), **changes) as box:
        (result,) = await make(box, call("python", code=code))
    return result


async def test_python_prints_what_it_prints() -> None:
    assert (await python("print(6 * 7)")).text == "42\n"
    assert "ZeroDivisionError" in (await python("1 / 0")).text


async def test_python_that_hangs_or_forks_is_killed_with_its_children(tmp_path: Path) -> None:
    """B161: a child that keeps the output open."""
    sign = tmp_path / "alive"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    time.sleep(4); open({str(sign)!r}, 'w').write('x')\n"
        "else:\n    print('parent', flush=True); time.sleep(60)\n"
    )
    result = await python(code, timeout_s=1.0)
    # on a busy machine the call's own deadline may come first
    assert result.text in ("parent\n\nkilled after 1 s", "Error: python gave no result within 1 s.")
    quick = await python("import os, time\nif os.fork() == 0:\n    time.sleep(4)\nelse:\n    print('done')", timeout_s=2.0)
    assert quick.text.startswith("done")
    await asyncio.sleep(0.1)
    assert not sign.exists()


async def test_python_has_limits_of_memory_and_output() -> None:
    assert "MemoryError" in (await python("x = bytearray(1 << 30)", python_memory_bytes=256 << 20)).text
    result = await python("print('x' * 10_000_000)", max_output_tokens=100)
    assert result.text == "x" * 94 + "\n[cut]"


async def sandbox(handler: Callable[[web.Request], Any], **changes: Any) -> Result:
    app = web.Application()
    app.router.add_post("/run_code", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with context_of([], sources=("sandbox",), sandbox_url=f"http://{host}:{port}", **changes) as box:
            (result,) = await make(box, call("python", code="print(1)"))
            return result
    finally:
        await runner.cleanup()


async def test_a_sandbox_runs_the_code() -> None:
    async def run(request: web.Request) -> web.Response:
        body = await request.json()
        assert (body["code"], body["language"]) == ("print(1)", "python")
        result = {"status": "Finished", "stdout": "1\n", "stderr": "", "return_code": 0}
        return web.json_response({"status": "Success", "run_result": result})

    assert (await sandbox(run)).text == "1\n"


async def test_a_sandbox_that_is_down_fails_the_rollout() -> None:
    async def down(request: web.Request) -> web.Response:
        return web.Response(status=503, text="full")

    with pytest.raises(ToolUnavailable, match="got status 503, expected 200: full"):
        await sandbox(down, retries=1)


class FromServer:
    """`Tool`, as an MCP server's."""

    description = ""

    def __init__(self, name: str, **properties: Any) -> None:
        self.name = name
        self.parameters = {"type": "object", "properties": properties}

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        return "done"


def test_a_servers_tool_whose_arguments_cannot_be_checked_is_left_out() -> None:
    odd, fine = FromServer("odd", a={"type": "strin"}), FromServer("fine", a={"type": "string"})
    assert usable([odd, fine], "x") == [fine]
    with pytest.raises(ToolError, match=r"MCP server x offers no tool that can be used: tool odd: its schema"):
        usable([odd], "x")
    with pytest.raises(ToolError, match="tool odd: its schema"):
        ToolBox(ToolSettings(), [odd])


async def test_arguments_that_take_long_to_be_checked_are_checked_beside_the_rollouts() -> None:
    tool = FromServer("find", text={"type": "string", "pattern": "^(a+)+$"})
    box = ToolBox(ToolSettings(), [tool])
    results = await make(box, call("find", text="a" * 60 + "b"), call("find", text="aa"))
    await box.close()
    assert [result.outcome for result in results] == [Outcome.MALFORMED, Outcome.RETURNED]
    assert "do not fit" in results[0].text


async def test_what_makes_text_of_a_result_is_called_beside_the_rollouts() -> None:
    where: list[str] = []

    class Slow:
        def __str__(self) -> str:
            where.append(threading.current_thread().name)
            return "slow"

    class Broken(Exception):
        def __str__(self) -> str:
            where.append(threading.current_thread().name)
            return "broken"

    def give() -> Slow:
        return Slow()

    def fall() -> None:
        raise Broken

    async with context_of([give, fall]) as box:
        results = await make(box, call("give"), call("fall"))
    assert [result.text for result in results] == ["slow", "Error: Broken: broken"]
    assert sorted(set(where)) == ["text-give", "words-fall"]


async def test_a_tool_that_hangs_in_every_place_for_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """B161, B168."""
    monkeypatch.setattr(side_loop, "_LOST_AFTER_S", 0.2)
    release = threading.Event()

    def hang() -> str:
        release.wait(60)
        return "late"

    async with context_of([hang], timeout_s=0.05, max_concurrent=2, retries=0) as box:
        for _ in range(2):
            await make(box, call("hang"))
        with pytest.raises(ToolUnavailable) as first:
            await make(box, call("hang"))
        assert not isinstance(first.value, ToolLost)
        await asyncio.sleep(0.3)
        with pytest.raises(ToolLost, match="2 calls of it were given up and do not end"):
            await make(box, call("hang"))
        release.set()
