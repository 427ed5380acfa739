"""What is trained against what is not: are the samples that age costs of another kind than the others? Pure.

Invariant: every sample that is trained, or dropped for its age or for its group's missing seats, is in exactly one part, with
its trained tokens, reward, turns and data source. Counted since the run began; a checkpoint holds the state of its moment, as
it does for the counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from sample_bus.messages import BiasPart, BiasReport
from sample_bus.protocols import Leased
from sample_bus.sample import Sample
from sample_bus.spread import Histogram, mean, quantile
from trainer.aged import Weighting
from trainer.groups import Dropped, DropReason, Group

MAX_SOURCES = 32
"""Data sources that are told apart in one part; the rest is counted as OTHER."""
OTHER = "(other)"
BIASING = frozenset({DropReason.STALE, DropReason.STALE_RETRIED, DropReason.STALE_FOR_GOOD, DropReason.GROUP_INCOMPLETE})
"""Reasons that choose among samples by what they are."""


class _Part:
    def __init__(self, before: BiasPart) -> None:
        self._length, self._reward, self._turns = (Histogram(one) for one in (before.length, before.reward, before.turns))
        self._sources = dict(before.sources)
        self.closed_seats = before.closed_seats

    def add(self, sample: Sample) -> None:
        self._length.add(sample.num_trained_tokens)
        self._reward.add(sample.reward)
        self._turns.add(sample.num_turns)
        known = sample.data_source in self._sources or len(self._sources) < MAX_SOURCES
        source = sample.data_source if known else OTHER
        self._sources[source] = self._sources.get(source, 0) + 1

    def report(self) -> BiasPart:
        return BiasPart(
            length=self._length.spread(),
            reward=self._reward.spread(),
            turns=self._turns.spread(),
            sources=dict(self._sources),
            closed_seats=self.closed_seats,
        )


class BiasBook:
    """Running sums."""

    def __init__(self, before: BiasReport | None = None) -> None:
        """`before`: of the checkpoint that the run goes on from."""
        before = before or BiasReport()
        self._trained, self._downweighted, self._dropped = map(_Part, (before.trained, before.downweighted, before.dropped))

    def train(self, group: Group, weighting: Weighting | None) -> None:
        """The group's effect is in the weights."""
        for leased in group.members:
            is_down = weighting is not None and weighting.is_down(leased.sample)
            (self._downweighted if is_down else self._trained).add(leased.sample)
        self._trained.closed_seats += len(group.closures)

    def drop(self, dropped: Dropped) -> None:
        if dropped.reason not in BIASING:
            return
        for lease in dropped.records:
            if isinstance(lease, Leased):
                self._dropped.add(lease.sample)
            else:
                self._dropped.closed_seats += 1

    def report(self) -> BiasReport:
        return BiasReport(
            trained=self._trained.report(), downweighted=self._downweighted.report(), dropped=self._dropped.report()
        )


def row_of(report: BiasReport) -> dict[str, float]:
    """Columns of a step's row of metrics: of each part that has samples its figures since the run began, and how far the data
    sources of what was dropped are from those of what was trained."""
    row: dict[str, float] = {}
    for name, part in (("trained", report.trained), ("downweighted", report.downweighted), ("dropped", report.dropped)):
        row[f"bias_{name}_samples"] = part.length.count
        for what, spread in (("length", part.length), ("reward", part.reward), ("turns", part.turns)):
            figures = {"mean": mean(spread), "p50": quantile(spread, 0.5), "p90": quantile(spread, 0.9)}
            row |= {f"bias_{name}_{what}_{figure}": value for figure, value in figures.items() if value is not None}
    if report.dropped.length.count and report.trained.length.count:
        row["bias_source_distance"] = source_distance(report.trained.sources, report.dropped.sources)
    return row


def source_distance(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    """Total variation distance of two distributions over data sources: 0 alike, 1 disjoint. Neither may be empty."""
    total_left, total_right = sum(left.values()), sum(right.values())
    return sum(abs(left.get(one, 0) / total_left - right.get(one, 0) / total_right) for one in left.keys() | right.keys()) / 2
