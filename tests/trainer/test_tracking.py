"""Training never waits for a tracker and never fails by one; nothing that was taken is lost."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.schema import TrackingSettings
from trainer.tracking import JsonLines, Tracker, open_tracker


class Broken:
    name = "broken"

    def __init__(self) -> None:
        self.calls = 0

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        self.calls += 1
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


class Stuck:
    name = "stuck"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, family: str, step: int, row: Mapping[str, Any]) -> None:
        self.release.wait(30)

    def close(self) -> None:
        pass


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_failing_backend_is_left_out_and_the_others_get_every_row(tmp_path: Path) -> None:
    broken = Broken()
    tracker = Tracker([broken, JsonLines(tmp_path / "metrics.jsonl", incarnation="a")])
    for step in range(3):
        tracker.write("train", step, {"reward": step / 2})
    tracker.close()
    assert broken.calls == 1
    rows = _rows(tmp_path / "metrics.jsonl")
    assert [(row["family"], row["step"], row["reward"], row["incarnation"]) for row in rows] == [
        ("train", step, step / 2, "a") for step in range(3)
    ]


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
