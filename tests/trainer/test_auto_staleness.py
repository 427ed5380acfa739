"""When staleness_threshold moves by itself, whereto, and when it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AutoStalenessSettings
from trainer.auto_staleness import (
    BENEFIT,
    ESS_MARGIN,
    LEAST,
    MAX_PATIENCE,
    RAISE,
    REMEMBERED,
    Move,
    Observation,
    State,
    observe,
    settling_steps,
)

SETTINGS = AutoStalenessSettings(
    enabled=True, target_waiting_share=0.1, min_effective_sample_size=0.8, min=0.0, max=4.0, interval_steps=4
)


def step(waiting: float, ess: float = 1.0) -> Observation:
    return Observation(waiting_s=waiting, elapsed_s=1.0, effective_sample_size=ess)


@dataclass(slots=True)
class Trainer:
    """Lets the controller see steps and does what it says."""

    threshold: float
    settings: AutoStalenessSettings = SETTINGS
    steps_per_period: int = 1
    state: State = field(default_factory=State)

    def see(self, seen: Observation) -> Move | None:
        self.state, move = observe(
            self.state, seen, threshold=self.threshold, steps_per_period=self.steps_per_period, settings=self.settings
        )
        if move is not None:
            self.threshold = move.threshold
        return move

    def see_many(self, count: int, seen: Observation) -> list[Move]:
        return [move for move in (self.see(seen) for _ in range(count)) if move is not None]

    def settle(self) -> None:
        """Until what was admitted before is consumed."""
        self.see(step(0.07))
        while self.state.num_to_settle:
            self.see(step(0.07))


def test_a_trainer_that_waits_lets_generation_run_further_ahead() -> None:
    trainer = Trainer(0.5)
    trainer.settle()
    (move,) = trainer.see_many(4, step(0.3))
    assert move.threshold == 0.75
    assert "30.0%" in move.why


def test_weights_that_spread_too_far_halve_it_at_once_however_much_the_trainer_waits() -> None:
    trainer = Trainer(2.0)
    trainer.settle()
    trainer.see_many(3, step(0.9))
    move = trainer.see(step(0.9, ess=0.5))
    assert move is not None, "one bad step in a window is enough"
    assert move.threshold == 1.0


def test_the_decrease_ends_at_the_lower_bound_and_not_in_ever_smaller_halves() -> None:
    trainer = Trainer(1.0)
    halves = [move.threshold for move in trainer.see_many(100, step(0.0, ess=0.1))]
    assert halves == [0.5, 0.25, 0.125, 0.0625, 0.0]
    assert trainer.see_many(40, step(0.0, ess=0.1)) == []


def test_between_half_the_target_and_the_target_nothing_moves() -> None:
    trainer = Trainer(1.0)
    assert trainer.see_many(200, step(0.07)) == []


def test_no_raise_where_the_effective_sample_size_has_no_room_below_it() -> None:
    trainer = Trainer(1.0)
    trainer.settle()
    assert trainer.see_many(40, step(0.9, ess=0.82)) == []


def test_what_the_change_before_set_in_motion_is_not_looked_at() -> None:
    """Samples that were admitted under another threshold say nothing about this one."""
    trainer = Trainer(2.0, steps_per_period=2)
    trainer.settle()
    (move,) = trainer.see_many(4, step(0.5))
    assert trainer.threshold == move.threshold == 2.25
    assert trainer.see_many(settling_steps(2.25, 2), step(0.5, ess=0.01)) == []
    assert [moved.threshold for moved in trainer.see_many(4, step(0.4))] == [2.5]


def test_a_human_change_begins_a_new_window() -> None:
    trainer = Trainer(1.0)
    trainer.settle()
    trainer.see_many(3, step(0.9))
    trainer.threshold = 3.0
    assert trainer.see_many(settling_steps(3.0, 1) + 3, step(0.9)) == []
    assert trainer.see(step(0.9)) is not None


@pytest.mark.parametrize(("given_value", "bounded"), [(0.25, 1.0), (9.0, 3.0)])
def test_a_threshold_outside_the_bounds_is_brought_to_the_nearest_one(given_value: float, bounded: float) -> None:
    trainer = Trainer(given_value, settings=SETTINGS.model_copy(update={"min": 1.0, "max": 3.0}))
    move = trainer.see(step(0.07))
    assert move is not None
    assert move.threshold == bounded
    assert "outside" in move.why


def test_switched_off_it_looks_at_nothing_and_starts_anew_when_switched_on() -> None:
    trainer = Trainer(1.0)
    trainer.settle()
    trainer.see_many(3, step(0.9))
    trainer.settings = SETTINGS.model_copy(update={"enabled": False})
    assert trainer.see_many(50, step(0.9, ess=0.1)) == []
    assert trainer.state == State()


def test_a_run_that_oscillates_comes_to_rest() -> None:
    """The trainer waits below 1 and never above: each turn doubles the windows that the next move needs."""
    trainer = Trainer(1.0)
    moves = [number for number in range(3000) if trainer.see(step(0.3 if trainer.threshold < 1.0 else 0.0)) is not None]
    early, late = (sum(low <= at < low + 1000 for at in moves) for low in (0, 2000))
    assert early > late
    assert late <= 1000 // (MAX_PATIENCE // 2 * SETTINGS.interval_steps)
    assert trainer.state.patience >= MAX_PATIENCE // 2


def test_a_run_that_has_far_to_go_gets_there() -> None:
    trainer = Trainer(0.0)
    for _ in range(400):
        trainer.see(step(0.95 - 0.2 * trainer.threshold))
    assert trainer.threshold == 4.0


def test_a_raise_that_does_not_shorten_the_wait_is_taken_back_and_not_tried_again_soon() -> None:
    """Generation is too slow: running further ahead would age the samples and help nobody."""
    trainer = Trainer(1.0)
    trainer.settle()
    up, back = trainer.see_many(12, step(0.8))
    assert (up.threshold, back.threshold) == (1.25, 1.0)
    assert "of no use" in back.why
    assert trainer.see_many(4 * (REMEMBERED - 1), step(0.8)) == []
    assert [move.threshold for move in trainer.see_many(4 * 8, step(0.8))] == [1.25, 1.0]


def test_a_raise_after_which_a_human_set_another_value_is_not_taken_back() -> None:
    trainer = Trainer(1.0)
    trainer.settle()
    trainer.see_many(4, step(0.8))
    trainer.threshold = 2.0
    trainer.settle()
    assert [move.threshold for move in trainer.see_many(4, step(0.8))] == [2.25]


@given(
    st.floats(0, 6),
    st.floats(0, 2),
    st.floats(0, 4),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1), st.integers(1, 12)), max_size=40),
    st.integers(1, 4),
)
def test_moves_stay_within_bounds_change_something_and_say_why(
    threshold: float, low: float, width: float, phases: list[tuple[float, float, int]], steps_per_period: int
) -> None:
    bounds = SETTINGS.model_copy(update={"min": low, "max": low + width})
    trainer = Trainer(threshold, settings=bounds, steps_per_period=steps_per_period)
    since_move = 0
    for waiting, ess, count in phases:
        for _ in range(count):
            before, since_move = trainer.threshold, since_move + 1
            move = trainer.see(step(waiting, ess))
            if move is None:
                assert trainer.threshold == before
                continue
            assert low <= move.threshold <= low + width
            assert move.threshold != before
            assert move.why
            if "outside" not in move.why:
                assert since_move > settling_steps(before, steps_per_period)
                assert move.threshold > before or move.threshold <= max(low, before - min(0.125, before / 2) + 1e-9, LEAST)
            since_move = 0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.79)), min_size=4, max_size=80))
def test_below_the_floor_it_never_rises(seen: list[tuple[float, float]]) -> None:
    trainer = Trainer(2.0)
    for waiting, ess in seen:
        before = trainer.threshold
        trainer.see(step(waiting, ess))
        assert trainer.threshold <= before


@given(
    st.floats(0, 4),
    st.floats(0, 0.9),
    st.floats(0.05, 1.0),
    st.floats(0.01, 0.3),
    st.lists(st.floats(-0.01, 0.01), min_size=16, max_size=16),
)
@settings(max_examples=40)
def test_in_a_closed_loop_it_stays_where_both_targets_hold_or_cannot_hold_together(
    threshold: float, wait_at_zero: float, relief: float, spread: float, noise: list[float]
) -> None:
    """A run whose waiting falls and whose weights spread as the threshold rises, with noise on both. Once it is there, the
    effective sample size is nearly always above its floor, and mostly the trainer waits no more than it may, unless the next
    raise would be of no use, or would cost the effective sample size its margin, or the upper bound forbids it."""
    floor = SETTINGS.min_effective_sample_size
    margin = floor + ESS_MARGIN * (1 - floor) + 0.02

    def waiting_at(at: float) -> float:
        return max(0.0, wait_at_zero - relief * at)

    def ess_at(at: float) -> float:
        return 1 / (1 + spread * at**2)

    def is_right(at: float) -> bool:
        waits_little = waiting_at(at) <= SETTINGS.target_waiting_share + 0.02
        of_no_use = waiting_at(at) - waiting_at(at + RAISE) < BENEFIT * waiting_at(at) + 0.02
        may_not = at == SETTINGS.max or ess_at(at + RAISE) < margin
        return ess_at(at) >= floor - 0.02 and (waits_little or of_no_use or may_not)

    trainer, visited = Trainer(threshold), []
    for number in range(1200):
        shaken, at = noise[number % len(noise)], trainer.threshold
        trainer.see(step(min(1.0, max(0.0, waiting_at(at) + shaken)), min(1.0, max(0.01, ess_at(at) + shaken))))
        visited.append(at)
    late = visited[600:]
    assert sum(ess_at(at) < floor - 0.02 for at in late) <= 0.1 * len(late)
    assert sum(is_right(at) for at in late) >= 0.6 * len(late)


def test_what_was_too_high_is_not_tried_again_at_once() -> None:
    trainer = Trainer(1.0)
    trainer.settle()
    trainer.see_many(4, step(0.5, ess=0.5))
    assert trainer.threshold == 0.5
    (up,) = [move for move in (trainer.see(step(0.9 - 0.5 * trainer.threshold)) for _ in range(100)) if move is not None]
    assert up.threshold == 0.75
    later = [move for move in (trainer.see(step(0.9 - 0.5 * trainer.threshold)) for _ in range(100)) if move is not None]
    assert later[0].threshold == 1.0
