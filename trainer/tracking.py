"""Where metrics go: JSON lines, TensorBoard, Weights & Biases.

Invariant: training never waits for a tracker and never fails by one. Rows are written by a thread of their own, in order. A
backend that raises is reported once and tried again, less and less often, with the rows that have waited for it meanwhile, as
far as they can be kept. Rows already taken are written before `close` returns.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson
import structlog

from configs.schema import TrackingSettings

log = structlog.get_logger()

_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
_MAX_DOUBLINGS = 6


class Backend(Protocol):
    name: str

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        """`at`: when the row was made, in Unix seconds. OSError: nothing was written, and it may be tried again."""
        ...

    def close(self) -> None: ...


Row = tuple[str, int, Mapping[str, Any], float]
"""Arguments of `Backend.write`."""


class Lane:
    """What one backend has been given and has not written yet. Time is an argument, in seconds of any clock that rises."""

    def __init__(self, backend: Backend, *, max_kept_rows: int = 10_000) -> None:
        self._backend = backend
        self._rows: deque[Row] = deque()
        self._max_kept_rows = max_kept_rows
        self._failures = 0
        self.num_lost = 0
        """Rows that it refused for good, or that were the oldest of too many that waited."""
        self.due_at: float | None = None
        """When it is tried again; None: it works."""

    def take(self, row: Row, now: float) -> None:
        """Write `row`, behind those that wait; it waits with them where the backend failed and is not due."""
        self._rows.append(row)
        if len(self._rows) > self._max_kept_rows:
            self._rows.popleft()
            self.num_lost += 1
        if self.due_at is None or now >= self.due_at:
            self.write(now)

    def write(self, now: float) -> None:
        """Write what waits, the oldest first, until the backend fails."""
        while self._rows:
            try:
                self._backend.write(*self._rows[0])
            except OSError as error:
                self._fail(error, now)
                return
            except Exception as error:  # noqa: BLE001 - a tracker's failure of any kind must not reach training
                self._rows.popleft()  # the row itself may be what it cannot write
                self.num_lost += 1
                self._fail(error, now)
                return
            self._rows.popleft()
        if self.due_at is not None:
            self.due_at, self._failures = None, 0
            log.info("tracker works again", backend=self._backend.name, rows_lost=self.num_lost)

    def close(self, now: float) -> None:
        """A last try for what waits, then the end of the backend."""
        self.write(now)
        if self._rows:
            log.warning("tracker has not written everything", backend=self._backend.name, rows_left=len(self._rows))
        try:
            self._backend.close()
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tracker did not close", backend=self._backend.name, error=repr(error))

    def _fail(self, error: Exception, now: float) -> None:
        if self.due_at is None:
            log.warning("tracker failed, it is tried again", backend=self._backend.name, error=repr(error))
        self.due_at = now + min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**self._failures)
        self._failures = min(self._failures + 1, _MAX_DOUBLINGS)


class Tracker:
    """Hands rows to every backend."""

    def __init__(self, backends: Sequence[Backend], *, max_queued_rows: int = 100_000) -> None:
        self._lanes = [Lane(backend) for backend in backends]
        self._rows: queue.Queue[Row | None] = queue.Queue(max_queued_rows)
        self.num_lost = 0
        """Rows that found the queue full."""
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        """Take a row of a family (`train`, `evaluation`, `sync`) at its own step; never blocks."""
        try:
            self._rows.put_nowait((family, step, dict(row), time.time()))
        except queue.Full:
            self.num_lost += 1
            if self.num_lost == 1:
                log.warning("tracker is too slow, rows are lost", queued=self._rows.maxsize)

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what was taken and close the backends, within `timeout_s`."""
        self._rows.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tracker did not finish", timeout_s=timeout_s, rows_left=self._rows.qsize())

    def _run(self) -> None:
        while True:
            due_at = min((lane.due_at for lane in self._lanes if lane.due_at is not None), default=None)
            try:
                row = self._rows.get(timeout=None if due_at is None else max(0.0, due_at - time.monotonic()))
            except queue.Empty:
                for lane in self._lanes:
                    if lane.due_at is not None and lane.due_at <= time.monotonic():
                        lane.write(time.monotonic())
                continue
            if row is None:
                break
            for lane in self._lanes:
                lane.take(row, time.monotonic())
        for lane in self._lanes:
            lane.close(time.monotonic())


class JsonLines:
    """`metrics.jsonl`: one object a row. A row is in it whole, or not at all."""

    name = "jsonl"

    def __init__(self, path: Path, *, incarnation: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: FileIO | None = FileIO(path, "a")
        self._incarnation = incarnation

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        line = {"family": family, "step": step, "incarnation": self._incarnation, "time": at, **row}
        content = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        file = self._file = self._file or FileIO(self._path, "a")
        end = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(content):
                written += file.write(content[written:])
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            self.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class TensorBoard:
    """Event files under `tensorboard/`; another one is begun after a failure, since a writer that failed once stays so. Rows
    reach the disk a little later, so the newest ones of a writer that fails are lost."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._open: Callable[[], Any] = lambda: EventFileWriter(str(directory))
        self._writer: Any = self._open()

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        values = [
            self._summary.Value(tag=f"{family}/{key}", simple_value=float(value))
            for key, value in row.items()
            if _is_number(value)
        ]
        event = self._event(wall_time=at, step=step, summary=self._summary(value=values))
        if self._writer is None:
            self._writer = self._open()
        try:
            self._writer.add_event(event)
        except OSError:
            with suppress(Exception):
                self.close()
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WeightsAndBiases:
    """wandb, offline unless WANDB_API_KEY is set. Each family has its own x axis, so that no row is ever 'in the past'."""

    name = "wandb"

    def __init__(self, directory: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode: Literal["online", "offline"] = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(init_timeout=30, console="off", silent=True, x_disable_stats=True),
        )
        self._families: set[str] = set()

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        if family not in self._families:
            self._run.define_metric(f"{family}/step")
            self._run.define_metric(f"{family}/*", step_metric=f"{family}/step")
            self._families.add(family)
        numbers = {f"{family}/{key}": value for key, value in row.items() if _is_number(value)}
        self._run.log({**numbers, f"{family}/step": step})

    def close(self) -> None:
        self._run.finish()


def open_tracker(
    settings: TrackingSettings, *, run_dir: Path, name: str, incarnation: str, config: Mapping[str, Any]
) -> Tracker:
    """A tracker with the backends that could be opened; one that cannot is reported and left out."""
    backends: list[Backend] = []
    for kind in settings.backends:
        try:
            backends.append(_open(kind, settings, run_dir, name, incarnation, config))
        except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises, training goes on
            log.warning("tracker cannot be opened, going on without it", backend=kind, error=repr(error))
    return Tracker(backends)


def _open(
    kind: str, settings: TrackingSettings, run_dir: Path, name: str, incarnation: str, config: Mapping[str, Any]
) -> Backend:
    match kind:
        case "jsonl":
            return JsonLines(run_dir / "metrics.jsonl", incarnation=incarnation)
        case "tensorboard":
            return TensorBoard(run_dir / "tensorboard")
        case "wandb":
            return WeightsAndBiases(run_dir / "wandb", project=settings.wandb_project, name=name, config=config)
        case _:
            raise AssertionError(f"tracking backend {kind!r} passed validation")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
