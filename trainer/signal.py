"""Groups without a signal: rewards that are all alike give advantages of 0, and a step of them teaches nothing. Pure.

With `filters.zero_signal=drop` such a group is dropped as it comes, and the rollouter, to which its seats are given back, makes
exactly as many new ones (dynamic sampling: Yu et al. 2025, DAPO, section 3.2). Invariant: for one step at most `max_attempts`
steps' worth of groups is dropped, so a step fills whatever the rewards are; what is decided depends on the group and on what
was dropped since the last step alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from configs.schema import FilterSettings, TrainerSettings
from trainer.advantages import has_spread, turn_advantages
from trainer.groups import DropReason, Group

log = structlog.get_logger()


def has_signal(group: Group, trainer: TrainerSettings) -> bool:
    """Whether some token gets an advantage: rewards differ, or those of turns do and count (`trainer.dense_weight`)."""
    samples = [leased.sample for leased in group.members]
    if has_spread(np.array([sample.reward for sample in samples], np.float64)):
        return True
    dense = turn_advantages(
        samples,
        discount=trainer.dense_discount,
        weight=trainer.dense_weight,
        normalize_by_std=trainer.normalize_by_std,
    )
    return dense is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCounts:
    """Whole groups that came for one step."""

    seen: int = 0
    without: int = 0
    """Those without a signal."""
    dropped: int = 0

    @property
    def share_without(self) -> float:
        return self.without / self.seen if self.seen else 0.0


class SignalFilter:
    """Belongs to the intake."""

    def __init__(
        self,
        rule: Callable[[], FilterSettings] = FilterSettings,
        trainer: Callable[[], TrainerSettings] = TrainerSettings,
    ) -> None:
        """Both are asked at each group."""
        self._rule = rule
        self._trainer = trainer
        self._now = SignalCounts()
        self.last = SignalCounts()
        """Of the newest batch."""

    def drop_reason(self, group: Group, *, groups_per_step: int) -> DropReason | None:
        """Why the group, which came just now, is not to be trained; None: it is."""
        rule, now = self._rule(), self._now
        if has_signal(group, self._trainer()):
            self._now = SignalCounts(seen=now.seen + 1, without=now.without, dropped=now.dropped)
            return None
        most = rule.max_attempts * groups_per_step
        drops = rule.zero_signal == "drop" and now.dropped < most
        self._now = SignalCounts(seen=now.seen + 1, without=now.without + 1, dropped=now.dropped + drops)
        if drops and self._now.dropped == most:
            log.warning(
                "so many groups without a signal were dropped for one step that further ones are kept",
                dropped=most,
                of=self._now.seen,
                max_attempts=rule.max_attempts,
                advice="the data is too easy or too hard: filters.min_pass_rate and filters.max_pass_rate pass such tasks over",
            )
        return DropReason.ZERO_SIGNAL if drops else None

    def taken(self) -> None:
        """A batch was handed out: the next step begins with nothing dropped."""
        self.last, self._now = self._now, SignalCounts()

    def awaits(self) -> str:
        """For a step that waits; empty while nothing was dropped for it."""
        now = self._now
        return f", {now.dropped} of {now.seen} groups dropped without a signal" if now.dropped else ""

    def row(self) -> dict[str, float]:
        """Columns of the row of metrics of the newest batch's step."""
        last = self.last
        return {
            "groups_seen": last.seen,
            "groups_without_signal_share": last.share_without,
            "groups_dropped_without_signal": last.dropped,
        }
