"""Processes that stand for engines' workers in the benchmark of weight sync, and what a process can say about its memory.

Each process keeps a `Desk`: what the functions that it is told to run leave there for the next one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from weight_sync.staging import StagingArea

WAIT_S = 300.0
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Desk:
    """Of one receiving process."""

    index: int
    area: StagingArea | None = None
    destination: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Faulted in, as the parameters of a model are."""
    kept: dict[str, Any] = field(default_factory=dict)
    cpu_started: float = 0.0
    resident_started: int = 0


class Receivers:
    """So many processes; each runs one function at a time."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes

    def tell(self, index: int, function: Callable[Concatenate[Desk, P], R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let receiver `index` run `function`; `answer` brings the result."""
        self._pipes[index].send((function, args, kwargs))

    def answer(self, index: int) -> Any:
        """Raises RuntimeError with what the receiver raised."""
        if not self._pipes[index].poll(WAIT_S):
            raise TimeoutError(f"receiver {index} did not answer within {WAIT_S:g} s")
        result = self._pipes[index].recv()
        if isinstance(result, Exception):
            raise RuntimeError(f"receiver {index}: {result!r}") from result
        return result

    def all(self, num: int, function: Callable[Concatenate[Desk, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `function` in the first `num` receivers at once."""
        for index in range(num):
            self.tell(index, function, *args, **kwargs)
        return [self.answer(index) for index in range(num)]

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]


@contextmanager
def receivers(num: int) -> Iterator[Receivers]:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(num)]
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(index, theirs), daemon=True) for index, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    try:
        yield Receivers(processes, [ours for ours, _ in pairs])
    finally:
        for process, (ours, _) in zip(processes, pairs, strict=True):
            ours.close()  # its recv ends
            process.join(10.0)
            if process.is_alive():
                process.kill()


def _run(index: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    desk = Desk(index=index)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(desk, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - told to who asked
            pipe.send(RuntimeError(repr(error)))


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_peak() -> int:
    """Forget the peak so far; the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size of /proc/self/status, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def proportional_bytes(pid: int) -> int:
    """Resident memory of a process, with a share only of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable")


def least_seconds(function: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
