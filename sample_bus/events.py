"""What the I/O thread of an end tells its event loop."""

from __future__ import annotations

from dataclasses import dataclass

from sample_bus.closed_seat import ClosedSeat
from sample_bus.frames import Control
from sample_bus.sample import Sample, SampleId

SERVER = b""
"""How a client's thread names its only peer, the trainer."""
STREAM = b""
"""Peer of records that a hub reads from a broker's stream: they bear their producer in their id."""


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
class ArrivedClosure:
    """A closed seat, decoded and validated."""

    peer: bytes
    seq: int
    nbytes: int
    id: SampleId
    closed: ClosedSeat
    frames: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """What did not decode."""

    peer: bytes
    seq: int | None
    """Place in the stream; None when not even the envelope decoded."""
    error: str
    place: tuple[str, int] | None = None
    """(producer, epoch) where the transport knows it, as a broker's stream does."""
    frames: tuple[memoryview, ...]
    """All frames, the envelope first."""

    @property
    def nbytes(self) -> int:
        """Bytes of the sample's frames."""
        return sum(frame.nbytes for frame in self.frames[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The broker has a record no more that nobody committed: it lost its data, or somebody deleted it."""

    place: tuple[str, int]
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The trainer can be reached, for the first time or again: say hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """The trainer cannot be reached for a reason that may well last."""

    problem: str


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


# ── of a producer's own stream ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened:
    run_id: str
    epoch: int
    committed: int
    """Sequence number of the first record that is kept, or the next one to come."""
    sizes: tuple[int, ...]
    """Bytes of the frames of each kept record, from `committed` on; so the next record is number committed + len(sizes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFailed:
    """It cannot be opened: nothing can be offered."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Every record below `upto` is durable."""

    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocked:
    """Records cannot be written for the moment."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnblocked:
    """Records can be written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Kept records first, first + 1, …, as frames."""

    first: int
    records: tuple[tuple[bytes | memoryview, ...], ...]


Event = (
    Arrived
    | ArrivedSample
    | ArrivedClosure
    | Malformed
    | Missing
    | Connected
    | Unreachable
    | Disconnected
    | Silent
    | HeardAgain
    | Crashed
    | StreamOpened
    | StreamFailed
    | Stored
    | StoreBlocked
    | StoreUnblocked
    | ReadBack
)
