"""Every chain of failures ends with a closed seat; what the siblings do is ended when the trainer would drop it anyway."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.failures import FINAL, FailureReason
from rollouter.seat_policy import MAX_INTERRUPTIONS, Move, SeatPolicy


def _policy(**changes: Any) -> SeatPolicy:
    values: dict[str, Any] = {"on_failed_seat": "train_survivors", "min_survivors": 2, "max_attempts": 3, "max_refills": 2}
    return SeatPolicy(**{**values, **changes})


def _move(policy: SeatPolicy, reason: FailureReason, failed: int = 1, interrupted: int = 0, refills: int = 0) -> Move:
    return policy.next_move(reason, num_failed=failed, num_interrupted=interrupted, num_refills=refills)


def test_rollout_is_tried_so_often_and_then_given_up() -> None:
    policy = _policy()
    assert [_move(policy, FailureReason.TIMEOUT, failed) for failed in (1, 2, 3)] == [Move.RETRY, Move.RETRY, Move.CLOSE]


@pytest.mark.parametrize("reason", sorted(FINAL))
def test_what_could_not_end_otherwise_is_not_tried_again(reason: FailureReason) -> None:
    assert _move(_policy(), reason) is Move.CLOSE
    assert _move(_policy(on_failed_seat="refill"), reason) is Move.REFILL


def test_refill_starts_fresh_rollouts_up_to_a_bound() -> None:
    policy = _policy(on_failed_seat="refill")
    moves = [_move(policy, FailureReason.TIMEOUT, failed=3, refills=refills) for refills in range(4)]
    assert moves == [Move.REFILL, Move.REFILL, Move.CLOSE, Move.CLOSE]


@pytest.mark.parametrize("reason", [FailureReason.STALE, FailureReason.SIBLINGS_FAILED, FailureReason.SIBLINGS_LOST])
def test_seat_of_a_lost_group_is_never_refilled(reason: FailureReason) -> None:
    assert _move(_policy(on_failed_seat="refill"), reason) is Move.CLOSE


def test_group_deadline_leaves_no_further_attempt() -> None:
    """B13"""
    assert _move(_policy(), FailureReason.GROUP_DEADLINE) is Move.CLOSE
    assert _move(_policy(on_failed_seat="refill"), FailureReason.GROUP_DEADLINE) is Move.REFILL


def test_deaths_of_the_process_cost_no_attempt_until_they_look_like_its_fault() -> None:
    """B13: a task that kills the process is given up in the end."""
    policy = _policy(max_attempts=1)
    moves = [_move(policy, FailureReason.INTERRUPTED, interrupted=number) for number in range(1, MAX_INTERRUPTIONS + 1)]
    assert moves == [Move.RETRY] * (MAX_INTERRUPTIONS - 1) + [Move.CLOSE]


@pytest.mark.parametrize(
    ("policy", "num_closed", "in_vain"),
    [
        (_policy(), 1, False),
        (_policy(), 2, False),
        (_policy(), 3, True),
        (_policy(min_survivors=4), 1, True),
        (_policy(on_failed_seat="drop"), 1, True),
        (_policy(on_failed_seat="refill"), 2, False),
        (_policy(on_failed_seat="refill"), 3, True),
    ],
)
def test_siblings_go_on_while_enough_can_survive(policy: SeatPolicy, num_closed: int, in_vain: bool) -> None:
    assert policy.is_in_vain(FailureReason.TIMEOUT, group_size=4, num_closed=num_closed) is in_vain
    assert policy.is_in_vain(FailureReason.STALE, group_size=4, num_closed=num_closed)


@given(
    policy=st.builds(
        SeatPolicy,
        on_failed_seat=st.sampled_from(["train_survivors", "drop", "refill"]),
        min_survivors=st.integers(2, 4),
        max_attempts=st.integers(1, 5),
        max_refills=st.integers(0, 5),
    ),
    reasons=st.lists(st.sampled_from(sorted(FailureReason)), min_size=200, max_size=200),
)
def test_every_chain_of_failures_ends(policy: SeatPolicy, reasons: list[FailureReason]) -> None:
    """B13, B34: whatever fails next, after so many attempts the seat is closed."""
    failed = interrupted = refills = attempts = 0
    for reason in reasons:
        attempts += 1
        if reason is FailureReason.INTERRUPTED:
            interrupted += 1
        else:
            failed += 1
        move = policy.next_move(reason, num_failed=failed, num_interrupted=interrupted, num_refills=refills)
        if move is Move.CLOSE:
            break
        if move is Move.REFILL:
            failed, refills = 0, refills + 1
    assert attempts <= policy.max_attempts * (policy.max_refills + 1) + MAX_INTERRUPTIONS
    assert attempts < len(reasons)
