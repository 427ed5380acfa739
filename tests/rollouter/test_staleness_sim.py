"""The simulated pipeline behind `benchmarks.staleness`: what it shows must follow from the real admission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.staleness import draw, mean_of
from benchmarks.staleness_sim import Plant, simulate

PLANT = Plant(num_steps=60, warmup_steps=0, samples_per_step=64, num_slots=128, sigma=1.2)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0, 2.0])
def test_mean_age_is_at_most_the_threshold_and_pacing_drops_nothing(threshold: float) -> None:
    point = simulate(PLANT, staleness_threshold=threshold)
    assert point.staleness_mean <= threshold
    assert point.dropped_share == point.discarded_token_share == 0


def test_at_threshold_zero_nothing_is_stale_however_long_the_tail() -> None:
    """B41"""
    point = simulate(PLANT, staleness_threshold=0)
    assert (point.staleness_max, point.token_staleness_mean) == (0, 0)


def test_pacing_alone_lets_stragglers_age_and_the_gate_does_not() -> None:
    paced = simulate(PLANT, staleness_threshold=1)
    gated = simulate(PLANT, staleness_threshold=1, max_staleness=1)
    assert paced.staleness_max > 2
    assert paced.above_bound_share > 0
    assert (gated.staleness_max, gated.above_bound_share) == (1, 0)


def test_gate_costs_tokens_and_prefers_short_answers() -> None:
    gated = simulate(PLANT, staleness_threshold=1, max_staleness=1)
    assert gated.dropped_share > 0
    assert gated.discarded_token_share > gated.dropped_share
    assert gated.trained_tokens_mean < gated.drawn_tokens_mean


def test_running_ahead_keeps_the_trainer_busier() -> None:
    idle = [simulate(PLANT, staleness_threshold=at).trainer_idle_share for at in (0.0, 1.0, 4.0)]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] - idle[2] > 0.2


def test_period_of_several_steps_is_counted_in_versions() -> None:
    point = simulate(replace(PLANT, trigger_parameter_sync_step=4), staleness_threshold=0.5)
    assert point.staleness_mean <= 0.5


def test_same_seed_gives_the_same_point_and_seeds_are_averaged() -> None:
    first, second = (simulate(replace(PLANT, seed=seed), staleness_threshold=1) for seed in (0, 1))
    assert simulate(PLANT, staleness_threshold=1) == first
    both = mean_of([first, second])
    assert both.samples_per_s == pytest.approx((first.samples_per_s + second.samples_per_s) / 2)
    assert both.staleness_max == max(first.staleness_max, second.staleness_max)


def test_plot_is_drawn(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plot") / "staleness.png"
    points = [simulate(PLANT, staleness_threshold=at, max_staleness=gate) for at in (0.0, 1.0) for gate in (None, 1)]
    draw(points, (), path)
    assert path.read_bytes()[1:4] == b"PNG"
