"""The command refuses what is wrong before anything starts, and says what it would do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from rollouter.cli import main


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """The command sets logging up on this test's stderr, which is closed afterwards."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_help_lists_every_kind_of_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for key in ("staleness_threshold", "rollouter.max_concurrent_rollouts", "data.source", "engine.num_engines"):
        assert key in text


def test_dry_run_prints_the_resolved_settings_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run", "staleness_threshold=1.5"])
    assert ended.value.code == 0
    assert "staleness_threshold: 1.5" in capsys.readouterr().out


def test_unknown_key_exits_with_2_and_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    """B118"""
    with pytest.raises(SystemExit) as ended:
        main(["stalenes_threshold=1"])
    assert ended.value.code == 2
    assert "staleness_threshold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.source=no/such/file.jsonl", "data.source: got 'no/such/file.jsonl'"),
        ("data.reward=no_such_module_here:score", "no_such_module_here"),
        ("rollouter.agent_loop=agent_loop.single_turn:Missing", "agent_loop.single_turn:Missing"),
    ],
)
def test_what_settings_name_is_imported_before_anything_starts(
    override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B109"""
    assert main([override, f"run_dir={tmp_path}"]) == 2
    assert says in capsys.readouterr().err


def _start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rollouter.fake_daemon", f"run_dir={tmp_path}", *overrides],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_daemon_without_a_trainer_says_what_it_waits_for_and_gives_up(tmp_path: Path) -> None:
    """B25"""
    process = _start(tmp_path, "bus.connect_timeout_s=5.5")
    _, text = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "waiting for the trainer" in text
    assert "ipc://" in text
    assert "PeerLost" in text.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_before_anything_is_in_flight_ends_well(tmp_path: Path, number: signal.Signals) -> None:
    process = _start(tmp_path, "bus.connect_timeout_s=100")
    assert process.stderr is not None
    seen = ""
    while "waiting for the trainer" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 0, seen + text


def test_importing_the_package_brings_no_model_code() -> None:
    heavy = "torch", "transformers", "vllm", "ray"
    program = f"import rollouter.daemon, rollouter.cli, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
