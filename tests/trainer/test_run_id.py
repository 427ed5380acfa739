"""A run keeps its id over restarts, and an earlier run's is never used again by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import TrainerError
from trainer.run_id import FILE, run_id_of


def test_the_id_stays_until_a_run_begins_afresh(tmp_path: Path) -> None:
    first = run_id_of(tmp_path, afresh=False)
    assert run_id_of(tmp_path, afresh=False) == first
    second = run_id_of(tmp_path, afresh=True)
    assert second != first
    assert run_id_of(tmp_path, afresh=False) == second
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_file_that_holds_something_else_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("../../etc\n")
    with pytest.raises(TrainerError, match="expected 8 hexadecimal digits"):
        run_id_of(tmp_path, afresh=False)
    (tmp_path / FILE).write_text("")
    with pytest.raises(TrainerError, match="got ''"):
        run_id_of(tmp_path, afresh=False)
    assert len(run_id_of(tmp_path, afresh=True)) == 8
