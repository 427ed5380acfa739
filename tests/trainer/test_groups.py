"""A group leaves exactly once, whole or given up; a record without a place is handed back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.protocols import Lease, Leased, LeasedClosure
from tests.fakes.samples import lease, lease_closed, make_closed, make_sample
from trainer.groups import Dropped, DropReason, Group, GroupAssembler, OnFailedSeat


def _member(group: int, seat: int, seq: int, *, size: int = 2, epoch: int = 1, version: int = 0) -> Leased:
    sample = make_sample(group_id=f"g{group}", seat=seat, group_size=size, policy_version=version)
    return lease(sample, seq, epoch=epoch)


def _closure(group: int, seat: int, seq: int, *, size: int = 2, reason: str = "timeout") -> LeasedClosure:
    return lease_closed(make_closed(group_id=f"g{group}", seat=seat, group_size=size, reason=reason), seq)


def _seqs(outcome: Group | Dropped | None) -> list[int]:
    return [] if outcome is None else [one.id.seq for one in outcome.records]


def test_group_leaves_when_its_last_seat_is_filled_in_seat_order() -> None:
    assembler = GroupAssembler()
    assert assembler.add(_member(0, 1, 0)) is None
    assert assembler.oldest_open() == ("g0", (0,))
    group = assembler.add(_member(0, 0, 1))
    assert isinstance(group, Group)
    assert [leased.sample.seat for leased in group.members] == [0, 1]
    assert (assembler.num_open, assembler.num_waiting) == (0, 0)


def test_second_sample_for_a_seat_is_dropped_also_after_the_group_has_left() -> None:
    """B40: a late result of a timed-out attempt is not trained twice."""
    assembler = GroupAssembler()
    assembler.add(_member(0, 0, 0))
    late = assembler.add(_member(0, 0, 1))
    assert isinstance(late, Dropped)
    assert late.reason is DropReason.DUPLICATE_SEAT
    assert isinstance(assembler.add(_member(0, 1, 2)), Group)
    after = assembler.add(_member(0, 1, 3))
    assert isinstance(after, Dropped)
    assert after.reason is DropReason.DUPLICATE_SEAT


def test_late_sample_for_a_seat_that_was_closed_is_refused() -> None:
    """B40: attempt 1 is given up, its seat is closed, then its result arrives after all."""
    assembler = GroupAssembler()
    assembler.add(_closure(0, 0, 0, size=3))
    late = assembler.add(_member(0, 0, 1, size=3))
    assert isinstance(late, Dropped)
    assert late.reason is DropReason.DUPLICATE_SEAT
    assembler.add(_member(0, 1, 2, size=3))
    group = assembler.add(_member(0, 2, 3, size=3))
    assert isinstance(group, Group)
    assert ([one.id.seq for one in group.members], [one.id.seq for one in group.closures]) == ([2, 3], [0])


@pytest.mark.parametrize("policy", ["train_survivors", "refill"])
def test_survivors_are_trained_when_enough_are_left(policy: OnFailedSeat) -> None:
    """B13: group of 4 with a member that never comes; its seat is closed at the deadline and the others train."""
    assembler = GroupAssembler(on_failed_seat=policy, min_survivors=2)
    for seat in range(3):
        assert assembler.add(_member(0, seat, seat, size=4)) is None
    group = assembler.add(_closure(0, 3, 3, size=4, reason="group timeout"))
    assert isinstance(group, Group)
    assert (len(group.members), len(group.closures)) == (3, 1)


def test_group_is_given_up_as_soon_as_too_few_can_survive() -> None:
    """B76: one survivor has no spread; it is dropped and counted, and what comes later goes the same way."""
    assembler = GroupAssembler(min_survivors=2)
    assembler.add(_member(0, 0, 0, size=4))
    assembler.add(_closure(0, 1, 1, size=4))
    assembler.add(_closure(0, 2, 2, size=4))
    dropped = assembler.add(_closure(0, 3, 3, size=4))
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, _seqs(dropped)) == (DropReason.GROUP_INCOMPLETE, [0, 1, 2, 3])
    assert (len(dropped.samples), len(dropped.closures)) == (1, 3)


def test_policy_drop_gives_the_group_up_with_its_first_closed_seat() -> None:
    """B76"""
    assembler = GroupAssembler(on_failed_seat="drop")
    assembler.add(_member(0, 0, 0, size=3))
    dropped = assembler.add(_closure(0, 1, 1, size=3))
    later = assembler.add(_closure(0, 2, 2, size=3, reason="siblings failed"))
    assert isinstance(dropped, Dropped)
    assert isinstance(later, Dropped)
    assert (_seqs(dropped), _seqs(later)) == ([0, 1], [2])
    assert dropped.reason is later.reason is DropReason.GROUP_INCOMPLETE


def test_seat_closed_as_stale_drops_its_whole_group() -> None:
    assembler = GroupAssembler(on_failed_seat="train_survivors")
    assembler.add(_member(0, 0, 0, size=4))
    dropped = assembler.add(_closure(0, 1, 1, size=4, reason="stale"))
    assert isinstance(dropped, Dropped)
    assert dropped.reason is DropReason.STALE


def test_closed_group_gives_its_members_back_now_and_later() -> None:
    assembler = GroupAssembler()
    assembler.add(_member(0, 0, 0, size=3))
    closed = assembler.close(("rollouter", "g0"), DropReason.GROUP_INCOMPLETE)
    assert _seqs(closed) == [0]
    later = assembler.add(_member(0, 1, 1, size=3))
    assert isinstance(later, Dropped)
    assert later.reason is DropReason.GROUP_INCOMPLETE


def test_groups_of_two_producers_with_one_number_are_not_mixed() -> None:
    assembler = GroupAssembler()
    sample = make_sample(group_id="g0", seat=0, group_size=2)
    assert assembler.add(lease(sample, 0, producer="a")) is None
    assert assembler.add(lease(sample, 0, producer="b")) is None
    assert assembler.num_open == 2


def test_groups_of_a_producers_lost_stream_are_given_up() -> None:
    assembler = GroupAssembler()
    assembler.add(_member(0, 0, 0, epoch=1))
    assembler.add(_member(1, 0, 0, epoch=2))
    lost = assembler.close_other_epochs("rollouter", 2)
    assert [one.id.epoch for one in lost.records] == [1]
    assert assembler.num_open == 1


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from(["sample", "sample", "timeout", "stale", "siblings failed", "close"]),
    ),
    max_size=60,
)


@given(EVENTS, st.sampled_from(["train_survivors", "drop", "refill"]), st.integers(2, 3))
def test_every_record_comes_out_exactly_once(events: list[tuple[int, int, str]], policy: Any, min_survivors: int) -> None:
    """B42: whatever is closed and whatever comes twice, nothing is lost and nothing stays behind."""
    assembler = GroupAssembler(on_failed_seat=policy, min_survivors=min_survivors)
    out: list[int] = []
    num_in = 0
    for group, seat, kind in events:
        if kind == "close":
            out += _seqs(assembler.close(("rollouter", f"g{group}"), DropReason.GROUP_INCOMPLETE))
            continue
        record: Lease = (
            _member(group, seat, num_in, size=3)
            if kind == "sample"
            else _closure(group, min(seat, 2), num_in, size=3, reason=kind)
        )
        num_in += 1
        outcome = assembler.add(record)
        out += _seqs(outcome)
        if isinstance(outcome, Group) and outcome.closures:
            assert len(outcome.members) >= min_survivors
            assert policy != "drop"
    out += _seqs(assembler.close_all(DropReason.UNFINISHED))
    assert sorted(out) == list(range(num_in))
    assert assembler.num_open == 0
