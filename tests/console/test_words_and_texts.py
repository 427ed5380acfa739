"""What the operator reads: plain lines, live view, summary, status."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from console.picture import Picture
from console.plain import PlainDisplay
from console.status import State, state_as_json, state_as_text
from console.summary import Files, summary
from console.view import render
from console.words import awaited, duration, number, shares_text
from sample_bus.messages import (
    Counts,
    EndOfRun,
    EndReason,
    FailureNote,
    LiveSettingsState,
    Recovery,
    RolloutCounts,
    RollouterState,
    RoundState,
    RoundSummary,
    TimeShares,
    TrainerState,
)
from tests.console.builders import evaluation, picture, rollouter, step, trainer
from tests.console.run_files import RUN_ID, some_steps, write_run
from tests.fakes.fake_control import FakeControl


def _running() -> Picture:
    run = picture()
    run.see_connected(901.0)
    run.see_rollouter(rollouter(), 902.0)
    for item in range(1, 4):
        run.see_trainer(trainer(last_step=step(item), evaluations=(evaluation(0, 0.36),)), 1000.0 + 2 * item)
    run.live = LiveSettingsState(revision=2, values={"staleness_threshold": 0.5})
    return run


def _drawn(run: Picture, *, width: int = 100, height: int = 30, unicode: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False, legacy_windows=False)
    console.print(render(run, 1006.0, width=width, height=height, unicode=unicode))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_durations_and_numbers_read_well() -> None:
    assert [duration(value) for value in (0.04, 59.94, 125, 11220)] == ["0.0 s", "59.9 s", "2 min 05 s", "3 h 07 min"]
    assert [number(value) for value in (4.923, 31.44, 1204.4)] == ["4.92", "31.4", "1,204"]


def test_shares_in_words_are_whole_percents_that_sum_to_100() -> None:
    assert (
        shares_text(TimeShares(waiting=1 / 3, training=1 / 3, publishing=1 / 3))
        == "waiting 34 %, training 33 %, publishing 33 %"
    )
    assert shares_text(TimeShares()) == ""


def test_what_is_awaited_names_who_waits_for_what() -> None:
    lines = awaited(trainer(state=TrainerState.WAITING, detail="31 of 64 samples"), None)
    assert lines == ["trainer: 31 of 64 samples", "the rollouter to connect"]


def test_the_live_view_shows_everything_the_operator_watches() -> None:
    text = _drawn(_running())
    for expected in (
        "step 3/10",
        "policy version 3",
        "reward 0.300",
        "mean 0.50 · max 1",
        "threshold 0.5",
        "samples/s",
        "generated tokens/s",
        "12 of 512 samples",
        "training 60 %",
        "waiting 30 %",
        "publishing 10 %",
        "0.360 (version 0",
        "training",
        "generating",
        "engine-0",
        "last pause 35 ms",
    ):
        assert expected in text, expected


def test_the_live_view_fits_a_small_terminal_and_a_plain_encoding() -> None:
    lines = _drawn(_running(), width=60, height=20, unicode=False).splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert len(lines) <= 20
    assert not any(0x2800 <= ord(character) < 0x2900 for line in lines for character in line)


def test_the_live_view_says_what_happens_before_anybody_is_on_the_bus() -> None:
    run = picture()
    run.notes["trainer"] = "starting: converting the model percent=40"
    text = _drawn(run)
    assert "converting the model percent=40" in text
    assert "no step yet" in text


def test_the_live_view_says_that_it_stops() -> None:
    run = _running()
    run.is_stopping = True
    assert "stopping both daemons" in _drawn(run)


def test_plain_output_has_one_line_a_step_and_none_twice() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    run = _running()
    display.show(run, 1006.0)
    display.show(run, 1006.5)
    run.add_steps([step(4)])
    display.show(run, 1008.0)
    lines = [line for line in out.getvalue().splitlines() if "step " in line]
    assert [line.split("step ")[1].split()[0] for line in lines] == ["1/10", "2/10", "3/10", "4/10"]
    assert "reward 0.400" in lines[-1]
    assert "staleness mean 0.50 max 1" in lines[-1]


def test_plain_output_tells_the_first_failure_of_a_reason_at_once_and_then_when_they_have_doubled() -> None:
    out = io.StringIO()
    display, run = PlainDisplay(out), _running()
    for count in (1, 2, 7, 9, 17, 18):
        note = FailureNote(
            reason="reward failed", is_evaluation=True, count=count, first="RewardError: " + "x" * 900 + "KeyError: 'a'"
        )
        run.see_rollouter(rollouter(failures=(note,)), 1007.0)
        display.show(run, 1007.0)
    lines = [line for line in out.getvalue().splitlines() if "failed" in line]
    assert [line.split("] ")[1].split()[0] for line in lines] == ["1", "9", "18"]
    assert "1 evaluation attempt failed (reward failed), first: RewardError: xxx" in lines[0]
    assert lines[0].endswith("KeyError: 'a'")
    assert lines[1].endswith("9 evaluation attempts failed (reward failed) so far")


def test_advice_is_shown_everywhere_and_once_in_the_lines(tmp_path: Path) -> None:
    run = _running()
    run.see_trainer(trainer(last_step=step(4), advice=("look at the rewards",)), 1008.0)
    out = io.StringIO()
    display = PlainDisplay(out)
    display.show(run, 1008.0)
    display.show(run, 1009.0)
    assert out.getvalue().count("advice: look at the rewards") == 1
    assert "look at the rewards" in _drawn(run)
    assert "look at the rewards" in summary(run, Files(run_dir=tmp_path, png=None), headline="h", now=1010.0)


def test_failures_stand_in_the_live_view_the_summary_and_the_status(tmp_path: Path) -> None:
    run = _running()
    note = FailureNote(reason="timeout", is_evaluation=False, count=12, first="TimeoutError: 300 s")
    run.see_rollouter(rollouter(failures=(note,)), 1007.0)
    said = "12 rollout attempts failed (timeout), first: TimeoutError: 300 s"
    assert said in _drawn(run)
    assert said in summary(run, Files(run_dir=tmp_path, png=None), headline="h", now=1010.0)


def test_plain_output_says_what_is_waited_for_when_nothing_comes() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    run = picture()
    run.see_trainer(trainer(state=TrainerState.STARTING, detail="preparing model x"), 900.0)
    run.see_rollouter(rollouter(state=RollouterState.STARTING_ENGINES, detail="engine-0"), 900.0)
    display.show(run, 901.0)
    before = out.getvalue()
    display.show(run, 902.0)
    assert out.getvalue() == before
    display.show(run, 912.0)
    last = out.getvalue().splitlines()[-1]
    assert "preparing model x" in last
    assert "starting engines: engine-0" in last


def test_the_summary_tells_the_climb_the_books_and_the_files(tmp_path: Path) -> None:
    run = _running()
    run.see_trainer(trainer(evaluations=(evaluation(0, 0.36), evaluation(10, 0.91))), 1030.0)
    run.end = EndOfRun(reason=EndReason.FINISHED)
    text = summary(run, Files(run_dir=tmp_path, png=tmp_path / "reward.png"), headline="headrace demo: finished", now=1031.0)
    for expected in (
        "headrace demo: finished",
        "0.360 (version 0, 64 samples) → 0.910 (version 10, 64 samples): +55 points",
        "3 of 10",
        "192 (384 trained tokens)",
        "samples/s",
        "training 60 %",
        "ledger",
        "2 min 11 s",
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "logs"),
        str(tmp_path / "reward.png"),
    ):
        assert expected in text, expected


def test_a_summary_of_a_run_that_never_trained_is_still_a_summary(tmp_path: Path) -> None:
    text = summary(picture(), Files(run_dir=tmp_path, png=None), headline="headrace demo: stopped by Ctrl-C", now=905.0)
    assert "0 of 10" in text
    assert "learning curve" not in text


async def test_the_status_tells_what_happens_beside_the_rule() -> None:
    """Closed seats, refunds, late results, repeats, rejected messages, tasks in quarantine, and the size of the spool."""
    hub = FakeControl()
    counts = Counts(
        received=80,
        trained=64,
        dropped={"stale": 3, "duplicate seat": 1},
        queued=12,
        closed=5,
        refunded=8,
        late_results=1,
        duplicates=7,
        rejected=2,
    )
    rollouts = RolloutCounts(
        admitted=101, offered=80, failed={"timeout": 5}, retried=9, in_flight=16, quarantined_tasks=2, late_results=4
    )
    await hub.publish("trainer", trainer(counts=counts, state=TrainerState.WAITING, detail="groups 1 of 2"))
    recovery = Recovery(process=2, continued=7, restarted=1, tokens_kept=1295, tokens_lost_at_most=210)
    said = rollouter(counts=rollouts, state=RollouterState.AT_LIMIT, detail="0.5 periods ahead")
    await hub.publish("rollouter", said.model_copy(update={"recovery": recovery}))
    state = State("ipc:///x", hub, spool_bytes=12345)
    text = state_as_text(state, now=1000.0)
    for expected in (
        "4 dropped (duplicate seat 1, stale 3)",
        "closed seats 5, given back to admission 8, late results 1, came again and refused 7, rejected 2",
        "offered 80, 5 failed (timeout 5), retried 9",
        "late results refused 4, tasks in quarantine 2",
        "7 replies went on, 1 began anew; 1,295 tokens kept, at most 210 lost",
        "12,345 bytes of records until a checkpoint covers them",
        "trainer: groups 1 of 2; rollouter: 0.5 periods ahead",
        "101 issued = 64 trained + 4 dropped (duplicate seat 1, stale 3) + 5 failed (timeout 5) + 12 queued + 16 in flight",
    ):
        assert expected in text, text
    assert state_as_json(state)["spool_bytes"] == 12345


async def test_the_status_says_how_the_newest_round_stands() -> None:
    hub = FakeControl()
    newest = RoundSummary(
        policy_version=7,
        state=RoundState.PARTIALLY_COMMITTED,
        committed=("engine-0",),
        failed={"engine-1": "not staged in time"},
        stage_ms={"engine-0": 120.0},
        pause_ms={"engine-0": 35.0},
        seconds=0.5,
        version_spread=1,
    )
    await hub.publish("trainer", trainer().model_copy(update={"round": newest}))
    text = state_as_text(State("ipc:///x", hub), now=1000.0)
    assert (
        "version 7 partially committed, on 1 of 2 engines, after 0.50 s (staged in 0.12 s, longest pause 35 ms), "
        "versions 1 apart, engine-1: not staged in time" in text
    ), text


def test_the_summary_of_a_run_with_journals_takes_the_ledger_from_them(tmp_path: Path) -> None:
    write_run(some_steps(), tmp_path)
    text = summary(_running(), Files(run_dir=tmp_path, png=None), headline="x", now=1031.0)
    assert "10 issued = 6 trained + 0 dropped + 1 failed (timeout 1) + 0 queued + 2 on the way + 1 in flight" in text
    (tmp_path / "journal" / RUN_ID / "trainer.log").write_bytes(b"no journal at all")
    assert "the journals cannot be read" in summary(_running(), Files(run_dir=tmp_path, png=None), headline="x", now=1031.0)
