"""A server process that does not come up, or is left alone: the reason is told, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import pytest

from configs.schema import EngineSettings
from rollouter.engine_command import EngineShare
from rollouter.engine_errors import EngineStartError
from rollouter.vllm_server import VllmServer
from tests.fakes.living import is_alive

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0

pytestmark = [pytest.mark.integration]


def server_in(directory: Path, **changes: object) -> VllmServer:
    settings = EngineSettings.model_validate({"kv_cache_bytes": 64 << 20, "max_model_len": 64, **changes})
    share = EngineShare(cores=(min(os.sched_getaffinity(0)),), gpus=None)
    return VllmServer("engine-0", settings, socket=directory / "e", log_file=directory / "logs" / "e.log", share=share)


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while is_alive(pid):  # noqa: ASYNC110 - a process of someone else's
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_model_that_is_not_there_is_named_and_the_process_is_gone(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    await server.launch()
    assert server.pid is not None
    with pytest.raises(EngineStartError, match=r"engine-0 ended while starting .*no-such-model"):
        await server.serve(str(tmp_path / "no-such-model"), "float32")
    await until_gone(server.pid)
    await server.stop()
    assert not server.socket.exists()


async def test_a_server_that_takes_too_long_is_ended_at_the_deadline(tmp_path: Path) -> None:
    """B25: the message says what it did last and where its log is."""
    server = server_in(tmp_path, start_timeout_s=0.2)
    with pytest.raises(EngineStartError, match=r"within engine\.start_timeout_s=0\.2 s; last line of .*e\.log"):
        await server.serve("/model", "float32")
    assert server.pid is not None
    await until_gone(server.pid)


async def test_a_stopped_server_leaves_neither_process_nor_socket(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    await server.launch()
    pid = server.pid
    assert pid is not None
    await server.launch()
    assert server.pid == pid
    (tmp_path / "e.d" / "left-by-vllm").touch()
    await server.stop()
    assert not is_alive(pid)
    assert not server.socket.exists()
    assert not (tmp_path / "e.d").exists()


async def test_a_killed_server_reports_its_end(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    await server.launch()
    server.kill()
    async with asyncio.timeout(WAIT_S):
        assert await server.wait_ended() == -9


async def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its starter is killed with -9 and can end nothing itself."""
    script = f"""
        import asyncio, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from tests.rollouter.test_vllm_server import server_in

        async def main():
            server = server_in(Path({str(tmp_path)!r}))
            await server.launch()
            print(server.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        pid = await first_number(starter)
        assert is_alive(pid)
        await asyncio.sleep(1.0)  # until it has asked the kernel to end with its starter
        starter.kill()
        await until_gone(pid)
    finally:
        if starter.returncode is None:
            starter.kill()
        await starter.wait()


async def first_number(process: asyncio.subprocess.Process) -> int:
    """The first line that is a number; log lines come before it."""
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        async for line in process.stdout:
            if line.strip().isdigit():
                return int(line)
    raise AssertionError("the starter ended without a number")
