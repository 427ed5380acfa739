from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.messages import SeatDemand
from trainer.demand import StepAccount, next_sync_step


@pytest.mark.parametrize(
    ("step", "every", "num_steps", "expected"), [(0, 1, 9, 1), (0, 4, 8, 4), (4, 4, 8, 8), (5, 2, 8, 6), (6, 4, 7, 7)]
)
def test_versions_come_at_multiples_of_the_interval_and_after_the_last_step(
    step: int, every: int, num_steps: int, expected: int
) -> None:
    assert next_sync_step(step, trigger_parameter_sync_step=every, num_steps=num_steps) == expected


def test_step_in_progress_is_taken_and_counts_as_consumed_only_once_published() -> None:
    account = StepAccount(begun_step=5, sync_step=6)
    account.begin(6, 16)
    assert account.is_due
    assert account.said() == {"consumed_seats": 0, "demand": SeatDemand(taken_seats=16, begun_step=6, sync_step=6)}
    account.publish(next_sync_step=8)
    assert account.said() == {"consumed_seats": 16, "demand": SeatDemand(taken_seats=16, begun_step=6, sync_step=8)}


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 64)), min_size=1, max_size=60))
def test_a_version_holds_what_the_steps_before_it_took_under_any_changes(
    first_step: int, changes: list[tuple[int, int]]
) -> None:
    """Both the interval and the size of a step change before each step."""
    num_steps = first_step + len(changes)
    account = StepAccount(
        begun_step=first_step,
        sync_step=next_sync_step(first_step, trigger_parameter_sync_step=changes[0][0], num_steps=num_steps),
    )
    taken = 0
    for step, (every, seats) in enumerate(changes, first_step + 1):
        assert account.begun_step < account.sync_step
        account.begin(step, seats)
        taken += seats
        if account.is_due:
            account.publish(
                next_sync_step=next_sync_step(step, trigger_parameter_sync_step=every, num_steps=max(num_steps, step + 1))
            )
            assert account.consumed_seats == taken
    assert account.consumed_seats <= account.taken_seats == taken
