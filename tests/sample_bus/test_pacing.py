"""Each sentence of docs/staleness.md that claims something about pacing and the gate, over random schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.admission import Hold
from tests.sample_bus.pacing_model import Run, Trained, age_bound

Event = tuple[str, int]

LIFE = ("admit", "admit all", "finish", "finish", "finish closed", "step", "step", "step", "commit", "drop", "concurrency")
"""What happens all the time."""
DEATHS = ("checkpoint", "restart trainer", "restart rollouter")
THRESHOLDS = st.integers(0, 40).map(lambda tenths: Fraction(tenths, 10))


def events(*kinds: str) -> st.SearchStrategy[list[Event]]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 40)), max_size=150)


def runs(threshold: st.SearchStrategy[Fraction] = THRESHOLDS, **fixed: Any) -> st.SearchStrategy[Run]:
    shape = {
        "group_size": st.integers(2, 4),
        "groups_per_step": st.integers(1, 4),
        "trigger": st.integers(1, 3),
        "threshold": threshold,
        "start": st.sampled_from([0, 1000]),
        "first_come": st.booleans(),
    }
    return st.builds(Run, **{**shape, **{name: st.just(value) for name, value in fixed.items()}})


def happen(run: Run, event: Event) -> None:
    kind, value = event
    match kind:
        case "admit":
            run.admit()
        case "admit all":
            run.admit_all()
        case "finish":
            run.finish(value)
        case "finish closed":
            run.finish(value, num_closed=value % 3)
        case "finish in order":
            run.finish(0)
        case "step":
            run.take_step()
        case "commit":
            run.commit()
        case "drop":
            run.drop(value)
        case "concurrency":
            run.concurrency = run.group_size * (1 + value)
        case "checkpoint":
            run.checkpoint()
        case "restart trainer":
            run.restart_trainer()
        case "restart rollouter":
            run.restart_rollouter()
        case "threshold":
            run.threshold = Fraction(value, 10)
        case "trigger":
            run.trigger = 1 + value % 4
        case "step size":
            run.groups_per_step = 1 + value % 5
        case "max_staleness":
            run.max_staleness = value % 5
        case _:
            raise AssertionError(kind)


def settle(run: Run, steps: int) -> None:
    """Everything that can happen happens in turn, until so many more steps are taken."""
    target, rounds = run.step + steps, 0
    run.concurrency = 1 << 30
    while run.step < target:
        rounds += 1
        assert rounds < 2000, f"wedged at step {run.step}: {run.admit()}, {run.alive} seats are alive"
        run.commit()
        run.admit_all()
        while run.in_flight:
            run.finish()
        run.take_step()


def comparable(run: Run) -> Iterable[Trained]:
    return [one for one in run.trained if one.is_comparable]


# ── the account ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(runs(), events(*LIFE, *DEATHS, "threshold", "trigger", "step size", "max_staleness"))
def test_no_group_starts_beyond_the_limit_and_none_is_held_below_it(run: Run, schedule: list[Event]) -> None:
    """Under restarts of either side and live changes of everything: what is alive and what was taken since the origin."""
    for event in schedule:
        happen(run, event)
        hold = run.admit()
        account = run.alive + run.taken_since_origin
        if hold is None:
            assert account <= run.limit
        elif hold is Hold.BUDGET:
            assert account + run.group_size > run.limit
        assert run.admission.outstanding == account


@given(runs(), events(*LIFE))
def test_never_more_is_alive_than_the_periods_of_the_threshold_and_one(run: Run, schedule: list[Event]) -> None:
    for event in schedule:
        happen(run, event)
        assert run.alive <= (1 + run.threshold) * run.period


@given(runs(), events(*LIFE, *DEATHS))
def test_restart_opens_no_flood(run: Run, schedule: list[Event]) -> None:
    """B29: what is alive after a restart was alive before, or came back from beyond the checkpoint, or the budget of one
    moment allows it, whatever the version's number."""
    settle(run, 5)
    allowed = (1 + run.threshold) * run.period
    for event in schedule:
        before = run.alive
        lost = len(run.trained) - run.saved.trained if event[0] == "restart trainer" else 0
        happen(run, event)
        run.admit_all()
        assert run.alive <= allowed or run.alive <= before + lost * run.group_size


