"""Training never waits for a tracker and never fails by one; nothing that was taken is lost."""

from __future__ import annotations

import errno
import json
import resource
import signal
import struct
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from configs.schema import TrackingSettings
from trainer.tracking import JsonLines, Lane, TensorBoard, Tracker, open_tracker


class Broken:
    name = "broken"

    def __init__(self) -> None:
        self.calls = 0

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        self.calls += 1
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


class Stuck:
    name = "stuck"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        self.release.wait(30)

    def close(self) -> None:
        pass


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Flaky:
    """Refuses while `error` is set."""

    name = "flaky"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.steps: list[int] = []
        self.calls = 0

    def write(self, family: str, step: int, row: Mapping[str, Any], at: float) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.steps.append(step)

    def close(self) -> None:
        pass


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_failing_backend_costs_the_others_no_row(tmp_path: Path) -> None:
    tracker = Tracker([Broken(), JsonLines(tmp_path / "metrics.jsonl", incarnation="a")])
    for step in range(3):
        tracker.write("train", step, {"reward": step / 2})
    tracker.close()
    rows = _rows(tmp_path / "metrics.jsonl")
    assert [(row["family"], row["step"], row["reward"], row["incarnation"]) for row in rows] == [
        ("train", step, step / 2, "a") for step in range(3)
    ]


def test_a_backend_that_was_out_of_room_gets_every_row_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    flaky = Flaky(FULL)
    lane = Lane(flaky)
    for step in range(100):
        lane.take(("train", step, {}, 0.0), now=step / 1000)
    assert flaky.calls == 1
    flaky.error = None
    lane.take(("train", 100, {}, 0.0), now=2.0)
    assert (flaky.steps, lane.due_at, lane.num_lost) == (list(range(101)), None, 0)
    text = capsys.readouterr().out
    assert (text.count("tracker failed"), text.count("tracker works again")) == (1, 1)


def test_a_backend_that_stays_broken_is_tried_less_and_less_often() -> None:
    lane = Lane(Flaky(FULL))
    lane.take(("train", 0, {}, 0.0), now=0.0)
    tried: list[float] = []
    while len(tried) < 9:
        assert lane.due_at is not None
        tried.append(lane.due_at)
        lane.write(lane.due_at)
    assert [after - before for before, after in pairwise([0.0, *tried])] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_so_many_rows_wait_for_a_broken_backend_and_the_oldest_are_lost_beyond() -> None:
    flaky = Flaky(FULL)
    lane = Lane(flaky, max_kept_rows=5)
    for step in range(12):
        lane.take(("train", step, {}, 0.0), now=0.0)
    flaky.error = None
    lane.close(now=0.1)
    assert (flaky.steps, lane.num_lost) == ([7, 8, 9, 10, 11], 7)


def test_a_row_that_cannot_be_written_is_left_out_and_the_next_one_is_not(tmp_path: Path) -> None:
    lane = Lane(JsonLines(tmp_path / "metrics.jsonl", incarnation="a"))
    lane.take(("train", 0, {"what": object()}, 5.0), now=0.0)
    lane.take(("train", 1, {"reward": 1.0}, 6.0), now=1.0)
    lane.close(now=1.0)
    assert [(row["step"], row["time"]) for row in _rows(tmp_path / "metrics.jsonl")] == [(1, 6.0)]


def test_on_a_full_disk_no_row_is_written_in_part_and_none_is_lost(tmp_path: Path) -> None:
    """A file may grow to 1000 bytes for a while: that stands for the disk."""
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lane = Lane(JsonLines(path, incarnation="a"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        for step in range(50):
            lane.take(("train", step, {"text": "x" * step}, 0.0), now=float(step))
        assert 0 < len(_rows(path)) < 50
        assert path.read_text().endswith("\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    lane.close(now=100.0)
    assert [(row["step"], len(row["text"])) for row in _rows(path)] == [(step, step) for step in range(50)]


def test_tensorboard_goes_on_in_another_file_after_a_failure(tmp_path: Path) -> None:
    """Its writer fails in a thread of its own and says so at every row from then on."""
    board = TensorBoard(tmp_path)
    lane = Lane(board)
    lane.take(("train", 1, {"reward": 1.0}, 0.0), now=0.0)
    board._writer.flush()
    board._writer._async_writer._worker.exception = FULL
    lane.take(("train", 2, {"reward": 2.0}, 0.0), now=0.0)
    assert lane.due_at is not None
    lane.take(("train", 3, {"reward": 3.0}, 0.0), now=2.0)
    lane.close(now=2.0)
    assert _tensorboard_steps(tmp_path, "train/reward") == [1, 2, 3]
    assert len(list(tmp_path.glob("events.*"))) == 2


def test_a_stuck_backend_never_blocks_the_writer() -> None:
    stuck = Stuck()
    tracker = Tracker([stuck], max_queued_rows=4)
    for step in range(50):
        tracker.write("train", step, {})
    assert tracker.num_lost >= 44
    stuck.release.set()
    tracker.close()


def test_families_interleaved_out_of_order_reach_tensorboard_and_wandb_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B169: each family has its own axis; no row counts as 'in the past'."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    settings = TrackingSettings(backends=("jsonl", "tensorboard", "wandb"))
    tracker = open_tracker(settings, run_dir=tmp_path, name="t", incarnation="a", config={"seed": 1})
    for step in range(1, 21):
        tracker.write("train", step, {"reward": float(step)})
        if step % 5 == 0:
            tracker.write("evaluation", step - 4, {"accuracy": step / 20})
    tracker.close(timeout_s=120)
    rows = _rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if row["family"] == "evaluation"] == [1, 6, 11, 16]
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert _tensorboard_steps(tmp_path / "tensorboard", "evaluation/accuracy") == [1, 6, 11, 16]
    assert len(_tensorboard_steps(tmp_path / "tensorboard", "train/reward")) == 20
    history = _wandb_history(next((tmp_path / "wandb").glob("wandb/offline-run-*/*.wandb")))
    assert [row["train/reward"] for row in history if "train/reward" in row] == [float(step) for step in range(1, 21)]
    assert [row["evaluation/step"] for row in history if "evaluation/step" in row] == [1, 6, 11, 16]


def _tensorboard_steps(directory: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def _wandb_history(path: Path) -> list[dict[str, Any]]:
    """Rows of wandb's offline file: a 7-byte header, then a leveldb log (32 KiB blocks; crc u32, length u16, kind u8, data)."""
    from wandb.proto import wandb_internal_pb2

    raw, at, rows, pending = path.read_bytes(), 7, [], b""
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        pending += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                )
    return rows
