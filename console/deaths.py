"""Why daemons died, a line each, the one whose failure it was by name. Pure.

Invariant: where the trainer ended because the rollouter said that it cannot go on, the rollouter is named as the cause,
with its log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from console.verdict import ROLLOUTER_SAID, exit_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    name: str
    exit_code: int
    reason: str
    """Its last words."""
    log: Path


def death_lines(deaths: Sequence[Death], *, rollouter_log: Path) -> tuple[str, ...]:
    """`deaths` in their order."""
    lines = []
    for death in deaths:
        _, told, why = death.reason.partition(ROLLOUTER_SAID)
        if not told:
            how = exit_text(death.exit_code)
            lines.append(f"{death.name} died ({how}): {death.reason}; log: {death.log}")
        elif all(other.name != "rollouter" for other in deaths):
            lines.append(f"rollouter could not go on, and the {death.name} ended with it: {why}; log: {rollouter_log}")
    return tuple(lines)
