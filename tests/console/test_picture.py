"""The picture of a run, put together from topics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from console.picture import Phase, phase_seconds, whole_percents
from tests.console.builders import evaluation, picture, rollouter, step, trainer


def test_steps_are_kept_once_and_in_order_whatever_the_order_of_arrival() -> None:
    run = picture()
    run.add_steps([step(3), step(1), step(3, reward_mean=0.9), step(2)])
    assert [item.step for item in run.history] == [1, 2, 3]
    assert run.history[2].reward_mean == step(3).reward_mean
    assert run.missing_steps == 0


def test_missing_steps_are_counted() -> None:
    run = picture()
    run.add_steps([step(1), step(5)])
    assert run.missing_steps == 3


def test_rates_count_the_steps_of_the_window_and_fall_when_nothing_comes() -> None:
    run = picture()
    run.add_steps([step(1), step(2), step(3)])
    fresh = run.rates(1006.0)
    assert fresh.samples_per_s == 3 * 64 / 6.0
    assert fresh.trained_tokens_per_s == 3 * 128 / 6.0
    assert run.rates(1016.0).samples_per_s < fresh.samples_per_s
    assert run.rates(2000.0).samples_per_s == 0


def test_staleness_is_weighted_by_samples() -> None:
    run = picture()
    run.add_steps([step(1, staleness_mean=0.0, staleness_max=0, num_samples=10), step(2, staleness_mean=1.0, num_samples=30)])
    assert run.mean_staleness == 0.75
    assert run.max_staleness == 1


def test_phases_follow_the_milestones_of_a_run() -> None:
    run = picture(num_steps=2)
    run.see_connected(902.0)
    run.see_trainer(trainer(step=0, policy_version=0), 910.0)
    run.see_rollouter(rollouter(policy_version=0), 925.0)
    run.see_trainer(trainer(step=0, evaluations=(evaluation(0, 0.3),)), 930.0)
    run.see_trainer(trainer(last_step=step(1, finished_at=940.0)), 940.1)
    run.see_trainer(trainer(last_step=step(2, finished_at=950.0)), 950.1)
    run.see_end(953.0)
    assert run.phase_seconds(953.0) == {
        Phase.SET_UP: 2.0,
        Phase.MODEL: 8.0,
        Phase.ENGINES: 15.0,
        Phase.EVALUATION: 5.0,
        Phase.TRAINING: 20.0,
        Phase.CLOSING: 3.0,
    }


def test_a_run_without_first_evaluation_goes_from_engines_to_training() -> None:
    run = picture(num_steps=2)
    run.see_connected(901.0)
    run.see_trainer(trainer(), 902.0)
    run.see_rollouter(rollouter(), 905.0)
    run.see_trainer(trainer(last_step=step(1, finished_at=915.0)), 915.0)
    seconds = run.phase_seconds(920.0)
    assert seconds[Phase.EVALUATION] == 0
    assert seconds[Phase.TRAINING] == 15.0


def test_a_run_that_is_broken_off_ends_in_the_phase_it_was_in() -> None:
    run = picture()
    run.see_connected(902.0)
    run.see_trainer(trainer(step=0), 910.0)
    run.see_stopping(930.0)
    run.see_end(933.0)
    seconds = run.phase_seconds(933.0)
    assert (seconds[Phase.MODEL], seconds[Phase.ENGINES], seconds[Phase.CLOSING]) == (8.0, 20.0, 3.0)
    assert run.is_stopping


@given(
    ended=st.dictionaries(
        st.sampled_from([phase for phase in Phase if phase is not Phase.CLOSING]), st.floats(0, 100, allow_nan=False)
    ),
    now=st.floats(0, 200, allow_nan=False),
)
def test_phases_always_sum_to_the_time_since_the_start(ended: dict[Phase, float], now: float) -> None:
    seconds = phase_seconds(ended, started_at=0.0, now=now)
    assert abs(sum(seconds.values()) - now) < 1e-6
    assert all(value >= 0 for value in seconds.values())


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1, allow_nan=False), min_size=1, max_size=6))
def test_whole_percents_sum_to_100_or_to_nothing(shares: dict[str, float]) -> None:
    percents = whole_percents(shares)
    assert sum(percents.values()) == (100 if any(shares.values()) else 0)
    assert all(percent >= 0 for percent in percents.values())


def test_pauses_are_kept_by_engine_and_version() -> None:
    run = picture()
    run.see_rollouter(rollouter(), 1.0)
    run.see_rollouter(rollouter(), 2.0)
    assert run.pauses == {("engine-0", 3): 35.0}


def test_a_run_whose_settings_ask_for_no_first_evaluation_is_never_said_to_do_one() -> None:
    run = picture(num_steps=2)
    run.has_first_evaluation = False
    run.see_connected(901.0)
    run.see_trainer(trainer(), 902.0)
    run.see_rollouter(rollouter(), 905.0)
    run.see_stopping(910.0)
    seconds = run.phase_seconds(912.0)
    assert (seconds[Phase.EVALUATION], seconds[Phase.TRAINING], seconds[Phase.CLOSING]) == (0.0, 5.0, 2.0)