# ── age ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(runs(), events(*LIFE, *DEATHS, "threshold"))
def test_age_is_at_most_the_threshold_and_what_overtook_it_in_periods(run: Run, schedule: list[Event]) -> None:
    """The threshold is the one at its admission: what was set before or after does not matter."""
    for event in schedule:
        happen(run, event)
    settle(run, 12)
    for one in comparable(run):
        assert 0 <= one.age <= age_bound(one)


@given(runs(first_come=False), events("admit", "admit all", "finish in order", "step", "step", "commit", "drop", *DEATHS))
def test_without_a_straggler_age_is_at_most_the_threshold_rounded_up(run: Run, schedule: list[Event]) -> None:
    """B29: lag of every trained sample stays within the bound over restarts at any point."""
    for event in schedule:
        happen(run, event)
    settle(run, 12)
    for one in comparable(run):
        assert one.overtaken_by == 0
        assert one.age <= math.ceil(one.group.threshold)


@given(runs(), events(*LIFE, *DEATHS))
def test_mean_age_is_at_most_the_threshold_whatever_the_stragglers(run: Run, schedule: list[Event]) -> None:
    """Over the seats of all groups admitted and trained since an origin, at each publication. With closed seats the mean over
    samples is at most the threshold divided by the share of seats that brought one."""
    for event in [*schedule, *[("finish", 7), ("admit all", 0), ("step", 0), ("commit", 0)] * 10]:
        version = run.version
        happen(run, event)
        if run.version <= version:
            continue
        since = [one for one in run.trained[run.saved_trained :] if one.is_comparable]
        seats = len(since) * run.group_size
        assert sum(one.age for one in since) * run.group_size <= run.threshold * seats
        brought = [(one.age, run.group_size - one.group.num_closed) for one in since]
        assert sum(age * samples for age, samples in brought) <= run.threshold * seats


@given(runs(), st.integers(1, 6), events(*LIFE))
def test_share_of_seats_of_some_age_is_at_most_the_threshold_over_that_age(run: Run, age: int, schedule: list[Event]) -> None:
    for event in schedule:
        version = run.version
        happen(run, event)
        if run.version > version:
            older = sum(one.age >= age for one in run.trained)
            assert older * age <= run.threshold * len(run.trained)


@given(runs(st.just(Fraction(0))), events(*LIFE, *DEATHS))
def test_at_threshold_zero_every_token_is_of_the_version_that_trains_it(run: Run, schedule: list[Event]) -> None:
    """B41: in any order of arrival, with drops, closed seats and restarts within a period."""
    for event in schedule:
        happen(run, event)
    settle(run, 8)
    assert all(one.age == 0 for one in comparable(run))


def test_at_threshold_zero_twenty_versions_pass_without_a_stale_sample() -> None:
    """B41"""
    run = Run(group_size=4, groups_per_step=2, trigger=1, threshold=Fraction(0))
    for _ in range(20):
        assert run.admit_all() is Hold.BUDGET
        while run.in_flight:
            run.finish(-1)
        assert run.take_step()
        assert run.admit_all() is Hold.BUDGET
        assert run.alive == 0
        run.commit()
    assert [one.age for one in run.trained] == [0] * 40


@pytest.mark.parametrize("late_by", [10, 50])
def test_pacing_alone_lets_a_straggler_age_without_bound(late_by: int) -> None:
    run = Run(group_size=2, groups_per_step=4, trigger=1, threshold=Fraction(1))
    run.admit()
    while run.version < late_by:
        run.commit()
        run.admit_all()
        while len(run.in_flight) > 1:
            run.finish(1)
        run.take_step()
    run.finish(0)
    run.queue.insert(0, run.queue.pop())
    run.take_step()
    oldest = max(run.trained, key=lambda one: one.age)
    assert (oldest.group.number, oldest.age) == (0, late_by)
    assert sum(one.age for one in run.trained) <= len(run.trained)


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(runs(), st.integers(0, 4), events(*LIFE, *DEATHS, "threshold", "trigger", "step size", "max_staleness"))
def test_with_the_gate_nothing_older_is_trained_under_any_schedule(run: Run, max_staleness: int, schedule: list[Event]) -> None:
    """B30: judged when a step takes it, so time in queues counts."""
    run.max_staleness = max_staleness
    for event in schedule:
        trained = len(run.trained)
        happen(run, event)
        if event[0] == "step":
            assert run.max_staleness is not None
            assert all(one.age <= run.max_staleness for one in run.trained[trained:] if one.is_comparable)


