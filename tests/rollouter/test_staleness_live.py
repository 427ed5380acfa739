"""The judgement of `benchmarks.staleness_live`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.staleness_live import Row, before, follow, rows_of


@pytest.mark.parametrize(
    ("ages", "closes", "holds"),
    [
        ([0, 0, 0, 1, 2, 2, 2, 1, 0, 0], True, True),
        ([0, 0, 0, 1, 2, 2, 2, 1, 0, 0], False, False),
        ([0, 1, 0, 1, 2, 2, 2, 1, 0, 0], True, False),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0], True, False),
        ([0, 0, 0, 1, 2, 2, 2, 1, 1, 1], True, False),
    ],
)
def test_ages_follow_the_threshold_up_and_down(ages: list[int], closes: bool, holds: bool) -> None:
    """Raised after the second step, lowered after the fifth."""
    steps = [Row(number, float(age), age, 0) for number, age in enumerate(ages, 1)]
    assert follow(steps, raised_at=2, lowered_at=5, ledger_closes=closes).holds is holds


def test_a_change_lies_behind_the_last_step_of_the_revision_before(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [Row(at, 0.0, 0, revision) for at, revision in enumerate([0, 0, 1, 1, 1, 2], 1)]
    plain = [{"family": "train", "loss": 0.5, **row._asdict()} for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in [*plain, {"policy_version": 3}]) + '{"step": 7, "sett')
    assert rows_of(metrics) == rows
    assert (before(rows, 1), before(rows, 2)) == (2, 5)
