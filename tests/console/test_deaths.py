"""Whose failure it was."""

from __future__ import annotations

from pathlib import Path

from console.deaths import Death, death_lines

LOG = Path("/run/logs/rollouter.log")
TRAINER = Death(
    name="trainer",
    exit_code=1,
    reason="trainer failed error=RolloutFailed: EvaluationFailed: the first 16 attempts all failed",
    log=Path("/run/logs/trainer.log"),
)
ROLLOUTER = Death(name="rollouter", exit_code=1, reason="EvaluationFailed: all failed", log=LOG)


def test_a_trainer_that_ends_for_the_rollouter_names_it_and_its_log() -> None:
    (line,) = death_lines([TRAINER], rollouter_log=LOG)
    assert line == (
        "rollouter could not go on, and the trainer ended with it: EvaluationFailed: the first 16 attempts all failed; "
        "log: /run/logs/rollouter.log"
    )


def test_where_the_rollouter_died_too_its_own_words_are_enough() -> None:
    assert death_lines([TRAINER, ROLLOUTER], rollouter_log=LOG) == (
        "rollouter died (exit code 1): EvaluationFailed: all failed; log: /run/logs/rollouter.log",
    )
