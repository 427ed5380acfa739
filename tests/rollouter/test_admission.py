"""Whatever the order of events, no more is admitted than the budget of the version that the engines hold."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from rollouter.admission import Admission, Conditions, HeldVersion, Hold
from sample_bus.messages import SeatDemand
from sample_bus.protocols import Resumption


def _conditions(**changes: object) -> Conditions:
    values: dict[str, object] = {
        "group_size": 4,
        "staleness_threshold": 0.0,
        "max_concurrent_rollouts": 1000,
        "max_staleness": None,
        "num_samples_needed": None,
        "num_in_flight": 0,
        "num_unsettled": 0,
        "num_open_seats": 0,
        "samples_per_step": 8,
        "samples_per_period": 8,
        "max_queued_samples": 10_000,
        "journal_blocked": False,
        "evaluating": False,
        "draining": False,
    }
    return Conditions(**{**values, **changes})  # type: ignore[arg-type]


def _admission(*, version: int | None = 0, origin: int = 0, accounted: int = 0) -> Admission:
    admission = Admission()
    admission.rebase(Resumption(origin_version=origin, accounted=accounted, incarnation="a"), in_flight=0)
    if version is not None:
        _reach(admission, version, origin=origin)
    return admission


def _reach(admission: Admission, version: int, *, origin: int = 0, refunded: int = 0) -> None:
    admission.take_held(HeldVersion(incarnation="a", policy_version=version))
    admission.take_trainer(incarnation="a", origin_version=origin, policy_version=version, num_refunded=refunded)


def _fill(admission: Admission, conditions: Conditions) -> int:
    groups = 0
    while admission.hold(conditions) is None:
        admission.admit(conditions.group_size)
        groups += 1
    return groups


def test_nothing_starts_before_weights_and_origin_are_known() -> None:
    """B18"""
    admission = Admission()
    assert admission.hold(_conditions()) is Hold.NO_TRAINER
    admission.rebase(Resumption(origin_version=0, accounted=0, incarnation="a"), in_flight=0)
    assert admission.hold(_conditions()) is Hold.NO_WEIGHTS
    admission.take_held(HeldVersion(incarnation="a", policy_version=0))
    assert admission.hold(_conditions()) is Hold.NO_TRAINER
    admission.take_trainer(incarnation="a", origin_version=0, policy_version=0, num_refunded=0)
    assert admission.hold(_conditions()) is None


def test_threshold_zero_waits_for_each_version() -> None:
    """B41"""
    admission = _admission()
    for version in range(20):
        _reach(admission, version)
        assert _fill(admission, _conditions()) == 2
        assert admission.hold(_conditions()) is Hold.BUDGET
        # The trainer has published the next version, the engines do not hold it yet: still nothing starts.
        admission.take_trainer(incarnation="a", origin_version=0, policy_version=version + 1, num_refunded=0)
        assert admission.hold(_conditions()) is Hold.BUDGET


def test_threshold_counts_in_periods() -> None:
    assert _fill(_admission(), _conditions(staleness_threshold=0.5)) == 3
    assert _fill(_admission(), _conditions(staleness_threshold=1)) == 4
    assert _fill(_admission(), _conditions(staleness_threshold=0.49)) == 2


def test_restored_version_does_not_open_the_budget() -> None:
    """B29"""
    admission = _admission(version=1000, origin=1000)
    assert _fill(admission, _conditions(group_size=1, staleness_threshold=2)) == 24


def test_origin_learned_late_holds_from_then_on() -> None:
    admission = _admission(version=None)
    admission.take_held(HeldVersion(incarnation="a", policy_version=5))
    assert admission.hold(_conditions()) is Hold.NO_TRAINER
    admission.take_trainer(incarnation="a", origin_version=5, policy_version=5, num_refunded=0)
    assert _fill(admission, _conditions()) == 2


def test_what_the_trainer_gives_back_is_refunded_once() -> None:
    admission = _admission()
    _fill(admission, _conditions())
    for _ in range(3):
        _reach(admission, 0, refunded=3)
    assert admission.hold(_conditions()) is Hold.BUDGET
    for _ in range(3):
        _reach(admission, 0, refunded=4)
    assert _fill(admission, _conditions()) == 1
    admission.take_trainer(incarnation="another", origin_version=0, policy_version=0, num_refunded=100)
    assert admission.hold(_conditions()) is Hold.BUDGET


def test_record_that_the_new_trainer_counted_before_it_was_known_here_counts_once() -> None:
    """The stream held it when the trainer took the producer, its offer returned only afterwards."""
    admission = _admission()
    _fill(admission, _conditions())
    taken = Resumption(origin_version=0, accounted=5, incarnation="b", dropped=2, next_seq=7)
    admission.rebase(taken, in_flight=4)
    admission.stored(6)
    admission.stored(7)
    assert admission.outstanding == 8
    admission.take_held(HeldVersion(incarnation="b", policy_version=0))
    admission.take_trainer(incarnation="b", origin_version=0, policy_version=0, num_refunded=2)
    assert admission.outstanding == 8
    admission.take_trainer(incarnation="b", origin_version=0, policy_version=0, num_refunded=6)
    assert _fill(admission, _conditions()) == 1


def test_nothing_starts_while_the_journal_cannot_be_written() -> None:
    admission = _admission()
    assert admission.hold(_conditions(journal_blocked=True)) is Hold.JOURNAL
    assert admission.hold(_conditions()) is None


def test_nothing_starts_once_the_trainer_has_another_run() -> None:
    admission = _admission()
    admission.forget()
    assert admission.hold(_conditions()) is Hold.NO_TRAINER
    admission.take_trainer(incarnation="a", origin_version=0, policy_version=0, num_refunded=0)
    assert admission.hold(_conditions()) is Hold.NO_TRAINER


def test_versions_of_another_trainer_open_nothing() -> None:
    admission = _admission(version=7, origin=0)
    admission.rebase(Resumption(origin_version=3, accounted=0, incarnation="b"), in_flight=0)
    assert admission.hold(_conditions()) is Hold.NO_WEIGHTS
    admission.take_held(HeldVersion(incarnation="b", policy_version=3))
    admission.take_trainer(incarnation="b", origin_version=3, policy_version=3, num_refunded=0)
    assert _fill(admission, _conditions()) == 2


def test_shorter_periods_set_live_do_not_hold_what_the_trainer_needs() -> None:
    """Fifty periods of 64 were taken before steps shrank to 8: seats count, not versions."""
    admission = _admission(accounted=50 * 64)
    admission.take_held(HeldVersion(incarnation="a", policy_version=50))
    demand = SeatDemand(taken_seats=50 * 64, begun_step=50, sync_step=51)
    admission.take_trainer(
        incarnation="a", origin_version=0, policy_version=50, num_refunded=0, consumed_seats=50 * 64, demand=demand
    )
    assert _fill(admission, _conditions(staleness_threshold=1)) == 4


def test_step_in_progress_and_the_rest_of_its_period_are_what_the_next_version_takes() -> None:
    admission = _admission()
    demand = SeatDemand(taken_seats=4, begun_step=1, sync_step=3)
    admission.take_trainer(incarnation="a", origin_version=0, policy_version=0, num_refunded=0, consumed_seats=0, demand=demand)
    assert _fill(admission, _conditions(samples_per_step=8, samples_per_period=24)) == (4 + 2 * 8) // 4


def test_evaluation_goes_first() -> None:
    assert _admission().hold(_conditions(evaluating=True)) is Hold.EVALUATING


def test_versions_that_could_only_bring_stale_samples_start_nothing() -> None:
    admission = _admission(version=2)
    admission.take_trainer(incarnation="a", origin_version=0, policy_version=4, num_refunded=0)
    assert admission.hold(_conditions(max_staleness=1)) is Hold.TOO_OLD
    assert admission.hold(_conditions(max_staleness=2)) is None


def test_no_more_is_started_than_the_run_needs() -> None:
    """B45: a drop is replaced even then."""
    admission = _admission()
    conditions = _conditions(staleness_threshold=100, num_samples_needed=24)
    assert _fill(admission, conditions) == 6
    assert admission.hold(conditions) is Hold.ENOUGH
    _reach(admission, 0, refunded=4)
    assert _fill(admission, conditions) == 1


def test_group_larger_than_the_limit_is_an_error_at_once() -> None:
    """B28"""
    with pytest.raises(ConfigError, match="max_concurrent_rollouts: got 3, below group_size=4"):
        _admission().hold(_conditions(max_concurrent_rollouts=3))


def test_limit_lowered_and_raised_live_holds_from_the_next_admission() -> None:
    """B28"""
    admission = _admission()

    def hold(limit: int, num_in_flight: int) -> Hold | None:
        conditions = _conditions(max_concurrent_rollouts=limit, num_in_flight=num_in_flight, samples_per_period=100)
        return admission.hold(conditions)

    assert hold(16, 12) is None
    assert hold(4, 16) is Hold.CONCURRENCY
    assert hold(4, 4) is Hold.CONCURRENCY
    assert hold(8, 4) is None


@given(
    group_size=st.integers(2, 4),
    groups_per_step=st.integers(1, 3),
    spare=st.integers(0, 12),
    order=st.lists(st.integers(0, 1000), max_size=200),
)
def test_bus_never_fills_with_groups_that_lack_a_seat(
    group_size: int, groups_per_step: int, spare: int, order: list[int]
) -> None:
    """B13: rollouts end in any order; samples wait for credit; the trainer settles whole steps only; it never gets stuck."""
    step = group_size * groups_per_step
    limit = step + spare
    in_flight: list[int] = []
    waiting: list[int] = []
    arrived: list[int] = []
    trained = issued = 0

    def settle() -> None:
        nonlocal trained
        while True:
            while waiting and len(arrived) < limit:
                arrived.append(waiting.pop(0))
            whole = [group for group in dict.fromkeys(arrived) if arrived.count(group) == group_size][:groups_per_step]
            if len(whole) < groups_per_step:
                return
            arrived[:] = [group for group in arrived if group not in whole]
            trained += step

    for choice in [*order, *range(300)]:
        open_groups = {*in_flight, *waiting}
        conditions = _conditions(
            group_size=group_size,
            num_unsettled=len(arrived) + len(in_flight) + len(waiting),
            num_open_seats=len(open_groups) * group_size,
            samples_per_step=step,
            max_queued_samples=limit,
        )
        if conditions.bus_has_room and len(in_flight) < 40:
            in_flight += [issued] * group_size
            issued += 1
        else:
            assert in_flight, "nothing is in flight and nothing may start: stuck"
            waiting.append(in_flight.pop(choice % len(in_flight)))
            settle()
    assert trained > 0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.just(0)),
        st.tuples(st.just("bring"), st.just(0)),
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("commit"), st.just(0)),
        st.tuples(st.just("train"), st.integers(1, 20)),
        st.tuples(st.just("drop"), st.integers(1, 9)),
        st.tuples(st.just("threshold"), st.integers(0, 30)),
        st.tuples(st.just("concurrency"), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.integers(0, 5)),
    ),
    max_size=120,
)


@given(events=EVENTS, group_size=st.integers(1, 5), groups_per_period=st.integers(1, 4), origin=st.integers(0, 1000))
def test_budget_is_never_exceeded_under_any_order_of_events(
    events: list[tuple[str, int]], group_size: int, groups_per_period: int, origin: int
) -> None:
    """B29: the model keeps its own account of every rollout; at each admission what is alive stays within the formula, over
    restarts of the trainer from any checkpoint."""
    period = group_size * groups_per_period
    admission = Admission()
    incarnation, published, held = 0, origin, origin
    threshold, concurrency = Fraction(1, 2), 3 * group_size
    in_flight = queued = trained = refunded = 0

    def tell() -> None:
        admission.take_trainer(
            incarnation=str(incarnation), origin_version=origin, policy_version=published, num_refunded=refunded
        )

    admission.rebase(Resumption(origin_version=origin, accounted=0, incarnation="0"), in_flight=0)
    admission.take_held(HeldVersion(incarnation="0", policy_version=held))
    tell()
    for event, value in events:
        conditions = _conditions(
            group_size=group_size,
            staleness_threshold=float(threshold),
            max_concurrent_rollouts=concurrency,
            num_in_flight=in_flight,
            samples_per_period=period,
        )
        match event:
            case "admit":
                if admission.hold(conditions) is None:
                    admission.admit(group_size)
                    in_flight += group_size
                    alive = in_flight + queued + trained
                    assert alive <= (held - origin + 1 + threshold) * period
                    assert in_flight <= concurrency
                elif admission.hold(conditions) is Hold.BUDGET:
                    alive = in_flight + queued + trained
                    assert alive + group_size > (held - origin + 1 + threshold) * period
            case "bring" if in_flight:
                in_flight, queued = in_flight - 1, queued + 1
            case "publish":
                published += 1
                tell()
            case "commit":
                held = published
                admission.take_held(HeldVersion(incarnation=str(incarnation), policy_version=held))
            case "train":
                moved = min(value, queued)
                queued, trained = queued - moved, trained + moved
            case "drop":
                moved = min(value, queued)
                queued, refunded = queued - moved, refunded + moved
                tell()
            case "threshold":
                threshold = Fraction(value, 10)
            case "concurrency":
                concurrency = group_size + value
            case "restart":
                incarnation, origin = incarnation + 1, max(0, published - value)
                published = held = origin
                lost = min(value, trained)  # trained since the checkpoint: they come again
                queued, trained, refunded = queued + lost, 0, 0
                resumption = Resumption(origin_version=origin, accounted=queued, incarnation=str(incarnation))
                admission.rebase(resumption, in_flight=in_flight)
                assert admission.hold(conditions) is Hold.NO_WEIGHTS
                admission.take_held(HeldVersion(incarnation=str(incarnation), policy_version=held))
                tell()
            case _:
                pass
        assert admission.outstanding == in_flight + queued + trained
