"""`headrace status --bias`: the three fates side by side."""

from __future__ import annotations

from pathlib import Path

from configs.schema import BusSettings
from console.bias import _ask, bias_as_json, bias_as_text
from console.run_dirs import LiveRun
from sample_bus.messages import BiasReport
from sample_bus.open import open_hub
from tests.fakes.samples import lease, lease_closed, make_closed, make_sample
from trainer.aged import Weighting
from trainer.bias import BiasBook
from trainer.groups import Dropped, DropReason, make_group

WEIGHTING = Weighting(base=0.5, max_staleness=0, policy_version=3, incarnation="first", origin_version=0)


def report() -> BiasReport:
    """Three short samples trained, one of middle length weighted down, a long one dropped."""
    book = BiasBook()
    for seq in range(3):
        young = make_sample(reply=[1] * 4, reward=1.0, policy_version=3, data_source="easy")
        book.train(make_group(f"g{seq}", [lease(young, seq)]), WEIGHTING)
    book.train(make_group("g3", [lease(make_sample(reply=[1] * 10, data_source="hard"), 3)]), WEIGHTING)
    dropped = lease(make_sample(reply=[1] * 40, data_source="hard", num_turns=3), 4)
    book.drop(Dropped(reason=DropReason.STALE, records=(dropped, lease_closed(make_closed(reason="stale"), 5))))
    return book.report()


def rows(text: str) -> dict[str, list[str]]:
    return {line[:27].strip(): line[27:].split() for line in text.splitlines()}


def test_the_table_shows_that_what_is_dropped_is_longer_and_harder() -> None:
    """B172"""
    table = rows(bias_as_text(report()))
    assert table["since the run began"] == ["trained", "down-weighted", "dropped"]
    assert table["samples"] == ["3", "1", "1"]
    assert table["trained tokens, mean"] == ["4.0", "10.0", "40.0"]
    assert table["reward, mean"] == ["1.000", "0.000", "0.000"]
    assert table["turns, p90"] == ["1.00", "1.00", "3.00"]
    assert table["from easy"] == ["100.0%", "0.0%", "0.0%"]
    assert table["closed seats beside them"] == ["0", "0", "1"]


def test_a_run_that_dropped_nothing_says_so() -> None:
    text = bias_as_text(BiasReport())
    assert text.endswith("no sample was dropped or weighted down for its age")
    assert rows(text)["reward, mean"] == ["-", "-", "-"]


def test_as_json_it_has_the_same_figures() -> None:
    figures = bias_as_json(report())
    assert figures["dropped"]["length"] == {"mean": 40.0, "p50": 40.0, "p90": 40.0}
    assert figures["trained"]["sources"] == {"easy": 3}
    assert figures["down-weighted"]["samples"] == 1


async def test_it_is_read_from_the_trainers_topic(tmp_path: Path) -> None:
    bus, address = BusSettings(), f"ipc://{tmp_path}/bus"
    async with open_hub(
        bus, address=address, run="run", run_id="1234abcd", incarnation="first", quarantine_dir=tmp_path / "quarantine"
    ) as hub:
        assert await _ask(LiveRun(bus, address, None), 10.0) == BiasReport()
        await hub.publish("bias", report())
        assert await _ask(LiveRun(bus, address, None), 10.0) == report()
