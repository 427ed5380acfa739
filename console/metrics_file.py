"""Reading a run's `metrics.jsonl`: every step and every sync pause, also those that the console was not there to see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sample_bus.messages import StepSummary

_PAUSE = "pause_ms_"
"""Followed by the engine's name."""


def read_steps(path: Path, *, incarnation: str | None = None) -> list[StepSummary]:
    """Steps of family `train`, in the file's order; rows that are no step (cut off, of another kind) are left out."""
    steps = []
    for row in _rows(path, "train", incarnation):
        try:
            fields = {key: row[key] for key in StepSummary.model_fields if key in row}
            steps.append(StepSummary.model_validate({"finished_at": row.get("time"), **fields}))
        except ValidationError:
            continue
    return steps


def read_pauses(path: Path, *, incarnation: str | None = None) -> dict[tuple[str, int], float]:
    """Pauses of generation in ms by (engine, policy version), of family `sync`."""
    pauses = {}
    for row in _rows(path, "sync", incarnation):
        version = row.get("policy_version")
        for key, value in row.items():
            if key.startswith(_PAUSE) and isinstance(value, int | float) and isinstance(version, int):
                pauses[key.removeprefix(_PAUSE), version] = float(value)
    return pauses


def _rows(path: Path, family: str, incarnation: str | None) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("family") == family and incarnation in (None, row.get("incarnation")):
            yield row
