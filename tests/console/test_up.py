"""`headrace up`, `status` and `set` as commands, on the real bus, with stand-ins for both daemons."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.paths import socket_dir
from configs.schema import Settings
from console.cli import main
from tests.fakes.living import is_alive

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tests.console.up_with_stand_ins"]
DEADLINE_S = 90


class Up:
    """One `headrace up` in a process of its own."""

    def __init__(self, run_dir: Path, wishes: str = "", **streams: object) -> None:
        self.run_dir = run_dir
        arguments = [*COMMAND, "up", f"run_dir={run_dir}", "num_steps=8", "samples_per_step=16", "bus.max_queued_samples=64"]
        environment = {**os.environ, "STAND_IN": wishes, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(arguments, cwd=ROOT, env=environment, text=True, **streams)  # type: ignore[call-overload]
        self.descendants: list[psutil.Process] = []

    def wait_for(self, text: str, log: str) -> None:
        """Wait until `text` stands in one of the run's logs."""
        path = self.run_dir / "logs" / f"{log}.log"
        for _ in range(DEADLINE_S * 20):
            if path.exists() and text in path.read_text():
                self.descendants = psutil.Process(self.process.pid).children(recursive=True)
                return
            assert self.process.poll() is None, f"ended before {text!r} was in {path}"
            time.sleep(0.05)
        raise AssertionError(f"{text!r} never came in {path}")

    def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def assert_nothing_is_left(self) -> None:
        alive = [process for process in self.descendants if is_alive(process)]
        assert alive == []
        assert list(socket_dir(Settings(run_dir=self.run_dir)).iterdir()) == []
        orphan = self.run_dir / "orphan"
        assert not orphan.exists() or not Path(orphan.read_text()).exists()


@pytest.fixture(autouse=True)
def _own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Up] = []

    def start_one(wishes: str = "", **streams: object) -> Up:
        started.append(Up(tmp_path / "runs" / f"run{len(started)}", wishes, **streams))
        return started[-1]

    yield start_one
    for up in started:
        if up.process.poll() is None:
            up.process.terminate()
            up.process.wait(timeout=DEADLINE_S)


