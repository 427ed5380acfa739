"""Child processes and what they leave: real processes, real files."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from console.children import Child, StopTimes, all_exited, stop
from console.leftovers import MARK, Traces, adopting_orphans
from tests.fakes.living import is_alive

TIMES = StopTimes(drain_s=5.0, insist_s=0.3, kill_s=5.0)
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    value = secrets.token_hex(8)
    yield value
    for pid in Traces(value, Path("/nowhere")).processes():
        os.kill(pid, signal.SIGKILL)


def _child(code: str, log: Path, mark: str, name: str = "x") -> Child:
    return Child(name, [sys.executable, "-c", textwrap.dedent(code)], log_path=log, environment={**os.environ, MARK: mark})


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


async def _until(text: str, log: Path) -> None:
    async with asyncio.timeout(30):
        while text not in _read(log):  # noqa: ASYNC110 - a file tells nobody that it was written
            await asyncio.sleep(0.02)


async def test_a_child_writes_to_its_log_and_leads_its_own_group(tmp_path: Path, mark: str) -> None:
    child = _child("import os; print(os.getpgrp() == os.getpid())", tmp_path / "logs" / "x.log", mark)
    assert await child.wait() == 0
    assert child.exit_code == 0
    assert child.log_path.read_text().strip() == "True"


async def test_stop_ends_a_polite_child_with_sigterm(tmp_path: Path, mark: str) -> None:
    child = _child("print('ready', flush=True); import time; time.sleep(600)", tmp_path / "x.log", mark)
    await _until("ready", child.log_path)
    await stop([child], TIMES, at_once=asyncio.Event())
    assert child.exit_code == -signal.SIGTERM


async def test_stop_kills_a_child_that_ignores_sigterm(tmp_path: Path, mark: str) -> None:
    child = _child(STUBBORN, tmp_path / "x.log", mark)
    await _until("ready", child.log_path)
    await stop([child], StopTimes(drain_s=0.3, insist_s=0.3, kill_s=10.0), at_once=asyncio.Event())
    assert child.exit_code == -signal.SIGKILL
    assert child.log_path.read_text().count("no") == 2


async def test_a_second_wish_to_stop_kills_without_waiting(tmp_path: Path, mark: str) -> None:
    child = _child(STUBBORN, tmp_path / "x.log", mark)
    await _until("ready", child.log_path)
    at_once = asyncio.Event()
    stopping = asyncio.create_task(stop([child], StopTimes(drain_s=600, insist_s=600, kill_s=30.0), at_once=at_once))
    await _until("no", child.log_path)
    at_once.set()
    async with asyncio.timeout(30):
        await stopping
    assert child.exit_code == -signal.SIGKILL


async def test_all_exited_waits_for_every_child(tmp_path: Path, mark: str) -> None:
    children = [_child("pass", tmp_path / "a.log", mark), _child("raise SystemExit(3)", tmp_path / "b.log", mark)]
    async with asyncio.timeout(30):
        await all_exited(children)
    assert [child.exit_code for child in children] == [0, 3]


def test_children_end_when_their_parent_is_killed(tmp_path: Path, mark: str) -> None:
    parent = """
        import asyncio, os, sys
        from pathlib import Path
        from console.children import Child

        async def main():
            child = Child("x", [sys.executable, "-c", "import time; time.sleep(600)"],
                          log_path=Path(sys.argv[1]), environment=dict(os.environ))
            print(child.pid, flush=True)
            await child.wait()

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent), str(tmp_path / "x.log")],
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([child], timeout=30)
    assert not is_alive(child)


async def test_processes_that_left_group_and_session_are_found_and_ended(tmp_path: Path, mark: str) -> None:
    code = """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    """
    with adopting_orphans():
        child = _child(code, tmp_path / "x.log", mark)
        await child.wait()
        traces = Traces(mark, tmp_path / "sockets")
        orphans = traces.processes()
        assert len(orphans) == 1
        cleared = await traces.clear(patience_s=0.1, kill_s=30.0)
    assert len(cleared.removed) == 1
    assert cleared.left == ()
    assert not any(is_alive(pid) for pid in orphans)


async def test_sockets_and_segments_of_a_killed_process_are_removed(tmp_path: Path, mark: str) -> None:
    segment = Path("/dev/shm") / f"headrace-test-{mark}"
    sockets = tmp_path / "s"
    sockets.mkdir()
    code = f"""
        import mmap, os, socket, time
        file = open({str(segment)!r}, "w+b"); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096); file.close()
        a = socket.socket(socket.AF_UNIX); a.bind({str(sockets / "bus")!r}); a.listen()
        b = socket.socket(socket.AF_UNIX); b.bind({str(tmp_path / "elsewhere")!r}); b.listen()
        print("ready", flush=True); time.sleep(600)
    """
    child = _child(code, tmp_path / "x.log", mark)
    await _until("ready", child.log_path)
    traces = Traces(mark, sockets)
    traces.observe()
    child.signal_group(signal.SIGKILL)
    await child.wait()
    cleared = await traces.clear(patience_s=5.0)
    assert sorted(cleared.removed) == sorted(f"file {path}" for path in (segment, sockets / "bus", tmp_path / "elsewhere"))
    assert not any(path.exists() for path in (segment, sockets, tmp_path / "elsewhere"))


async def test_what_belongs_to_others_is_left_alone(tmp_path: Path, mark: str) -> None:
    segment = Path("/dev/shm") / f"headrace-test-{mark}"
    segment.write_bytes(b"x")
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "other"))
            other.listen()
            traces = Traces(mark, tmp_path / "sockets")
            traces.observe()
            assert await traces.clear(patience_s=0.1) is not None
            assert segment.exists()
            assert (tmp_path / "other").exists()
    finally:
        segment.unlink()
