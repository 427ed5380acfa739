"""A small coverage-guided fuzzer that needs nothing installed.

An input that reaches a pair of lines of `sample_bus` (this line after that one) which none reached before is kept and mutated
further. Invariant: what it calls a defect is written to a file before the next input is tried.
"""

from __future__ import annotations

import hashlib
import sys
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import sample_bus
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import PROMISED, Target

_SOURCE = str(Path(sample_bus.__file__ or "").parent)
_MEASURED_EVERY = 50
"""One input in so many has its memory measured, besides those that are kept."""
SLOW_S = 5.0
MEMORY_FACTOR = 40
MEMORY_SLACK_BYTES = 4 << 20


def memory_limit(num_bytes: int) -> int:
    """Bytes that reading so many may take at most."""
    return MEMORY_SLACK_BYTES + MEMORY_FACTOR * num_bytes


@dataclass(slots=True)
class Progress:
    """One target."""

    target: Target
    corpus: list[bytes]
    executions: int = 0
    edges: set[tuple[int, int, int]] = field(default_factory=set)
    slowest_s: float = 0.0
    peak_bytes: int = 0
    defects: int = 0


class Engine:
    def __init__(self, targets: list[Target], seeds: dict[str, list[bytes]], *, seed: int, defects_dir: Path) -> None:
        self.progress = [Progress(target, list(seeds[target.name])) for target in targets]
        self._random = Random(seed)
        self._defects_dir = defects_dir
        self._known: set[str] = set()
        self._wanted: dict[CodeType, bool] = {}
        self._reached: set[tuple[int, int, int]] = set()

    def run(self, seconds: float) -> Iterator[float]:
        """Fuzz all targets in turn; yields the seconds that are left, about once a second."""
        end = time.monotonic() + seconds
        for progress in self.progress:
            for data in list(progress.corpus):
                self._try(progress, data)
        while (left := end - time.monotonic()) > 0:
            yield left
            for progress in self.progress:
                until = time.monotonic() + 1.0 / len(self.progress)
                while time.monotonic() < until:
                    chosen = self._random.choice(progress.corpus)
                    data = mutated(chosen, progress.corpus, self._random)
                    if self._try(progress, data):
                        progress.corpus.append(data)

    def _try(self, progress: Progress, data: bytes) -> bool:
        """Whether the input reached something new."""
        progress.executions += 1
        begun = time.monotonic()
        with self._traced():
            problem = self._problem(progress.target, data)
        took_s = time.monotonic() - begun
        progress.slowest_s = max(progress.slowest_s, took_s)
        is_new = not self._reached <= progress.edges
        progress.edges |= self._reached
        if not problem and took_s > SLOW_S:
            problem = f"slow: {took_s:.1f} s for {len(data)} bytes"
        if not problem and (is_new or progress.executions % _MEASURED_EVERY == 0):
            problem = self._measured(progress, data)
        if problem:
            self._report(progress, data, problem)
        return is_new

    def _problem(self, target: Target, data: bytes) -> str:
        try:
            target.run(data)
        except PROMISED:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return "".join(traceback.format_exception(error))
        return ""

    def _measured(self, progress: Progress, data: bytes) -> str:
        tracemalloc.start()
        try:
            problem = self._problem(progress.target, data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        progress.peak_bytes = max(progress.peak_bytes, peak)
        if not problem and peak > memory_limit(len(data)):
            problem = f"memory: {peak} bytes for an input of {len(data)}"
        return problem

    def _report(self, progress: Progress, data: bytes, problem: str) -> None:
        progress.defects += 1
        kind = progress.target.name + problem.rstrip().rpartition("\n")[2].partition(":")[0]
        if kind in self._known:
            return
        self._known.add(kind)
        self._defects_dir.mkdir(parents=True, exist_ok=True)
        path = self._defects_dir / f"{progress.target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(problem)

    # coverage

    @contextmanager
    def _traced(self) -> Iterator[None]:
        self._reached = set()
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        wanted = self._wanted.get(code)
        if wanted is None:
            wanted = self._wanted[code] = code.co_filename.startswith(_SOURCE)
        if not wanted:
            return None
        previous, name, reached = 0, id(code), self._reached

        def line(inner: FrameType, what: str, _: Any) -> Any:
            nonlocal previous
            if what == "line":
                reached.add((name, previous, inner.f_lineno))
                previous = inner.f_lineno
            return line

        return line
