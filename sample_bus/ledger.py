"""The books of a run that goes on, from what both daemons say of themselves. Pure.

    issued = trained + dropped (by reason) + failed (by reason) + queued + on the way + in flight

The two sides are counted by two processes: snapshots taken while samples travel differ by those on their way, and only once
both are at rest must the books close. What is proved from the journals, over restarts too, is in `books`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    def on_the_way(self) -> int:
        """Offered and not counted as received yet; below 0 if the trainer's snapshot is the newer one."""
        return self.rollouts.offered - self.samples.received

    @property
    def gap(self) -> int:
        """Issued, less everything that is accounted for: 0 when the books balance."""
        placed = self.samples.trained + self.samples.queued + self.rollouts.in_flight
        return self.issued - placed - sum(self.samples.dropped.values()) - sum(self.rollouts.failed.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """Every equation that does not hold, in words."""
        rollouts, samples = self.rollouts, self.samples
        equations = (
            ("issued = trained + dropped + failed + queued + in flight", self.gap),
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

    def line(self) -> str:
        """One line for a summary."""
        only_travels = self.gap == self.on_the_way and len(self.problems) == 2
        text = identity(
            issued=self.issued,
            trained=self.samples.trained,
            dropped=self.samples.dropped,
            failed=self.rollouts.failed,
            queued=self.samples.queued,
            on_the_way=self.on_the_way if only_travels else 0,
            in_flight=self.rollouts.in_flight,
        )
        return text if self.closes or only_travels else f"{text}: DOES NOT BALANCE ({'; '.join(self.problems)})"


def identity(
    *,
    issued: int,
    trained: int,
    dropped: Mapping[str, int],
    failed: Mapping[str, int],
    queued: int,
    on_the_way: int,
    in_flight: int,
    way: str = "on the way",
    lost: int = 0,
) -> str:
    """The identity in numbers; what is on the way or lost is left out when there is nothing of it."""
    parts = [f"{trained} trained", by_reason(dropped, "dropped")]
    if any(failed.values()):
        parts.append(by_reason(failed, "failed"))
    parts += [f"{queued} queued"]
    if on_the_way:
        parts.append(f"{on_the_way} {way}")
    parts.append(f"{in_flight} in flight")
    if lost:
        parts.append(f"{lost} LOST")
    return f"{issued} issued = {' + '.join(parts)}"


def by_reason(numbers: Mapping[str, int], what: str) -> str:
    """`3 dropped (stale 2, run ended 1)`."""
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(numbers.items()) if number)
    return f"{sum(numbers.values())} {what}" + (f" ({reasons})" if reasons else "")
