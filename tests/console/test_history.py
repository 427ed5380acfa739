"""`headrace history`: a run that is over tells who changed what, when, and from when it held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.cli import main
from console.history import since, spelled
from console.run_dirs import RUN_ID_FILE
from sample_bus.journal import journal_dir
from sample_bus.messages import SettingChange
from sample_bus.settings_log import SETTINGS_FILE, SettingsLog


def _change(revision: int, key: str, old: Any, new: Any, **changes: Any) -> SettingChange:
    values = {"author": "ann", "changed_at": 86_400.0, "scope": "next step", "holds_from": "step 7", **changes}
    return SettingChange(revision=revision, key=key, old=old, new=new, **values)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / RUN_ID_FILE).write_text("abc")
    log = SettingsLog(journal_dir(tmp_path, "abc") / SETTINGS_FILE)
    log.write((_change(1, "max_staleness", None, 3), _change(1, "trainer.normalize_by_std", True, False)))
    log.write(
        (_change(2, "partial_rollout", "keep", "finish", author="bob", scope="next sync", holds_from="policy version 4"),)
    )
    log.close()
    return tmp_path


def test_each_change_is_a_line_with_its_moment(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--run-dir", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "   1  1970-01-02 00:00:00Z  ann  max_staleness: null -> 3  from step 7",
        "   1  1970-01-02 00:00:00Z  ann  trainer.normalize_by_std: true -> false  from step 7",
        "   2  1970-01-02 00:00:00Z  bob  partial_rollout: keep -> finish  from policy version 4",
    ]


def test_as_json_nothing_is_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--json", "--run-dir", str(run_dir)]) == 0
    changes = json.loads(capsys.readouterr().out)
    assert [SettingChange.model_validate(change).revision for change in changes] == [1, 1, 2]
    assert changes[2]["holds_from"] == "policy version 4"


def test_a_run_whose_settings_nobody_touched_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RUN_ID_FILE).write_text("abc")
    assert main(["history", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no live setting was changed\n"
    assert main(["history", "--run-dir", str(tmp_path / "nowhere")]) == 1
    assert "no run has kept books here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("holds_from", "scope", "words"),
    [
        ("step 3", "next step", "from step 3"),
        ("next admission", "next admission", "from the next admission"),
        ("at once", "at once", "at once"),
        ("", "next rollout", "from the next rollout"),
    ],
)
def test_from_when_a_change_holds_reads_as_words(holds_from: str, scope: str, words: str) -> None:
    assert since(_change(1, "seed", 0, 1, holds_from=holds_from, scope=scope)) == words


def test_values_are_spelled_as_set_takes_them() -> None:
    assert [spelled(value) for value in (None, True, 0.5, 3, "keep")] == ["null", "true", "0.5", "3", "keep"]
