"""Each moment belongs to exactly one activity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.clock import Activity, ActivityClock


@given(st.lists(st.tuples(st.sampled_from(sorted(Activity)), st.floats(0, 1e6)), min_size=1))
def test_shares_sum_to_one_and_seconds_to_the_elapsed_time(spans: list[tuple[Activity, float]]) -> None:
    now = 100.0
    clock = ActivityClock(lambda: now)
    for activity, seconds in spans:
        with clock.during(activity):
            now += seconds
    elapsed = now - 100.0
    assert sum(clock.seconds().values()) == pytest.approx(elapsed, rel=1e-9, abs=1e-6)
    if elapsed:
        assert sum(clock.shares().model_dump().values()) == pytest.approx(1.0)


def test_nothing_is_counted_before_the_first_activity() -> None:
    now = 0.0
    clock = ActivityClock(lambda: now)
    now = 50.0
    assert sum(clock.shares().model_dump().values()) == 0
    with clock.during(Activity.WAITING):
        now += 3
        with clock.during(Activity.TRAINING):
            now += 1
    assert clock.seconds()[Activity.WAITING] == 3
    assert clock.shares().training == 0.25
