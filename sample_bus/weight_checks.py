"""What is said when somebody asks whether the engines hold the trainer's weights.

A console asks the trainer (`weights.check`), which asks the rollouter (topic `weights_check`), which answers once for each
engine (`weights.checked`) with what its workers hold.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from sample_bus.messages import Message


class Verdict(StrEnum):
    EQUAL = "equal"
    """Every tensor is the trainer's of the engine's version, as far as it was compared."""
    DIFFERENT = "different"
    BEHIND = "behind"
    """It holds a version whose checksums the trainer no longer has: nothing was compared."""
    EMPTY = "holds no weights"
    UNKNOWN = "no answer"


class AskWeightCheck(Message):
    """Request `weights.check`."""

    effective: bool = True
    """Read back what the engines compute with, too, which holds each of them up for about a forward pass."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How long the trainer waits for the engines."""


class WeightCheckRequest(Message):
    """Topic `weights_check`: the newest check that was asked for."""

    incarnation: str
    """Of the trainer that asks: each counts its requests from the start."""
    request_id: int
    effective: bool


class WorkerWeights(Message):
    """What one worker of an engine holds."""

    policy_version: int | None
    manifest_digest: str = ""
    checksums: dict[str, str] = Field(default_factory=dict)
    """Tensor to xxh3_64 (hex) over the bytes that the model was loaded with, computed when it was asked."""
    num_equal: int | None = None
    """Tensors that the model computes with exactly as it was given them; None: they were not read back."""
    different: tuple[str, ...] = ()
    """Those with which it computes otherwise."""
    unread: tuple[str, ...] = ()
    """Those that could not be read back."""


class EngineWeights(Message):
    """Request `weights.checked`: the answer of one engine."""

    incarnation: str
    request_id: int
    engine: str
    num_engines: int
    """Engines that answer, this one included."""
    workers: tuple[WorkerWeights, ...] = ()
    error: str = ""
    """Why it did not say what it holds."""


class TensorDifference(Message):
    name: str
    expected: str
    """Checksum at the trainer; empty: it has no such tensor."""
    got: str
    """Checksum at the engine; empty: it has no such tensor."""
    worker: int = 0
    is_effective: bool = False
    """The bytes are right, but the model computes with others."""


class EngineVerdict(Message):
    engine: str
    verdict: Verdict
    policy_version: int | None = None
    num_tensors: int = 0
    """Compared by checksum, over all workers."""
    num_effective: int | None = None
    """Of these, read back from the model and found equal; None: nothing was read back."""
    num_unread: int = 0
    num_differences: int = 0
    differences: tuple[TensorDifference, ...] = ()
    """The first of them."""
    message: str = ""


class WeightCheck(Message):
    """Reply to `weights.check`."""

    policy_version: int
    """The trainer's newest published one."""
    num_tensors: int
    engines: tuple[EngineVerdict, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every engine holds the trainer's weights, and there is one."""
        return bool(self.engines) and all(engine.verdict is Verdict.EQUAL for engine in self.engines)
