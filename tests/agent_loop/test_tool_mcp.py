"""Tools of MCP servers: what a server was asked when it was lost is made again, never an observation."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.tool_formats import Call
from agent_loop.toolbox import Outcome, Result, ToolBox
from configs.schema import ToolSettings
from tests.agent_loop.scripted import Letters
from tests.fakes.living import living_children

SERVER = """
import asyncio, os
from mcp.server import MCPServer
server = MCPServer("test")

@server.tool()
def double(n: int) -> str:
    "Twice as much."
    return str(2 * n)

@server.tool()
async def slow(path: str) -> str:
    "Waits until the file is there."
    while not os.path.exists(path):
        await asyncio.sleep(0.02)
    return "waited"

@server.tool()
async def hang() -> str:
    await asyncio.sleep(600)
    return ""

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

@server.tool()
def die() -> str:
    os._exit(3)

server.run("stdio")
"""


@asynccontextmanager
async def opened(tmp_path: Path, **settings: Any) -> AsyncIterator[ToolBox]:
    (tmp_path / "server.py").write_text(SERVER)
    box = ToolBox(ToolSettings(sources=(f"mcp:{sys.executable} {tmp_path / 'server.py'}",), **settings))
    await box.open()
    try:
        yield box
    finally:
        await box.close()
        for process in servers_of(tmp_path):
            process.kill()


async def ask(box: ToolBox, name: str, **arguments: Any) -> Result:
    (result,) = await box.make(
        [Call(name=name, arguments=arguments)], calls_left=9, rollout_id="r.0", tools_kwargs={}, codec=Letters()
    )
    return result


def servers_of(tmp_path: Path) -> list[psutil.Process]:
    """Those that run."""
    return living_children(str(tmp_path))


async def test_the_tools_of_an_mcp_server_are_called(tmp_path: Path) -> None:
    async with opened(tmp_path, timeout_s=3.0) as box:
        assert box.names == ["die", "double", "fail", "hang", "slow"]
        assert (await ask(box, "double", n=21)).text == "42"
        assert (await ask(box, "fail")).outcome is Outcome.RAISED
        hung, beside = await asyncio.gather(ask(box, "hang"), ask(box, "double", n=4))
        assert (hung.outcome, beside.text) == (Outcome.TIMED_OUT, "8")
        assert (await ask(box, "double", n="x")).outcome is Outcome.MALFORMED
        assert len(servers_of(tmp_path)) == 1, "one that is slow is not taken for lost"
    assert not servers_of(tmp_path)


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_server_that_was_killed_is_started_again_and_asked_again(tmp_path: Path, is_asked: bool) -> None:
    go_on = tmp_path / "go on"
    async with opened(tmp_path) as box:
        under_way = [asyncio.create_task(ask(box, "slow", path=str(go_on))) for _ in range(4 if is_asked else 0)]
        await asyncio.sleep(0.3)
        for process in servers_of(tmp_path):
            process.kill()
            process.wait(10)
        go_on.touch()
        assert {(await one).text for one in under_way} <= {"waited"}
        assert (await ask(box, "double", n=2)).text == "4"
        assert len(servers_of(tmp_path)) == 1


async def test_a_call_that_kills_its_server_is_unavailable_and_others_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path, retries=1) as box:
        with pytest.raises(ToolUnavailable, match="tool die was unavailable 2 times: MCP server"):
            await ask(box, "die")
        assert (await ask(box, "double", n=2)).text == "4"


async def test_a_server_that_was_stopped_is_given_up_and_started_again(tmp_path: Path) -> None:
    """B161: its silence is no observation."""
    async with opened(tmp_path, timeout_s=4.0, retries=9) as box:
        (stopped,) = servers_of(tmp_path)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert (await ask(box, "double", n=2)).text == "4"
        stopped.wait(20)


async def test_an_mcp_server_that_does_not_start_is_named() -> None:
    box = ToolBox(ToolSettings(sources=(f"mcp:{sys.executable} -c pass",), start_timeout_s=10.0))
    with pytest.raises(ToolError, match=r"MCP server .* cannot be used"):
        await box.open()
    await box.close()
