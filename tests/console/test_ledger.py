"""`headrace ledger`: books and stories from a run's directory, of runs that are over, were killed, or go on."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from configs.command import remember
from configs.schema import BusSettings, Settings
from console.cli import main
from console.journals import Journals
from console.ledger import books_line
from sample_bus.books import Copies
from sample_bus.journal import (
    LATE_RESULT,
    TRAINER_FILE,
    AttemptFailed,
    GroupAdmitted,
    RecordsGone,
    RetryAsked,
    SampleOffered,
    StepBegan,
    VersionPublished,
    journal_dir,
)
from sample_bus.quarantine import Quarantine
from sample_bus.sample import SampleId
from tests.console.run_files import RUN_ID, some_steps, write_run
from tests.sample_bus.lives import GROUP_SIZE, PRODUCER, Lives


def test_a_run_in_order_closes_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(some_steps(), tmp_path / "demo")
    assert main(["ledger", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    for expected in (
        f"id {RUN_ID}",
        "does not answer, and has not said that it ended",
        "6 by 3 steps",
        "10 issued = 6 trained + 0 dropped + 1 failed (timeout 1) + 0 queued + 2 on the way + 1 in flight",
        "the ledger closes: no rollout is lost, none was trained twice",
    ):
        assert expected in out, out


def test_the_books_name_rollouts_whose_story_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(some_steps(), tmp_path / "demo")
    main(["ledger", "--run-dir", str(run_dir)])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.endswith(")")]
    named = {words: shlex.split(rollout)[0] for _, rollout, words in lines}
    assert list(named) == ["(the oldest in flight)", "(the last trained)", "(the last given up)"]
    for rollout, place in zip(named.values(), ("in flight", "trained", "failed"), strict=True):
        assert main(["ledger", "--run-dir", str(run_dir), "--sample", rollout]) == 0
        assert capsys.readouterr().out.startswith(f"rollout {rollout}: {place}")


def test_the_books_as_json_hold_the_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(some_steps(), tmp_path / "demo")
    assert main(["ledger", "--run-dir", str(run_dir), "--json"]) == 0
    books = json.loads(capsys.readouterr().out)
    placed = sum(books[key] for key in ("trained", "queued", "on_the_way", "in_flight"))
    assert books["issued"] == placed + sum(books["dropped"].values()) + sum(books["failed"].values())
    assert (books["closes"], books["run_id"], books["problems"]) == (True, RUN_ID, [])


def test_a_lost_sample_is_named_and_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = some_steps()
    lives.kept = lives.kept[:-2]
    assert main(["ledger", "--run-dir", str(write_run(lives, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "the ledger DOES NOT CLOSE:" in out
    assert "2 rollouts lost: g3/1 (record rollouter/1/7: its producer keeps no copy (none from 7 on))" in out
    assert "g4/0" in out


def test_a_sample_trained_twice_is_named_and_the_exit_code_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = some_steps()
    began = next(record for record in lives.trainer_log if isinstance(record, StepBegan))
    lives.trainer_log.append(replace(began, step=4))
    assert main(["ledger", "--run-dir", str(write_run(lives, tmp_path))]) == 1
    assert "rollout g0/0 (record rollouter/1/0) was taken by step 4 after it had been trained by step 1" in (
        capsys.readouterr().out
    )


def test_a_killed_trainer_leaves_books_that_close_with_what_came_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = some_steps()
    lives.kill_trainer()
    lives.start_trainer()
    assert main(["ledger", "--run-dir", str(write_run(lives, tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "4 by 2 steps" in out
    assert "trainer 1, rollouter 0; the training of 2 samples went with a trainer, those that were kept came again" in out


def test_the_story_of_a_sample_tells_its_life_over_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout of the step that was lost: trained, rolled back, trained again."""
    lives = some_steps()
    lives.kill_trainer()
    lives.start_trainer()
    for _ in range(GROUP_SIZE):
        lives.receive()
    lives.begin_replayed_step()
    lives.finish_step()
    lives.trainer_log.append(VersionPublished(at=1001.0, policy_version=3, step=3, digest="d"))
    lives.save()
    run_dir = write_run(lives, tmp_path)
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g2/0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rollout g2/0: trained"
    texts = [line.split("  ", 3)[-1].strip() for line in lines[1:]]
    assert texts == [
        "admitted: task t, issue 2, seat 0 of 2, policy version 0, settings revision 0",
        "attempt 0 offered as record rollouter/1/4: 5 tokens, reward 1, oldest version 0",
        "received record rollouter/1/4, a sample",
        "record rollouter/1/4 taken by step 3, newest version 2",
        "trained by step 3: loss 0.0000",
        "began again at step 2, without record rollouter/1/4: that it was trained by step 3 does not hold any more",
        "received record rollouter/1/4, a sample",
        "record rollouter/1/4 taken by step 3, newest version 2",
        "trained by step 3, taken again as before: loss 0.0000",
        "covered by the checkpoint of step 3",
        "its effect is published in version 3",
    ]
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "rollouter/1/4"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_the_story_of_a_rollout_that_was_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = some_steps()
    lives.rollouter_log.append(
        AttemptFailed(at=1002.0, group_id="g4", seat=0, attempt=0, reason=LATE_RESULT, message="after 9 s")
    )
    lives.kill_rollouter()
    lives.start_rollouter()
    run_dir = write_run(lives, tmp_path)
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g4"]) == 0
    out = capsys.readouterr().out
    assert "rollout g4/0: failed (timeout)" in out
    assert "attempt 0 failed: timeout; retry" in out
    assert "given up at attempt 0: timeout; seat closed by record rollouter/1/8" in out
    assert "brought a late result, which was refused (after 9 s)" in out
    assert "rollout g4/1: in flight" in out
    assert out.count("the rollouter began again") == 1, "only where the rollout was still to be played"


