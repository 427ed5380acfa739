"""The books of a run: issued = trained + dropped (by reason) + queued + in flight. Pure.

The two sides are counted by two processes. Snapshots taken while samples travel may differ by those on their way; once both
are at rest the books must close.
"""

from __future__ import annotations

from dataclasses import dataclass

from sample_bus.messages import Counts, RolloutCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    rollouts: RolloutCounts
    """The rollouter's side."""
    samples: Counts
    """The trainer's side."""

    @property
    def issued(self) -> int:
        return self.rollouts.admitted

    @property
    def dropped(self) -> dict[str, int]:
        """Both sides' losses by reason: rollouts given up, samples dropped."""
        reasons = dict(self.rollouts.failed)
        for reason, number in self.samples.dropped.items():
            reasons[reason] = reasons.get(reason, 0) + number
        return reasons

    @property
    def gap(self) -> int:
        """Issued, less everything that is accounted for: 0 when the books balance."""
        accounted = self.samples.trained + sum(self.dropped.values()) + self.samples.queued + self.rollouts.in_flight
        return self.issued - accounted

    @property
    def problems(self) -> tuple[str, ...]:
        """Every equation that does not hold, in words."""
        rollouts, samples = self.rollouts, self.samples
        equations = (
            ("issued = trained + dropped + queued + in flight", self.gap),
            (
                "issued = offered + failed + in flight (rollouter)",
                rollouts.admitted - rollouts.offered - sum(rollouts.failed.values()) - rollouts.in_flight,
            ),
            ("offered = received", rollouts.offered - samples.received),
            (
                "received = trained + dropped + queued (trainer)",
                samples.received - samples.trained - sum(samples.dropped.values()) - samples.queued,
            ),
        )
        return tuple(f"{equation}: off by {difference}" for equation, difference in equations if difference)

    @property
    def closes(self) -> bool:
        """Whether every equation holds; the daemons must be at rest."""
        return not self.problems

    @property
    def on_the_way(self) -> int:
        """Offered and not counted as received yet; below 0 if the trainer's snapshot is the newer one."""
        return self.rollouts.offered - self.samples.received

    def line(self) -> str:
        """One line for a summary."""
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(self.dropped.items()) if number)
        dropped = f"{sum(self.dropped.values())} dropped" + (f" ({reasons})" if reasons else "")
        text = (
            f"{self.issued} issued = {self.samples.trained} trained + {dropped} + {self.samples.queued} queued "
            f"+ {self.rollouts.in_flight} in flight"
        )
        if self.closes:
            return text
        if self.gap == self.on_the_way and len(self.problems) == 2:
            return f"{text} + {self.on_the_way} on the way"
        return f"{text}: DOES NOT BALANCE ({'; '.join(self.problems)})"
