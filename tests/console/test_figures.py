"""The benchmark's figures."""

from __future__ import annotations

import pytest

from benchmarks.figures import figures_of, figures_of_peer, ratio_line, table
from tests.console.builders import evaluation, picture, rollouter, step, trainer


def test_figures_of_a_run_come_from_its_training_phase() -> None:
    run = picture(num_steps=4)
    run.see_connected(905.0)
    run.see_trainer(trainer(step=0), 910.0)
    run.see_rollouter(rollouter(), 920.0)
    run.see_trainer(trainer(step=0, evaluations=(evaluation(0, 0.3),)), 1000.0)
    for number in range(1, 5):
        run.see_trainer(trainer(last_step=step(number), evaluations=(evaluation(0, 0.3), evaluation(4, 0.8))), 1100.0)
    run.see_end(1010.0)
    figures = figures_of(run, name="x", ended_at=1010.0)
    assert figures.training_s == 8.0
    assert figures.samples_per_s == 4 * 64 / 8.0
    assert figures.trained_tokens_per_s == 4 * 128 / 8.0
    assert figures.wall_s == 110.0
    assert sum(figures.time_percents.values()) == 100
    assert (figures.sync_pause_median_ms, figures.sync_pause_max_ms) == (35.0, 35.0)
    assert (figures.accuracy_first, figures.accuracy_last) == (0.3, 0.8)
    assert sum(figures.phases_s.values()) == pytest.approx(110.0)


def test_runs_stand_side_by_side_and_missing_figures_are_dashes() -> None:
    run = picture(num_steps=2)
    run.see_trainer(trainer(last_step=step(2)), 1004.0)
    ours = figures_of(run, name="ours", ended_at=1010.0)
    peer = figures_of_peer(
        name="peer", rewards=[0.1, 0.2], trained_tokens=100, samples_per_step=64, training_s=26.0, wall_s=40.0
    )
    lines = table([ours, peer]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any(line.split() == ["trainer", "time", "sum", "%", "100", "-"] for line in lines)
    assert "peer 13.00 s" in ratio_line(ours, peer)


def test_a_run_without_steps_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no step"):
        figures_of(picture(), name="x", ended_at=1.0)
    with pytest.raises(ValueError, match="no step"):
        figures_of_peer(name="x", rewards=[], trained_tokens=0, samples_per_step=1, training_s=1.0, wall_s=1.0)