@given(
    runs(first_come=False).flatmap(lambda run: st.tuples(st.just(run), st.integers(0, 2))),
    events("admit", "admit all", "finish in order", "step", "step", "commit", "drop", *DEATHS),
)
def test_gate_at_the_threshold_rounded_up_drops_nothing_without_stragglers(
    run_and_slack: tuple[Run, int], schedule: list[Event]
) -> None:
    run, slack = run_and_slack
    run.max_staleness = math.ceil(run.threshold) + slack
    drops = 0
    for kind, value in schedule:
        drops += kind == "drop" and bool(run.queue)
        happen(run, (kind, value))
    settle(run, 12)
    assert len(run.dropped) == drops


# ── it goes on ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(runs(), events(*LIFE, *DEATHS, "threshold", "trigger", "step size", "max_staleness"))
def test_run_never_wedges(run: Run, schedule: list[Event]) -> None:
    """From wherever it got: when all that is in flight arrives and the engines follow, the next step fills."""
    for event in schedule:
        happen(run, event)
    settle(run, 10)


# ── live changes ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(runs(first_come=False), THRESHOLDS, events("admit", "admit all", "finish in order", "step", "step", "commit", "drop"))
def test_changed_threshold_bounds_all_that_is_admitted_from_then_on(
    run: Run, threshold: Fraction, schedule: list[Event]
) -> None:
    """Raised or lowered, the first group under the new threshold obeys it; what is older than the change is trained out within
    the periods of the threshold before."""
    for event in schedule:
        happen(run, event)
    before, changed_at, admitted = run.threshold, run.version, run.admitted
    run.threshold = threshold
    settle(run, (math.ceil(before) + 6) * run.trigger)
    new = [one for one in run.trained if one.group.number >= admitted]
    assert new
    assert all(one.age <= math.ceil(threshold) for one in new)
    assert all(one.version <= changed_at + math.ceil(before) for one in run.trained if one.group.number < admitted)


def test_threshold_from_zero_to_two_and_back_shows_in_the_age_of_what_is_trained() -> None:
    run = Run(group_size=4, groups_per_step=2, trigger=1, threshold=Fraction(0), first_come=False)
    ages: list[list[int]] = []

    def play(periods: int) -> None:
        for _ in range(periods):
            run.commit()
            run.admit_all()
            while run.in_flight:
                run.finish()
            trained = len(run.trained)
            run.take_step()
            ages.append([one.age for one in run.trained[trained:]])

    play(3)
    run.threshold = Fraction(2)
    play(4)
    run.threshold = Fraction(0)
    play(4)
    assert ages == [[0, 0]] * 3 + [[0, 0], [1, 1], [2, 2], [2, 2], [2, 2], [2, 2], [0, 0], [0, 0]]


@given(runs(first_come=False), events("admit all", "finish in order", "step", "commit", "trigger", "step size"))
def test_shortened_period_ages_what_is_under_way_by_the_ratio(run: Run, schedule: list[Event]) -> None:
    """Without stragglers: what the limit reached to at admission (the rest of the period as it was planned, and threshold * K
    of then), counted in the shortest period since."""
    for event in schedule:
        happen(run, event)
    settle(run, 40)
    for one in run.trained:
        assert one.age <= math.ceil(one.group.reach / run.shortest_period)


def test_lowered_step_size_is_followed_at_once_and_starves_nobody() -> None:
    """What the run needs and what the next version takes are the trainer's counts, not the number of versions."""
    run = Run(group_size=4, groups_per_step=16, trigger=1, threshold=Fraction(1))
    settle(run, 50)
    run.groups_per_step = 1
    settle(run, 60)
    run.commit()
    run.admit_all()
    assert run.alive == 2 * 4


def test_resumption_within_a_period_starts_only_what_the_period_still_lacks() -> None:
    """B41: half a period was taken before the checkpoint; a whole one would leave the other half for the next version."""
    run = Run(group_size=2, groups_per_step=2, trigger=4, threshold=Fraction(0))
    settle(run, 2)
    run.checkpoint()
    run.restart_trainer()
    run.in_flight.clear()
    run.queue.clear()
    run.restart_rollouter()
    assert run.admit_all() is Hold.BUDGET
    assert run.alive == 2 * run.samples_per_step
    settle(run, 10)
    assert all(one.age == 0 for one in comparable(run))
