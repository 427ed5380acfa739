"""A group leaves exactly once, whole or closed; a sample without a place is handed back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sample_bus.protocols import Leased
from tests.fakes.samples import lease, make_sample
from trainer.groups import Dropped, DropReason, Group, GroupAssembler, is_stale


def _member(group: int, seat: int, seq: int, *, size: int = 2, epoch: int = 1, version: int = 0) -> Leased:
    sample = make_sample(group_id=f"g{group}", seat=seat, group_size=size, policy_version=version)
    return lease(sample, seq, epoch=epoch)


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


def test_closed_group_gives_its_members_back_now_and_later() -> None:
    assembler = GroupAssembler()
    assembler.add(_member(0, 0, 0, size=3))
    closed = assembler.close("g0", DropReason.GROUP_INCOMPLETE)
    assert [leased.id.seq for leased in closed.members] == [0]
    later = assembler.add(_member(0, 1, 1, size=3))
    assert isinstance(later, Dropped)
    assert later.reason is DropReason.GROUP_INCOMPLETE


def test_groups_of_a_producers_earlier_life_are_given_up() -> None:
    assembler = GroupAssembler()
    assembler.add(_member(0, 0, 0, epoch=1))
    assembler.add(_member(1, 0, 0, epoch=2))
    lost = assembler.close_other_epochs("rollouter", 2)
    assert [leased.sample.group_id for leased in lost.members] == ["g0"]
    assert assembler.num_open == 1


def test_staleness_counts_from_the_oldest_version_and_never_across_incarnations() -> None:
    """B30: age is judged when the batch is taken, time in the queue included."""
    group = Group(group_id="g0", members=(_member(0, 0, 0, version=3), _member(0, 1, 1, version=5)))
    assert not is_stale(group, policy_version=7, incarnation="first", max_staleness=4)
    assert is_stale(group, policy_version=8, incarnation="first", max_staleness=4)
    assert not is_stale(group, policy_version=8, incarnation="first", max_staleness=None)
    assert not is_stale(group, policy_version=8, incarnation="second", max_staleness=4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=60))
def test_every_sample_comes_out_exactly_once(events: list[tuple[int, int, bool]]) -> None:
    """B42: whatever is closed and whatever comes twice, nothing is lost and nothing stays behind."""
    assembler = GroupAssembler()
    out: list[int] = []
    for seq, (group, seat, closes) in enumerate(events):
        outcome = assembler.add(_member(group, seat, seq, size=3))
        if outcome is not None:
            out += [leased.id.seq for leased in outcome.members]
        if closes:
            out += [leased.id.seq for leased in assembler.close(f"g{group}", DropReason.GROUP_INCOMPLETE).members]
    out += [leased.id.seq for leased in assembler.close_all(DropReason.UNFINISHED).members]
    assert sorted(out) == list(range(len(events)))
    assert assembler.num_open == 0
