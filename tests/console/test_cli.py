"""The command line: what it refuses, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.keys import leaves
from console.change import parse, user_at_host
from console.cli import main


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, console.cli; heavy = {'pydantic', 'rich', 'zmq', 'numpy', 'asyncio', 'yaml'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_settings_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in leaves())
    assert "[live: next admission]" in out


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("stalenes_threshold=1", "unknown setting 'stalenes_threshold'; nearest valid: staleness_threshold"),
        ("learning_rate=1e-4", "unknown setting 'learning_rate'; nearest valid: trainer.learning_rate"),
        ("trainer.beta1=0.5", "trainer.beta1 is fixed for the run"),
        ("staleness_threshold=-1", "staleness_threshold: got -1"),
        ("staleness_threshold=soon", "staleness_threshold: got 'soon'"),
        ("staleness_threshold", "expected key=value"),
    ],
)
def test_set_refuses_what_no_run_would_take(assignment: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B118: a misspelt or misplaced key is refused with the nearest valid one, for live changes too."""
    assert main(["set", assignment, "--address", "ipc:///nowhere/bus"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("headrace set: error: ")
    assert err.count("\n") == 1


def test_set_leaves_contradictions_with_other_settings_to_the_trainer() -> None:
    assert parse(["sampling.max_tokens=4000"]) == {"sampling.max_tokens": 4000}


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse(["staleness_threshold=1", "staleness_threshold=2"])


@pytest.mark.parametrize("command", [["status"], ["set", "staleness_threshold=1"]])
def test_nobody_answering_is_told_with_the_address(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"ipc://{tmp_path}/bus"
    assert main([*command, "--address", address, "--timeout-s", "0.3"]) == 1
    assert f"no trainer answered at {address} within 0.3 s" in capsys.readouterr().err


def test_no_run_anywhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 1
    assert "no run goes on below" in capsys.readouterr().err


def test_up_refuses_wrong_settings_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B118, B120: every problem at once, one line each, exit 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["up", "stalenes_threshold=1", "run_dir=runs/x"]) == 2
    assert "nearest valid: staleness_threshold" in capsys.readouterr().err
    assert main(["up", "samples_per_step=60", "num_steps=7", "trigger_parameter_sync_step=8"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_settings_file_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_default_author_names_user_and_host() -> None:
    user, _, host = user_at_host().partition("@")
    assert user
    assert host
