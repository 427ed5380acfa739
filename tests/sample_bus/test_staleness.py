from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.messages import SeatDemand
from sample_bus.sample import NO_VERSION
from sample_bus.staleness import (
    AdmissionLedger,
    Pace,
    SeatClock,
    budget,
    sample_staleness,
    seats_of_run,
    token_staleness,
)
from tests.fakes.samples import make_sample

PERIOD = 10


def pace(threshold: float = 0.0, *, samples_per_step: int = PERIOD, steps: int = 1) -> Pace:
    return Pace(staleness_threshold=threshold, samples_per_step=samples_per_step, samples_per_period=samples_per_step * steps)


@pytest.mark.parametrize(
    ("version", "origin", "threshold", "expected"),
    [(0, 0, 0.0, 64), (0, 0, 0.5, 96), (3, 0, 1.0, 320), (1000, 1000, 2.0, 192), (7, 5, 0.1, Fraction(992, 5))],
)
def test_budget_is_the_formula_counted_from_the_origin(version: int, origin: int, threshold: float, expected: Fraction) -> None:
    assert budget(version, origin, threshold, 64) == expected
    assert budget(version, origin, threshold, 64, consumed_seats=(version - origin) * 64) == expected


def test_budget_counts_what_steps_took_and_not_versions_when_the_period_has_changed() -> None:
    """Nine periods of 64, then periods of 16: the formula over versions would give 160 and hold everything for ever."""
    assert budget(9, 0, 1.0, 16, consumed_seats=9 * 64) == 9 * 64 + 32
    assert budget(9, 0, 1.0, 16) == 11 * 16


def test_decimal_threshold_is_that_decimal_and_not_its_binary_neighbour() -> None:
    """0.1 * 3 periods of 10: floats say 3.0000000000000004, and at 0.7 they lose a sample."""
    ledger = AdmissionLedger()
    ledger.admit(17)
    assert not ledger.may_admit(1, policy_version=0, pace=pace(0.7))
    ledger.refund(1)
    assert ledger.may_admit(1, policy_version=0, pace=pace(0.7))
    assert budget(0, 0, 0.1, 10) == 11
    assert budget(0, 0, 1e-07, 10**7) == 10**7 + 1


@given(
    st.integers(1, 16),
    st.integers(1, 20),
    st.decimals(0, 5, places=3, allow_nan=False),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_admission_never_exceeds_the_budget_and_stops_only_at_it(
    group_size: int, groups_per_period: int, threshold: object, events: list[tuple[bool, int]]
) -> None:
    period = group_size * groups_per_period
    ledger = AdmissionLedger()
    ledger.rebase(origin_version=5, accounted=0)
    version, at = 5, float(str(threshold))
    for publish, refunds in events:
        if publish:
            version += 1
        while ledger.may_admit(group_size, policy_version=version, pace=pace(at, samples_per_step=period)):
            ledger.admit(group_size)
        exact = Fraction(str(at)) * period + (version - 5 + 1) * period
        assert ledger.outstanding <= exact < ledger.outstanding + group_size
        ledger.refund(min(refunds, ledger.outstanding))


def test_threshold_zero_starts_exactly_the_next_periods_samples() -> None:
    ledger = AdmissionLedger()
    for version in range(10):
        started = 0
        while ledger.may_admit(8, policy_version=version, pace=pace(samples_per_step=64)):
            ledger.admit(8)
            started += 8
        assert started == 64


def test_resumption_at_a_high_version_opens_no_flood() -> None:
    """B29: accepted=0, version=1000, bound=2, batch=8: room for 24, not 8,024."""
    ledger = AdmissionLedger()
    ledger.admit(5000)
    ledger.rebase(origin_version=1000, accounted=0)
    assert ledger.room(policy_version=1000, pace=pace(2, samples_per_step=8)) == 24


def test_rebase_counts_what_the_trainer_has_and_what_is_in_flight() -> None:
    ledger = AdmissionLedger()
    ledger.rebase(origin_version=3, accounted=5, in_flight=4)
    assert ledger.outstanding == 9
    assert ledger.room(policy_version=4, pace=pace(samples_per_step=8)) == 7


def test_refund_of_more_than_is_outstanding_is_an_error() -> None:
    ledger = AdmissionLedger(admitted=3)
    with pytest.raises(ValueError, match="refund of 4: got more than the 3"):
        ledger.refund(4)


def test_lowered_threshold_admits_nothing_until_the_version_catches_up() -> None:
    ledger = AdmissionLedger(admitted=24)
    now = pace(samples_per_step=8)
    assert not ledger.may_admit(1, policy_version=0, pace=now)
    assert not ledger.may_admit(1, policy_version=2, pace=now)
    assert ledger.may_admit(8, policy_version=3, pace=now)


def test_next_version_takes_what_its_steps_took_and_the_others_will_take() -> None:
    """Of three steps to the next version one has taken 7 seats before steps grew to 10."""
    clock = SeatClock()
    clock.take(4, consumed_seats=28, demand=SeatDemand(taken_seats=35, begun_step=5, sync_step=7))
    assert clock.due(4, pace(samples_per_step=10, steps=3)) == 55
    clock.take(4, consumed_seats=28, demand=SeatDemand(taken_seats=55, begun_step=7, sync_step=7))
    assert clock.due(4, pace(samples_per_step=99, steps=3)) == 55


def test_engines_that_are_behind_count_to_the_version_that_is_published_already() -> None:
    clock = SeatClock()
    clock.take(1, consumed_seats=30, demand=SeatDemand(taken_seats=30, begun_step=3, sync_step=6))
    clock.take(2, consumed_seats=37, demand=SeatDemand(taken_seats=41, begun_step=7, sync_step=9))
    assert clock.due(1, pace(samples_per_step=4, steps=3)) == 37
    clock.forget_before(2)
    assert clock.due(2, pace(samples_per_step=4, steps=3)) == 41 + 2 * 4


def test_a_version_that_was_never_named_counts_no_more_than_the_next_one_that_was() -> None:
    clock = SeatClock()
    clock.take(5, consumed_seats=23, demand=None)
    assert clock.due(1, pace(samples_per_step=10)) == 20
    assert clock.due(3, pace(samples_per_step=10)) == 23
    assert clock.due(5, pace(samples_per_step=10)) == 33


def test_run_needs_what_its_steps_took_and_what_is_left_at_todays_size() -> None:
    demand = SeatDemand(taken_seats=640, begun_step=10, sync_step=12)
    assert seats_of_run(demand, num_steps=100, samples_per_step=16) == 640 + 90 * 16


def test_samples_staleness_is_that_of_its_oldest_sampled_token() -> None:
    """B30: time in the queue counts, for the version is the trainer's of now."""
    sample = make_sample(
        prompt=[1, 2], reply=[3, 4, 5], version_starts=np.array([0, 2, 4], np.int32), versions=np.array([-1, 3, 6], np.int32)
    )
    assert sample_staleness(sample, 9) == 6
    assert token_staleness(sample, 9).tolist() == [0, 0, 6, 6, 3]
    assert token_staleness(sample, 9).dtype == np.int32


def test_sample_from_a_version_that_was_rolled_back_is_negative_and_one_without_sampled_tokens_zero() -> None:
    """B48."""
    assert sample_staleness(make_sample(policy_version=9), 7) == -2
    untrained = make_sample(reply=[])
    assert untrained.versions.tolist() == [NO_VERSION]
    assert sample_staleness(untrained, 7) == 0
