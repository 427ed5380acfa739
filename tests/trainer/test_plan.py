"""What an earlier process took is taken again, or given back whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sample_bus.protocols import Gone
from sample_bus.sample import SampleId
from tests.fakes.samples import lease, make_sample
from trainer.groups import Dropped, DropReason
from trainer.history import History, PlannedStep
from trainer.plan import Place, ReplayPlan


def _id(seq: int) -> SampleId:
    return SampleId("rollouter", 1, seq)


def _step(step: int, *seqs: int) -> PlannedStep:
    return PlannedStep(step=step, samples=tuple(map(_id, seqs)), closures=(), options={"trainer.learning_rate": 0.1})


def _gone(first: int, last: int) -> Gone:
    return Gone(producer="rollouter", epoch=1, first=first, last=last, num_records=last - first)


def test_a_step_is_handed_out_when_all_its_records_are_there_in_its_own_order() -> None:
    plan = ReplayPlan(History(steps=(_step(3, 2, 0), _step(4, 1))))
    for seq in (0, 1):
        assert plan.take(lease(make_sample(group_id="g", group_size=2), seq)) is Place.HELD
    assert plan.next_batch() is None
    assert "step 3 is taken again: 1 of 2 records are there, first missing rollouter/1/2" in plan.awaits()
    assert plan.take(lease(make_sample(group_id="h", group_size=2), 2)) is Place.HELD
    batch = plan.next_batch()
    assert batch is not None
    assert [(group.group_id, group.members[0].id.seq) for group in batch.groups] == [("h", 2), ("g", 0)]
    assert plan.next_batch() is not None
    assert not plan.is_active


def test_steps_before_the_first_loss_are_kept_and_the_records_of_the_others_given_back() -> None:
    plan = ReplayPlan(History(steps=(_step(1, 0), _step(2, 1, 2), _step(3, 3)), drops={_id(9): DropReason.STALE}))
    for seq in (3, 0, 1):
        plan.take(lease(make_sample(), seq))
    abandoned = plan.lose(_gone(2, 3))
    assert abandoned is not None
    assert (abandoned.steps, [one.id.seq for one in abandoned.held]) == ((2, 3), [3, 1])
    assert plan.next_batch() is not None
    assert not plan.is_active
    assert plan.take(lease(make_sample(), 9)) is Place.FREE, "what was dropped after a lost step is decided anew"


def test_a_loss_that_no_step_needs_changes_nothing() -> None:
    plan = ReplayPlan(History(steps=(_step(1, 0),), drops={_id(5): DropReason.STALE}))
    assert plan.lose(_gone(4, 8)) is None
    assert plan.is_active


@given(
    st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=4), max_size=4),
    st.sets(st.integers(0, 19)),
    st.permutations(range(20)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 19), st.integers(1, 4)), max_size=3),
)
def test_every_record_comes_out_of_the_plan_exactly_once(
    steps: list[list[int]], dropped: set[int], arrivals: list[int], losses: list[tuple[int, int, int]]
) -> None:
    planned: list[PlannedStep] = []
    used = set(dropped)
    for seqs in steps:
        fresh = [seq for seq in dict.fromkeys(seqs) if seq not in used]
        used.update(fresh)
        if fresh:
            planned.append(_step(len(planned) + 1, *fresh))
    plan = ReplayPlan(History(steps=tuple(planned), drops={_id(seq): DropReason.STALE for seq in dropped}))
    lost: set[int] = set()
    out: list[int] = []
    arrived: list[int] = []
    for moment, seq in enumerate(arrivals):
        for at, first, length in losses:
            if at == moment:
                lost |= set(range(first, first + length)) - set(arrived)
                abandoned = plan.lose(_gone(first, first + length))
                out += [one.id.seq for one in abandoned.held] if abandoned else []
        if seq in lost:
            continue
        arrived.append(seq)
        place = plan.take(lease(make_sample(), seq))
        if isinstance(place, Dropped) or place is Place.FREE:
            out.append(seq)
        while (batch := plan.next_batch()) is not None:
            out += [one.id.seq for group in batch.groups for one in group.records]
    assert not plan.is_active, "each step came whole or was given up"
    assert plan.give_up() == ()
    assert sorted(out) == sorted(arrived)
