"""What a checkpoint says of the run around the model: `state.json`. Light: no torch.

Invariant: step, policy version, bus position and counts are of one moment, at which exactly the records that the position
covers had their effect on the weights beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sample_bus.errors import WireError
from sample_bus.messages import BiasReport, Counts
from sample_bus.position import BusPosition
from trainer.errors import CheckpointError

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    run_id: str
    incarnation: str
    """Of the trainer's process that wrote it."""
    step: int
    """Steps taken."""
    policy_version: int
    """Newest published version."""
    position: BusPosition
    counts: Counts
    """Settled ones only (`Books.settled`)."""
    bias: BiasReport = field(default_factory=BiasReport)

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: getattr(self, name) for name in ("run_id", "incarnation", "step", "policy_version")}
        return {
            "format": FORMAT,
            **plain,
            "position": self.position.as_plain(),
            "counts": self.counts.model_dump(mode="json"),
            "bias": self.bias.model_dump(mode="json"),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> RunState:
        """What `as_plain` gave. Raises CheckpointError naming `where`."""
        try:
            if plain["format"] != FORMAT:
                raise CheckpointError(f"{where}: got format {plain['format']}, expected {FORMAT}")
            return cls(
                run_id=str(plain["run_id"]),
                incarnation=str(plain["incarnation"]),
                step=int(plain["step"]),
                policy_version=int(plain["policy_version"]),
                position=BusPosition.from_plain(plain["position"]),
                counts=Counts.model_validate(plain["counts"]),
                bias=BiasReport.model_validate(plain.get("bias", {})),
            )
        except (KeyError, TypeError, ValueError, WireError, ValidationError) as error:
            raise CheckpointError(f"{where}: no state of a run: {type(error).__name__} {error}") from error
