"""What is trained against what is dropped and down-weighted."""

from __future__ import annotations

from typing import Any

import pytest

from sample_bus.messages import BiasReport, Counts
from sample_bus.position import BusPosition
from sample_bus.protocols import Leased, LeasedClosure
from sample_bus.spread import mean
from tests.fakes.samples import lease, lease_closed, make_closed, make_sample
from trainer.aged import Weighting
from trainer.bias import MAX_SOURCES, OTHER, BiasBook, row_of, source_distance
from trainer.groups import Dropped, DropReason, make_group
from trainer.run_state import RunState

WEIGHTING = Weighting(base=0.5, max_staleness=1, policy_version=5, incarnation="first", origin_version=0)


def lease_sample(seq: int, **changes: Any) -> Leased:
    return lease(make_sample(**changes), seq)


def lease_closure(seq: int) -> LeasedClosure:
    return lease_closed(make_closed(reason="stale"), seq)


def test_each_sample_is_in_the_part_of_its_fate() -> None:
    book = BiasBook()
    old, young = (
        lease_sample(seq, policy_version=version, reply=[1] * length) for seq, version, length in ((0, 1, 9), (1, 5, 3))
    )
    book.train(make_group("g", [old, young, lease_closure(2)]), WEIGHTING)
    book.train(make_group("h", [lease_sample(3, reply=[1] * 5)]), None)
    book.drop(Dropped(reason=DropReason.STALE, records=(lease_sample(4, reply=[1] * 20, reward=1.0), lease_closure(5))))
    book.drop(Dropped(reason=DropReason.DUPLICATE_SEAT, records=(lease_sample(6),)))
    book.drop(Dropped(reason=DropReason.UNFINISHED, records=(lease_sample(7),)))
    report = book.report()
    assert (mean(report.trained.length), mean(report.downweighted.length), mean(report.dropped.length)) == (4.0, 9.0, 20.0)
    assert (report.trained.closed_seats, report.dropped.closed_seats) == (1, 1)


def test_the_report_survives_a_restart() -> None:
    book = BiasBook()
    book.train(make_group("g", [lease_sample(0)]), None)
    again = BiasBook(BiasReport.model_validate(book.report().model_dump(mode="json")))
    for one in (book, again):
        one.drop(Dropped(reason=DropReason.STALE, records=(lease_sample(1),)))
    assert again.report() == book.report()


def test_a_checkpoints_state_holds_the_report() -> None:
    book = BiasBook()
    book.train(make_group("g", [lease_sample(0)]), None)
    state = RunState(
        run_id="r",
        incarnation="first",
        step=1,
        policy_version=1,
        position=BusPosition(),
        counts=Counts(trained=1, rolled_back=1),
        bias=book.report(),
    )
    assert RunState.from_plain(state.as_plain(), "here") == state


def test_a_row_shows_that_what_is_dropped_is_longer_and_of_other_sources() -> None:
    """B172: the drops are reported apart from what was trained."""
    book = BiasBook()
    for seq in range(4):
        book.train(make_group(f"g{seq}", [lease_sample(seq, reply=[1] * 4, data_source="short")]), None)
    book.drop(Dropped(reason=DropReason.STALE_RETRIED, records=(lease_sample(9, reply=[1] * 40, data_source="long"),)))
    row = row_of(book.report())
    assert (row["bias_trained_length_p90"], row["bias_dropped_length_p90"]) == (4.0, 40.0)
    assert row["bias_source_distance"] == 1.0
    assert row["bias_downweighted_samples"] == 0
    assert "bias_downweighted_length_mean" not in row


def test_sources_beyond_a_bound_are_counted_together() -> None:
    book = BiasBook()
    for seq in range(MAX_SOURCES + 3):
        book.train(make_group(f"g{seq}", [lease_sample(seq, data_source=f"source {seq}")]), None)
    sources = book.report().trained.sources
    assert (len(sources), sources[OTHER]) == (MAX_SOURCES + 1, 3)


def test_source_distance_is_that_of_the_shares() -> None:
    assert source_distance({"a": 1, "b": 1}, {"a": 10, "b": 10}) == 0
    assert source_distance({"a": 3, "b": 1}, {"a": 1, "b": 1}) == pytest.approx(0.25)
