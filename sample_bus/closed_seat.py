"""A seat that stays empty: what travels in a sample's place when a rollout is given up.

Invariant: every admitted rollout puts exactly one record into its producer's stream, its sample or its closed seat; so a group
is whole when each of its seats has brought one of the two, whatever was restarted meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sample_bus.errors import WireError

MAX_MESSAGE = 2000
"""Characters of `message` that travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSeat:
    task_id: str
    group_id: str
    rollout_id: str
    attempt: int
    """Number of the last try, from 0."""
    seat: int
    """Place in the group, 0 … group_size - 1."""
    group_size: int
    data_source: str
    reason: str
    """Why the rollout was given up: a word that is counted under."""
    message: str
    """The error's own words."""
    settings_revision: int
    """Revision of the live settings under which the rollout was admitted."""
    incarnation: str
    """The trainer's incarnation at admission."""
    closed_at: float
    """Unix time in seconds."""

    def validate(self) -> None:
        """Raise WireError naming the first field that is inconsistent."""
        if not 0 <= self.seat < self.group_size:
            raise WireError(f"seat: got {self.seat}, expected 0 to {self.group_size - 1} (rollout {self.rollout_id})")
        if not self.reason:
            raise WireError(f"reason: got '', expected a word (rollout {self.rollout_id})")
        if len(self.message) > MAX_MESSAGE:
            raise WireError(f"message: {len(self.message)} characters, expected at most {MAX_MESSAGE} ({self.rollout_id})")
        if not math.isfinite(self.closed_at):
            raise WireError(f"closed_at: got {self.closed_at}, expected a finite number (rollout {self.rollout_id})")
