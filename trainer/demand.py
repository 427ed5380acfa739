"""What steps take from the bus, in seats: the trainer's side of admission. Pure.

Invariant: `consumed_seats` belongs to the newest published version, `demand` reaches up to the step in progress; both count
from the origin of this process. A group takes `group_size` seats, whatever its seats brought.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from sample_bus.messages import SeatDemand


class Said(TypedDict):
    """Fields of TrainerStatus."""

    consumed_seats: int
    demand: SeatDemand


@dataclass(slots=True, kw_only=True)
class StepAccount:
    """Steps of this process so far."""

    begun_step: int
    """The newest step that has its batch; at first the one from which the run goes on."""
    sync_step: int
    """The step after which the next version is published."""
    taken_seats: int = 0
    consumed_seats: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the period's steps have all begun."""
        return self.begun_step >= self.sync_step

    def begin(self, step: int, seats: int) -> None:
        """`step` has its batch, of so many seats."""
        self.begun_step = step
        self.taken_seats += seats

    def publish(self, *, next_sync_step: int) -> None:
        """All that was taken is in the published version."""
        self.consumed_seats = self.taken_seats
        self.sync_step = next_sync_step

    def said(self) -> Said:
        """What the status says of it."""
        return {
            "consumed_seats": self.consumed_seats,
            "demand": SeatDemand(taken_seats=self.taken_seats, begun_step=self.begun_step, sync_step=self.sync_step),
        }


def next_sync_step(step: int, *, trigger_parameter_sync_step: int, num_steps: int) -> int:
    """The step after `step` at which a version is published: the next multiple of the interval, at the latest the last step."""
    return min(num_steps, (step // trigger_parameter_sync_step + 1) * trigger_parameter_sync_step)