def test_the_story_of_a_group_that_was_too_old_leads_to_the_one_in_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B34"""
    lives = some_steps()
    admitted = next(record for record in lives.rollouter_log if isinstance(record, GroupAdmitted) and record.group_id == "g3")
    lives.trainer_log.append(RetryAsked(at=1003.0, group_id="g3", task_id=admitted.task_id))
    lives.rollouter_log.append(replace(admitted, at=1004.0, group_id="g3+1", replaces="g3"))
    run_dir = write_run(lives, tmp_path)
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g3/0"]) == 0
    out = capsys.readouterr().out
    assert "its group is too old: the rollouter is asked to issue the task again" in out
    assert "its task was issued again as group g3+1" in out
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g3+1/0"]) == 0
    assert "in the place of g3, which was too old" in capsys.readouterr().out


def test_many_rollouts_are_a_line_each_and_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lives = some_steps()
    for _ in range(8):
        lives.admit()
    run_dir = write_run(lives, tmp_path)
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g"]) == 0
    out = capsys.readouterr().out
    assert "g0/0  trained\n" in out
    assert "26 rollouts; name one" in out
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "g1/0", "--json"]) == 0
    (story,) = json.loads(capsys.readouterr().out)
    assert (story["place"], story["records"], len(story["events"])) == ("trained", [["rollouter", 1, 2]], 6)
    assert main(["ledger", "--run-dir", str(run_dir), "--sample", "h"]) == 1
    assert "headrace ledger: error: h: no rollout of run 0a1b2c3d has this id" in capsys.readouterr().err


def test_the_newest_run_is_read_also_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ledger"]) == 1
    assert "no run below" in capsys.readouterr().err
    old, new = some_steps(), Lives(every_steps=0, repeats_began=False)
    new.start_rollouter()
    new.admit()
    write_run(old, tmp_path / "runs" / "demo")
    write_run(new, tmp_path / "runs" / "demo-2")
    for age, name in ((20, "demo"), (10, "demo-2")):
        for path in (tmp_path / "runs" / name, tmp_path / "runs" / name / "run_id"):
            os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert main(["ledger"]) == 0
    assert "2 issued = 0 trained" in capsys.readouterr().out
    remember(Settings(run_dir=tmp_path / "runs" / "demo"))
    config = tmp_path / "demo.yaml"
    config.write_text("run_dir: runs/demo\n")
    assert main(["ledger", "--config", str(config)]) == 0
    assert "10 issued = 6 trained" in capsys.readouterr().out


def test_a_directory_without_books_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--run-dir", str(tmp_path)]) == 1
    assert "no run has kept books here" in capsys.readouterr().err
    assert books_line(tmp_path) is None


def test_a_summary_does_not_wait_for_long_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(some_steps(), tmp_path)
    assert books_line(run_dir) is not None
    monkeypatch.setattr("console.ledger._QUICK_BYTES", 100)
    assert books_line(run_dir) is None


def test_a_damaged_journal_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(some_steps(), tmp_path)
    path = journal_dir(run_dir, RUN_ID) / TRAINER_FILE
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert main(["ledger", "--run-dir", str(run_dir)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("headrace ledger: error: ")
    assert "is damaged" in err
    assert err.count("\n") == 1


def test_what_a_broker_keeps_is_on_the_way_or_lost_once_the_run_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = some_steps()
    lives.end_trainer()
    run_dir = write_run(lives, tmp_path / "demo")
    (run_dir / "spool").rename(tmp_path / "elsewhere")
    remember(Settings(run_dir=run_dir, bus=BusSettings(transport="redis")))
    assert main(["ledger", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "2 on the way or lost" in out
    assert Journals.of(run_dir).spool_bytes() is None
    remember(Settings(run_dir=run_dir))
    assert main(["ledger", "--run-dir", str(run_dir)]) == 1, "with sockets the spool is the only copy, and it is gone"


def test_copies_are_read_on_both_sides_of_the_journals(tmp_path: Path) -> None:
    lives = some_steps()
    journals = Journals.of(write_run(lives, tmp_path))
    assert journals.copies() == [Copies(producer=PRODUCER, epoch=1, first=4, next_seq=9)]
    assert journals.spool_bytes()


def test_a_rejected_sample_whose_file_is_kept_is_not_lost(tmp_path: Path) -> None:
    lives = some_steps()
    run_dir = write_run(lives, tmp_path)
    refused = SampleId(PRODUCER, 1, 6)
    Quarantine(run_dir / "quarantine").keep([b"x"], "checksum", PRODUCER, sample_id=refused)
    journals = Journals.of(run_dir)
    assert journals.rejected() == {refused}
    assert journals.read().books().dropped == {"rejected": 1}
    offered = next(one for one in lives.rollouter_log if isinstance(one, SampleOffered) and one.id[2] == 6)
    lives.rollouter_log.append(
        AttemptFailed(at=1.0, group_id=offered.group_id, seat=offered.seat, attempt=0, reason="bad sample", message="")
    )
    again = Journals.of(write_run(lives, tmp_path / "again"))
    assert again.read().books().dropped == {}
    assert again.read().books().in_flight == 2, "its seat is played again"


def test_records_that_nobody_keeps_are_counted_as_lost_with_a_trainer(tmp_path: Path) -> None:
    """A trainer that never saved was killed: what it had trained is gone with it, and the ledger says how much."""
    lives = Lives(every_steps=0, repeats_began=False)
    lives.start_rollouter()
    lives.start_trainer()
    lives.admit()
    for _ in range(GROUP_SIZE):
        lives.offer()
        lives.note_offer()
        lives.receive()
    lives.begin_step()
    lives.finish_step()
    lives.kill_trainer()
    lives.start_trainer()
    assert any(isinstance(record, RecordsGone) for record in lives.trainer_log)
    assert books_line(write_run(lives, tmp_path)) == (
        "2 issued = 0 trained + 2 dropped (lost with a trainer 2) + 0 queued + 0 in flight"
    )