def _piped(start: object, wishes: str = "") -> Up:
    assert callable(start)
    up = start(wishes, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert isinstance(up, Up)
    return up


def test_a_run_without_terminal_tells_each_step_in_a_line_and_ends_with_the_summary(start: object) -> None:
    up = _piped(start)
    up.wait_for('"event":"daemon started"', "console")
    code, out, err = up.end()
    assert (code, err) == (0, "")
    for step in range(1, 9):
        assert out.count(f"step {step}/8 ") == 1
    assert "\x1b" not in out
    assert "0.250 (version 0, 8 samples) → 0.750 (version 8, 8 samples): +50 points" in out
    assert "128 issued = 128 trained + 0 dropped + 0 queued + 0 in flight" in out
    assert str(up.run_dir / "reward.png") in out
    assert (up.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    up.assert_nothing_is_left()


def test_a_run_on_a_terminal_is_shown_live(start: object) -> None:
    assert callable(start)
    controller, terminal = pty.openpty()
    up = start("", stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(controller, 65536):
            shown += chunk
    except OSError:
        pass  # how a pseudo-terminal says that its other side is closed
    finally:
        os.close(controller)
    code, _, err = up.end()
    text = shown.decode()
    assert (code, err) == (0, "")
    assert "\x1b[" in text
    for expected in (
        "policy version 8",
        "reward 1.000",
        "samples/s",
        "staleness",
        "training 50 %",
        "engine-0",
        "of 64 samples",
        "finished",
    ):
        assert expected in text, expected


def test_a_terminal_that_is_closed_ends_the_run_in_order(start: object) -> None:
    assert callable(start)
    controller, terminal = pty.openpty()
    up = start("endless", stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, preexec_fn=_own_terminal)
    os.close(terminal)
    up.wait_for('"step":3', "trainer")
    os.close(controller)
    assert up.end()[0] == 128 + signal.SIGHUP
    up.assert_nothing_is_left()


def test_a_pipe_whose_reader_has_gone_ends_the_run_in_order(start: object) -> None:
    assert callable(start)
    reader, writer = os.pipe()
    up = start("endless", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    up.wait_for('"step":3', "trainer")
    os.close(reader)
    code, _, err = up.end()
    assert (code, err) == (128 + signal.SIGHUP, "")
    up.assert_nothing_is_left()


def test_a_run_that_was_told_to_ignore_hangups_goes_on(start: object) -> None:
    """As under `nohup`."""
    assert callable(start)
    up = start("endless", stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_ignore_hangups)
    up.wait_for('"step":3', "trainer")
    up.process.send_signal(signal.SIGHUP)
    assert up.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
    up.assert_nothing_is_left()


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("wishes", "log", "text", "number", "code"),
    [
        ("slow-start", "trainer", "converting model", signal.SIGTERM, 143),
        ("endless,orphan,stubborn", "trainer", '"step":3', signal.SIGINT, 130),
    ],
)
def test_a_signal_at_any_moment_stops_everything_and_leaves_nothing(
    start: object, wishes: str, log: str, text: str, number: signal.Signals, code: int
) -> None:
    up = _piped(start, wishes)
    up.wait_for(text, log)
    got, out, err = up.end(number)
    assert (got, err) == (code, "")
    assert "stopped by" in out
    assert up.descendants
    up.assert_nothing_is_left()


def test_ctrl_c_right_after_the_start_leaves_nothing(start: object) -> None:
    up = _piped(start)
    up.wait_for('"event":"daemon started"', "console")
    assert up.end(signal.SIGINT)[0] == 130
    up.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("wishes", "daemon", "reason"),
    [
        ("endless,trainer-dies", "trainer", "trainer failed error=ValueError: the loss is not a number"),
        ("endless,rollouter-dies", "rollouter", "RuntimeError: engine-0 ran out of memory"),
    ],
)
def test_a_daemon_that_dies_is_named_with_its_reason_and_its_log_and_the_other_is_stopped(
    start: object, wishes: str, daemon: str, reason: str
) -> None:
    up = _piped(start, wishes)
    code, out, err = up.end()
    assert code == 1
    assert err == f"headrace up: {daemon} died (exit code 1): {reason}; log: {up.run_dir / 'logs' / f'{daemon}.log'}\n"
    assert f"failed: {daemon} exit code 1" in out
    up.assert_nothing_is_left()


def test_settings_change_live_the_status_shows_it_and_the_directory_is_taken(
    start: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up = _piped(start, "endless")
    up.wait_for('"step":3', "trainer")
    run = ("--run-dir", str(up.run_dir), "--timeout-s", "60")

    assert main(["status", "--json", *run]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["trainer"]["policy_version"] >= 3
    assert before["settings"]["values"]["staleness_threshold"] == 0.5
    assert before["ledger"]["line"]

    assert main(["set", "staleness_threshold=0", "sampling.temperature=1.0", "--author", "ada", *run]) == 0
    changed = capsys.readouterr().out
    assert "staleness_threshold: 0.5 -> 0.0 (revision 1, from the next admission)\n" in changed
    assert "sampling.temperature: unchanged (revision 1)\n" in changed
    up.wait_for('"staleness_threshold":0.0', "trainer")

    monkeypatch.chdir(tmp_path)
    assert main(["status", "--timeout-s", "60"]) == 0, "the newest run below ./runs is found"
    shown = capsys.readouterr().out
    for expected in (
        "staleness_threshold: 0.5 → 0.0 by ada",
        "revision 1",
        "policy version",
        "engine-0",
        "ledger",
        "waiting for",
    ):
        assert expected in shown, expected

    assert main(["set", "trainer.learning_rate=0.01", "staleness_threshold=3", "--author", "bob", "--dry-run", *run]) == 0
    would = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[0] for line in would[:1]] == [
        "trainer.learning_rate: 1e-05 -> 0.01 (would be revision 2, from step"
    ]
    assert would[1] == "staleness_threshold: 0.0 -> 3.0 (would be revision 2, from the next admission)"
    assert main(["set", "trainer.learning_rate=0.01", "rollouter.max_concurrent_rollouts=2", *run]) == 2
    assert "no group could ever start" in capsys.readouterr().err, "all or nothing, judged by the trainer"
    assert main(["set", "trainer.learning_rate=0.01", "--author", "bob", *run]) == 0
    assert main(["revert", "7", *run]) == 2
    assert "there is no revision 7 to go back to: settings are at revision 2" in capsys.readouterr().err
    assert main(["revert", "0", "--author", "eve", *run]) == 0
    reverted = capsys.readouterr().out
    assert "staleness_threshold: 0.0 -> 0.5 (revision 3, from the next admission)\n" in reverted
    assert "trainer.learning_rate: 0.01 -> 1e-05 (revision 3, from step " in reverted
    assert main(["history", "--json", "--run-dir", str(up.run_dir)]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert [(change["revision"], change["author"]) for change in kept] == [(1, "ada"), (2, "bob"), (3, "eve"), (3, "eve")]
    assert main(["history", "--address", before["address"], "--timeout-s", "60"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(kept)
    assert "ada  staleness_threshold: 0.5 -> 0.0  from the next admission" in told[0]

    assert main(["set", "staleness_threshold=1", "--expect", "0", *run]) == 1
    assert "revision 3, expected 0" in capsys.readouterr().err

    assert main(["up", f"run_dir={up.run_dir}"]) == 1
    assert "a run goes on here" in capsys.readouterr().err
    assert up.end(signal.SIGTERM)[0] == 143


def test_of_two_writers_of_settings_one_wins_and_the_other_is_told(start: object) -> None:
    up = _piped(start, "endless")
    up.wait_for('"step":3', "trainer")
    writers = {
        author: subprocess.Popen(
            [
                *(sys.executable, "-m", "console.cli", "set", f"sampling.temperature={value}", "--expect", "0"),
                *("--author", author, "--run-dir", str(up.run_dir), "--timeout-s", "60"),
            ],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for author, value in (("ada", 0.5), ("bob", 2.0))
    }
    ends = {author: (*writer.communicate(timeout=DEADLINE_S), writer.returncode) for author, writer in writers.items()}
    assert sorted(code for _, _, code in ends.values()) == [0, 1]
    loser = next(err for _, err, code in ends.values() if code == 1)
    assert "revision 1, expected 0" in loser
    assert up.end(signal.SIGTERM)[0] == 143


def test_the_ledger_closes_while_the_run_goes_on_and_after_it_was_stopped(
    start: object, capsys: pytest.CaptureFixture[str]
) -> None:
    up = _piped(start, "endless")
    for number in range(3, 9):
        up.wait_for(f'"step":{number}', "trainer")
        assert main(["ledger", "--run-dir", str(up.run_dir)]) == 0, capsys.readouterr().out
        shown = capsys.readouterr().out
        assert "the ledger closes" in shown
        assert "goes on" in shown
    assert main(["ledger", "--sample", "g0", "--run-dir", str(up.run_dir)]) == 0
    assert "rollout g0/0: trained" in capsys.readouterr().out
    assert main(["status", "--run-dir", str(up.run_dir), "--timeout-s", "60"]) == 0
    assert "bytes of records until a checkpoint covers them" in capsys.readouterr().out
    assert up.end(signal.SIGTERM)[0] == 143
    assert main(["ledger", "--run-dir", str(up.run_dir)]) == 0, capsys.readouterr().out
