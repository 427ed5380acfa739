"""`headrace quarantine`: tasks and messages, listed, shown, released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console.cli import main
from sample_bus.quarantine import Quarantine
from sample_bus.sample import SampleId


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two tasks and a message in quarantine."""
    tasks = tmp_path / "quarantine" / "tasks"
    tasks.mkdir(parents=True)
    for name, task_id in (("0011", "addition-3"), ("0022", "addition-30")):
        facts = {
            "task_id": task_id,
            "failures": 3,
            "reasons": ["timeout", "reward failed", "timeout"],
            "messages": ["gave up after 300 s", "ValueError: no number", "gave up after 300 s"],
            "prompt_text": "what is 2+2?",
            "at": 1_000_000.0,
        }
        (tasks / f"{name}.json").write_text(json.dumps(facts))
    Quarantine(tmp_path / "quarantine").keep(
        [b"\x93head", b"body" * 50], "checksum: got 1, expected 2", "rollouter", sample_id=SampleId("rollouter", 1, 7)
    )
    return tmp_path


def _run(run_dir: Path, *words: str) -> int:
    return main(["quarantine", *words, "--run-dir", str(run_dir)])


def test_everything_in_quarantine_is_listed_with_its_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_dir, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["0011", "task"], ["0022", "task"], ["rejected-0000", "message"]]
    assert lines[0].endswith("addition-3: 3 rollouts given up (reward failed, timeout)")
    assert lines[2].endswith("from rollouter: checksum: got 1, expected 2")


def test_one_of_them_is_shown_whole(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_dir, "show", "addition-3") == 0
    out = capsys.readouterr().out
    assert "what is 2+2?" in out
    assert "ValueError: no number" in out
    assert _run(run_dir, "show", "rejected") == 0
    out = capsys.readouterr().out
    assert "rollouter/1/7" in out
    assert "5 bytes, 200 bytes" in out
    assert "93 68 65 61 64" in out


def test_a_released_task_may_be_issued_again_and_the_other_stays(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_dir, "release", "addition-3") == 0
    assert capsys.readouterr().out == "task addition-3 may be issued again\n"
    assert [path.name for path in (run_dir / "quarantine" / "tasks").iterdir()] == ["0022.json"]
    assert _run(run_dir, "release", "--all") == 0
    assert capsys.readouterr().out.splitlines() == ["task addition-30 may be issued again", "message rejected-0000 is removed"]
    assert _run(run_dir, "list") == 0
    assert "nothing is quarantined in" in capsys.readouterr().out


def test_a_name_that_fits_none_or_several_releases_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_dir, "release", "0011", "nosuch") == 1
    assert "nosuch: nothing in quarantine of" in capsys.readouterr().err
    assert _run(run_dir, "release", "addition") == 1
    assert "addition: 2 things in quarantine begin so: 0011, 0022" in capsys.readouterr().err
    assert len(list((run_dir / "quarantine" / "tasks").iterdir())) == 2


def test_release_wants_ids_or_all(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_dir, "release") == 2
    assert _run(run_dir, "release", "0011", "--all") == 2
    assert "expected ids, or --all" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named_and_hide_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "quarantine" / "tasks" / "0033.json").write_text("[]")
    (run_dir / "quarantine" / "broken.msgpack").write_bytes(b"\xc1")
    assert _run(run_dir, "list") == 0
    streams = capsys.readouterr()
    assert len(streams.out.splitlines()) == 3
    assert "0033.json: no quarantined task" in streams.err
    assert "broken.msgpack" in streams.err
