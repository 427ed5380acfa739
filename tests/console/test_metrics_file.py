"""Reading metrics back."""

from __future__ import annotations

import json
from pathlib import Path

from console.metrics_file import read_pauses, read_steps
from tests.console.builders import step


def _write(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _train(number: int, incarnation: str = "t1") -> dict[str, object]:
    """As the trainer's tracker writes it."""
    summary = step(number)
    fields = summary.model_dump(exclude={"finished_at"})
    return {"family": "train", "incarnation": incarnation, "time": summary.finished_at, "entropy": 0.5, **fields}


def test_steps_are_read_with_what_else_stands_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, _train(1), {"family": "evaluation", "step": 1, "accuracy": 1.0}, _train(2))
    assert read_steps(path) == [step(1), step(2)]


def test_rows_of_another_incarnation_and_broken_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, _train(1, "old"), _train(1), {"family": "train", "step": 2, "incarnation": "t1"}, [1, 2])
    path.write_text(path.read_text() + '{"family": "train", "st')
    assert read_steps(path, incarnation="t1") == [step(1)]


def test_pauses_are_read_by_engine_and_version(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(
        path,
        {"family": "sync", "step": 0, "policy_version": 0, "snapshot_ms": 7.0},
        {"family": "sync", "step": 1, "policy_version": 1, "pause_ms_engine-0": 40.5, "pause_ms_engine-1": 50.5},
    )
    assert read_pauses(path) == {("engine-0", 1): 40.5, ("engine-1", 1): 50.5}


def test_no_file_no_rows(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none") == []
    assert read_pauses(tmp_path / "none") == {}
