"""Where metrics go: JSON lines, TensorBoard, Weights & Biases.

Invariant: training never waits for a tracker and never fails by one. Rows are written by a thread of their own; a backend that
raises is reported once and left out from then on. Rows already taken are written before `close` returns.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import orjson
import structlog

from configs.schema import TrackingSettings

log = structlog.get_logger()


class Backend(Protocol):
    name: str

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Hands rows to every backend."""

    def __init__(self, backends: Sequence[Backend], *, max_queued_rows: int = 100_000) -> None:
        self._backends = list(backends)
        self._rows: queue.Queue[tuple[str, int, dict[str, Any]] | None] = queue.Queue(max_queued_rows)
        self.num_lost = 0
        """Rows that found the queue full."""
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        """Take a row of a family (`train`, `evaluation`, `sync`) at its own step; never blocks."""
        try:
            self._rows.put_nowait((family, step, dict(row)))
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
        while (item := self._rows.get()) is not None:
            for backend in list(self._backends):
                try:
                    backend.write(*item)
                except Exception as error:  # noqa: BLE001 - a tracker's failure of any kind must not reach training
                    log.warning("tracker failed, going on without it", backend=backend.name, error=repr(error))
                    self._backends.remove(backend)
        for backend in self._backends:
            try:
                backend.close()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("tracker did not close", backend=backend.name, error=repr(error))


class JsonLines:
    """`metrics.jsonl`: one object a row."""

    name = "jsonl"

    def __init__(self, path: Path, *, incarnation: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._incarnation = incarnation

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        line = {"family": family, "step": step, "incarnation": self._incarnation, "time": time.time(), **row}
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under `tensorboard/`."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=f"{family}/{key}", simple_value=float(value))
            for key, value in row.items()
            if _is_number(value)
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


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

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
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
