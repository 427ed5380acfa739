"""The daemons as child processes.

Invariant: each child leads a process group of its own, so that the terminal's Ctrl-C reaches only the console; each gets
SIGTERM from the kernel when the console dies; its output goes to a log file. `stop` returns with every child dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from configs.parent_death import die_with

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTimes:
    """How patient `stop` is, in seconds; the sum, with what the verification takes, stays below 10."""

    drain_s: float = 3.0
    """Between the first SIGTERM and the second."""
    insist_s: float = 1.5
    """Between the second SIGTERM and SIGKILL."""
    kill_s: float = 1.5
    """For the kernel to end killed processes."""


class Child:
    """One daemon process, started by the constructor."""

    def __init__(self, name: str, command: Sequence[str], *, log_path: Path, environment: Mapping[str, str]) -> None:
        """Call from the main thread of a running event loop: the kernel ties the child's life to the thread that made it."""
        self.name = name
        self.log_path = log_path
        self.started_at = time.time()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
                preexec_fn=die_with(os.getpid()),
            )
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._reap, name=f"wait-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Exit code, once it has ended."""
        return await asyncio.shield(self._exited)

    def signal_group(self, number: signal.Signals) -> None:
        """Send `number` to the child and what it started in its group; nothing if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _reap(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody asks any more
            self._loop.call_soon_threadsafe(self._exited.set_result, code)


async def stop(children: Sequence[Child], times: StopTimes, *, at_once: asyncio.Event) -> None:
    """End all children: SIGTERM (drain), SIGTERM again (stop now), SIGKILL. `at_once` skips to SIGKILL."""
    for number, patience in ((signal.SIGTERM, times.drain_s), (signal.SIGTERM, times.insist_s)):
        if at_once.is_set() or not _alive(children):
            break
        for child in _alive(children):
            log.info("stopping daemon", child=child.name, pid=child.pid, signal=number.name)
            child.signal_group(number)
        await _first_of(all_exited(children), at_once.wait(), timeout_s=patience)
    for child in _alive(children):
        log.warning("killing daemon", child=child.name, pid=child.pid)
        child.signal_group(signal.SIGKILL)
    await _first_of(all_exited(children), timeout_s=times.kill_s)


async def all_exited(children: Sequence[Child]) -> None:
    """Return once every child has ended."""
    for child in children:
        await child.wait()


def _alive(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if child.exit_code is None]


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
