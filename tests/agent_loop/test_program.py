"""Programs as agents: an unmodified `openai` client in a process of its own, and every way in which it may end."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop.engine import Generation
from agent_loop.errors import EngineUnavailable, LoopError, Unscored
from agent_loop.loop import LoopSetup, load_agent_loop
from agent_loop.session import Session
from configs.schema import GatewaySettings, ToolSettings
from tests.agent_loop.test_tool_calling import TASK, said, session_of

AGENT = """
import json, os
from openai import OpenAI
task = json.loads(os.environ["HEADRACE_TASK"])
answer = OpenAI(max_retries=0).chat.completions.create(model="policy", messages=task["messages"])
"""


async def play(code: str, *turns: Generation | Exception, timeout_s: float = 60, **settings: Any) -> Session:
    session = session_of(*turns)
    command = (sys.executable, "-c", textwrap.dedent(code))
    setup = LoopSetup(tools=ToolSettings(), environment=None, gateway=GatewaySettings(command=command, **settings))
    loop: Any = load_agent_loop("program", setup)
    await loop.open()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.run(TASK, session)
    finally:
        await loop.close()
    return session


async def test_a_program_plays_the_rollout_and_prints_its_reward() -> None:
    code = AGENT + """print(json.dumps({"reward": float(answer.choices[0].message.content == task["ground_truth"])}))"""
    session = await play(code, said("6"), reward="last_line")
    got = session.trajectory()
    assert (got.reward, got.num_turns) == (1.0, 1)


async def test_without_a_reward_of_its_own_the_reward_function_is_asked() -> None:
    assert (await play(AGENT, said("6"))).trajectory().reward is None


async def test_a_program_that_leaves_no_reward_is_unscored() -> None:
    with pytest.raises(Unscored):
        await play("print('hello')", reward="last_line")
    with pytest.raises(Unscored):
        await play("pass", reward="posted")


async def test_a_program_that_fails_fails_its_rollout() -> None:
    with pytest.raises(LoopError, match="status 3: 'oh'"):
        await play("print('oh'); raise SystemExit(3)", reward="last_line")
    for name in ("program", "external"):
        setup = LoopSetup(
            tools=ToolSettings(), environment=None, gateway=GatewaySettings(command=("/no/such",)), run_dir=Path()
        )
        with pytest.raises(LoopError, match=r"gateway\.command: /no/such is no program"):
            load_agent_loop(name, setup)


async def test_an_engine_that_fails_is_what_the_rollout_fails_of() -> None:
    with pytest.raises(EngineUnavailable):
        await play(AGENT, EngineUnavailable("gone"))


async def test_a_program_that_hangs_is_killed_with_its_children() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '86437']); time.sleep(86437)"
    with pytest.raises(TimeoutError):
        await play(code, timeout_s=2)
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if "86437" in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_a_command_is_needed() -> None:
    with pytest.raises(LoopError, match=r"gateway\.command"):
        load_agent_loop("program")


async def test_a_task_that_no_variable_holds_comes_in_a_file() -> None:
    code = """
import json, os
task = json.load(open(os.environ["HEADRACE_TASK_FILE"]))
assert "HEADRACE_TASK" not in os.environ
print(len(task["messages"][0]["content"]) == 300_000)
print(1.0)
"""
    task = replace(TASK, messages=({"role": "user", "content": "x" * 300_000},))
    session = session_of(said("6"))
    setup = LoopSetup(
        tools=ToolSettings(),
        environment=None,
        gateway=GatewaySettings(command=("python", "-c", code), reward="last_line"),
    )
    loop: Any = load_agent_loop("program", setup)
    await loop.open()
    try:
        await loop.run(task, session)
    finally:
        await loop.close()
    assert session.reward == 1.0


async def test_nobody_waits_for_what_a_program_left_and_it_ends_too() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '86438'], start_new_session=True); print(1.0)"
    session = await play(code, reward="last_line", timeout_s=60)
    assert session.reward == 1.0
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if "86438" in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def test_what_stands_on_standard_error_is_no_reward_and_takes_none_away() -> None:
    code = "import sys; print(0.5, flush=True); print('Exception ignored in: <coroutine>', file=sys.stderr)"
    assert (await play(code, reward="last_line")).reward == 0.5
    with pytest.raises(LoopError, match="it hurts"):
        await play("import sys; print(0.5); print('it hurts', file=sys.stderr); raise SystemExit(1)")


async def test_a_proxy_of_the_host_does_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert (await play(AGENT + "print(1.0)", said("6"), reward="last_line")).reward == 1.0
