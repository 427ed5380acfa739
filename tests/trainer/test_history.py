"""The trainer's journal tells what the checkpoint does not cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sample_bus.journal import (
    Queued,
    Record,
    RecordsDropped,
    RecordsGone,
    StepBegan,
    StepTrained,
    TrainerBegan,
    TrainerEnded,
)
from sample_bus.position import BusPosition, StreamPosition
from sample_bus.sample import SampleId
from trainer.groups import DropReason
from trainer.history import History, history_of


def _ids(seqs: Sequence[int], epoch: int = 1) -> list[Any]:
    return [["rollouter", epoch, seq] for seq in seqs]


def _covering(watermark: int) -> BusPosition:
    return BusPosition(streams=(StreamPosition(producer="rollouter", epoch=1, watermark=watermark),))


def _began(step: int) -> TrainerBegan:
    return TrainerBegan(at=0, incarnation="i", step=step, policy_version=0, position=[], counts={})


def _queued(seq: int, group: str, *, closed: str = "") -> Queued:
    return Queued(at=0, received_at=0, id=["rollouter", 1, seq], group_id=group, seat=0, attempt=0, closed=closed)


def _step(number: int, *seqs: int, rate: float = 0.1) -> StepBegan:
    return StepBegan(
        at=0, step=number, policy_version=0, samples=_ids(seqs), closures=[], options={"trainer.learning_rate": rate}
    )


def _trained(number: int) -> StepTrained:
    return StepTrained(at=0, step=number, policy_version=0, loss=0, grad_norm=0, replayed=False)


def _dropped(reason: DropReason, *seqs: int) -> RecordsDropped:
    return RecordsDropped(at=0, reason=str(reason), samples=_ids(seqs), closures=[])


def _steps(history: History) -> dict[int, list[int]]:
    return {planned.step: [one.seq for one in planned.ids] for planned in history.steps}


def _of(*records: Record, step: int = 0, watermark: int = 0) -> History:
    return history_of(records, step=step, position=_covering(watermark))


def test_steps_after_the_checkpoint_are_taken_again_in_order() -> None:
    history = _of(_began(0), _step(1, 0, 1), _trained(1), _step(2, 4, 2), _trained(2), _step(3, 5, 3), step=1, watermark=2)
    assert _steps(history) == {2: [4, 2], 3: [5, 3]}


def test_a_restart_that_was_killed_again_loses_none_of_the_steps() -> None:
    """The second process repeats step 2 only; step 3 of the first one holds still."""
    history = _of(_began(0), _step(1, 0), _step(2, 1), _step(3, 2), _began(1), _step(2, 1), _began(1), step=1, watermark=1)
    assert _steps(history) == {2: [1], 3: [2]}


def test_steps_of_a_process_that_chose_otherwise_void_the_earlier_ones() -> None:
    history = _of(_began(0), _step(1, 0), _step(2, 1), _step(3, 2), _began(1), _step(2, 3), step=1, watermark=1)
    assert _steps(history) == {2: [3]}


def test_a_record_that_was_dropped_later_is_in_no_step() -> None:
    history = _of(_step(1, 0), _step(2, 1), _step(3, 2), _began(0), _step(1, 0), _dropped(DropReason.STALE, 1))
    assert _steps(history) == {1: [0]}
    assert history.drops == {SampleId("rollouter", 1, 1): DropReason.STALE}


def test_a_record_that_was_trained_later_is_not_dropped() -> None:
    history = _of(_dropped(DropReason.STALE, 1), _step(1, 0), _began(0), _step(1, 1))
    assert _steps(history) == {1: [1]}
    assert history.drops == {}


def test_what_was_let_go_at_the_end_of_a_run_may_be_trained_when_it_is_taken_up_again() -> None:
    history = _of(_queued(3, "g"), _dropped(DropReason.UNFINISHED, 3))
    assert history.drops == {}
    assert history.known.keys() == {SampleId("rollouter", 1, 3)}


def test_steps_whose_records_are_covered_or_gone_are_not_planned() -> None:
    assert _steps(_of(_step(1, 5), _step(2, 1), watermark=3)) == {1: [5]}
    gone = RecordsGone(at=0, producer="rollouter", epoch=1, first=1, last=2, num_records=1)
    assert _steps(_of(_step(1, 5), _step(2, 1), gone)) == {1: [5]}


def test_a_step_that_failed_is_taken_again_with_the_settings_in_force() -> None:
    """A learning rate that made the loss infinite must not be used for ever; a kill in the middle says nothing about it."""
    failed = TrainerEnded(at=0, reason="failed", message="NonFiniteError", counts={})
    planned = _of(_step(1, 0), _trained(1), _step(2, 1), failed).steps
    assert [one.options for one in planned] == [{"trainer.learning_rate": 0.1}, None]
    stopped = TrainerEnded(at=0, reason="stopped", message="", counts={})
    assert all(one.options for one in _of(_step(1, 0), stopped).steps)
    assert all(one.options for one in _of(_step(1, 0), _began(0)).steps)


def test_groups_that_left_before_the_checkpoint_are_remembered() -> None:
    """B40: a result for an id from before the restart is refused."""
    history = _of(
        _queued(0, "trained"),
        _queued(1, "stale"),
        _queued(2, "open"),
        _queued(3, "beyond"),
        _step(1, 0),
        _dropped(DropReason.STALE, 1),
        _dropped(DropReason.DUPLICATE_SEAT, 2),
        step=1,
        watermark=3,
    )
    assert history.closed_groups == {
        ("rollouter", "trained"): DropReason.DUPLICATE_SEAT,
        ("rollouter", "stale"): DropReason.STALE,
    }
    assert [(known.key, known.closed) for known in history.known.values()] == [(("rollouter", "beyond"), False)]
