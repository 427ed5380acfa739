"""The `python` tool leaves nothing behind, however its program ends."""

from __future__ import annotations

import asyncio
import os
import sys

import psutil
import pytest

from agent_loop.tool_python import PythonTool
from agent_loop.tools import ToolContext


async def python(code: str, *, timeout_s: float) -> str:
    return await PythonTool(timeout_s=timeout_s, memory_bytes=1 << 30).call({"code": code}, ToolContext(rollout_id="r.0"))


def that_run(mark: str) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline", "status"])
    return [
        one for one in processes if mark in " ".join(one.info["cmdline"] or []) and one.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("ends", ["by itself", "by a signal", "at the deadline"])
async def test_python_leaves_no_process_in_whatever_session_it_started_it(ends: str) -> None:
    """B161: they hold its output open, too."""
    mark = f"61.{os.getpid()}{len(ends)}"
    code = (
        "import os, subprocess, time\n"
        f"for _ in range(3): subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
        f"subprocess.Popen(['sh', '-c', 'sleep {mark} & sleep {mark}'], start_new_session=True)\n"
        "print('done', flush=True)\n"
    )
    code += {"by itself": "", "by a signal": "os.kill(os.getpid(), 6)", "at the deadline": "time.sleep(60)"}[ends]
    text = await python(code, timeout_s=3.0 if ends == "at the deadline" else 30.0)
    left = that_run(mark)
    for process in left:
        process.kill()
    assert not left
    assert text.startswith("done")
    assert ("killed after 3 s" in text) == (ends == "at the deadline")
    assert ("killed by signal 6" in text) == (ends == "by a signal")


_DIES = """
import asyncio, os, signal, sys
from agent_loop.tool_python import PythonTool
from agent_loop.tools import ToolContext

async def main():
    code = f"import subprocess; subprocess.run(['sleep', {sys.argv[1]!r}], start_new_session=True)"
    await PythonTool(timeout_s=60, memory_bytes=1 << 30).call({"code": code}, ToolContext(rollout_id="r"))

asyncio.run(main())
"""


async def test_python_does_not_outlive_the_process_that_asked_for_it() -> None:
    mark = f"62.{os.getpid()}"
    asking = await asyncio.create_subprocess_exec(sys.executable, "-c", _DIES, mark)
    try:
        async with asyncio.timeout(60):
            while not [one for one in that_run(mark) if one.name() == "sleep"]:  # noqa: ASYNC110 - another's child
                await asyncio.sleep(0.05)
            asking.kill()
            await asking.wait()
            while that_run(mark):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        for process in that_run(mark):
            process.kill()
