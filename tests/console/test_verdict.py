"""How a run ended."""

from __future__ import annotations

import signal

import pytest

from console.verdict import judge
from sample_bus.messages import EndOfRun, EndReason

FINISHED = EndOfRun(reason=EndReason.FINISHED)


def test_both_daemons_ending_well_is_a_finished_run() -> None:
    verdict = judge({"rollouter": 0, "trainer": 0}, end=FINISHED, stopped_by=None)
    assert (verdict.exit_code, verdict.headline) == (0, "finished")


def test_the_first_daemon_to_die_is_named_first() -> None:
    verdict = judge({"rollouter": -9, "trainer": 1}, end=None, stopped_by=None)
    assert (verdict.exit_code, verdict.headline) == (1, "failed: rollouter killed by SIGKILL, trainer exit code 1")


def test_a_trainer_that_ends_for_the_rollouter_is_not_named_as_the_cause() -> None:
    end = EndOfRun(reason=EndReason.FAILED, message="RolloutFailed: EvaluationFailed: no")
    verdict = judge({"trainer": 1, "rollouter": None}, end=end, stopped_by=None)
    assert verdict.headline == "failed: rollouter could not go on, trainer exit code 1"


def test_a_refused_setting_is_told_apart_from_a_failure() -> None:
    assert judge({"rollouter": 2, "trainer": None}, end=None, stopped_by=None).exit_code == 2
    assert judge({"trainer": 1, "rollouter": 2}, end=None, stopped_by=None).exit_code == 2


def test_a_daemon_that_does_not_follow_the_other_is_a_failure() -> None:
    verdict = judge({"rollouter": 0, "trainer": None}, end=None, stopped_by=None)
    assert verdict.exit_code == 1
    assert verdict.headline == "failed: rollouter ended and trainer did not follow"


def test_a_failed_end_is_a_failure_even_with_clean_exits() -> None:
    verdict = judge({"rollouter": 0, "trainer": 0}, end=EndOfRun(reason=EndReason.FAILED, message="no"), stopped_by=None)
    assert (verdict.exit_code, verdict.headline) == (1, "failed: no")


@pytest.mark.parametrize("reason", [EndReason.DRAINED, EndReason.STOPPED])
def test_a_run_that_was_ended_on_request_did_not_finish(reason: EndReason) -> None:
    end = EndOfRun(reason=reason, message="after step 7")
    verdict = judge({"rollouter": 0, "trainer": 0}, end=end, stopped_by=None)
    assert (verdict.exit_code, verdict.headline) == (1, f"{reason} before the last step: after step 7")


def test_the_user_who_stops_is_told_so_with_the_shell_convention() -> None:
    verdict = judge({"trainer": None, "rollouter": None}, end=None, stopped_by=signal.SIGINT)
    assert (verdict.exit_code, verdict.headline) == (130, "stopped by Ctrl-C")
    assert judge({}, end=None, stopped_by=signal.SIGTERM).exit_code == 143


def test_what_could_not_be_cleaned_away_makes_any_run_a_failure() -> None:
    verdict = judge({"rollouter": 0, "trainer": 0}, end=FINISHED, stopped_by=None, left=("process 7 (x)",))
    assert (verdict.exit_code, verdict.headline) == (1, "finished; left behind: process 7 (x)")
