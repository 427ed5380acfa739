"""What the I/O thread of an end tells its event loop."""

from __future__ import annotations

from dataclasses import dataclass

from sample_bus.frames import Control
from sample_bus.sample import Sample, SampleId

SERVER = b""
"""How a client's thread names its only peer, the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A control message."""

    peer: bytes
    message: Control


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedSample:
    """A sample, decoded and validated."""

    peer: bytes
    seq: int
    nbytes: int
    """Bytes of the sample's frames."""
    id: SampleId
    sample: Sample
    frames: tuple[memoryview, ...]
    """All frames, the envelope first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """What did not decode."""

    peer: bytes
    seq: int | None
    """Place in the stream; None when not even the envelope decoded."""
    error: str
    frames: tuple[memoryview, ...]
    """All frames, the envelope first."""

    @property
    def nbytes(self) -> int:
        """Bytes of the sample's frames."""
        return sum(frame.nbytes for frame in self.frames[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The transport has a connection to the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The connection to `peer` is gone, and with it everything unsent."""

    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """Nothing came from `peer` for the heartbeat timeout."""

    peer: bytes
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardAgain:
    """Something came from a peer that was silent or probed."""

    peer: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The thread ended by an error of ours."""

    error: str


Event = Arrived | ArrivedSample | Malformed | Connected | Disconnected | Silent | HeardAgain | Crashed
