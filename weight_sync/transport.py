"""The seam of transports: how a held policy version gets from a server to a receiver.

Invariant: both sides state their terms before a byte of weights moves; terms that differ end the transfer at once, naming both.
A server has one `Listener` for each transport that it speaks and hands each `Incoming` transfer to its own code, which opens it
and streams (`weight_sync.stream`); a receiver opens its end by address. Every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from weight_sync.channel import ReceiveChannel, SendChannel
from weight_sync.errors import ProtocolError

if TYPE_CHECKING:
    from weight_sync.arena import Segment

PROTOCOL_VERSION = 2


class TransportName(StrEnum):
    """The value is an address's scheme: `shared_memory:/PATH`, `tcp://HOST:PORT`, `collective://HOST:PORT`, `file:/PATH`."""

    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    COLLECTIVE = "collective"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one side was configured to speak. An empty or zero field leaves the choice to the other side."""

    transport: str
    protocol: int = PROTOCOL_VERSION
    bucket_bytes: int = 0
    dtype: str = ""
    """In which floating weights travel, such as `bfloat16`."""
    backend: str = ""
    """Of the collective transport: `gloo` or `nccl`."""


def disagreement(mine: Terms, theirs: Terms) -> str | None:
    """Both values of the first field in which two sides differ; None if they can work together."""
    for name in ("protocol", "transport", "backend", "bucket_bytes", "dtype"):
        here, there = getattr(mine, name), getattr(theirs, name)
        if here and there and here != there:
            return f"{name}: {here} here, {there} at the other side"
    return None


def check_terms(mine: Terms, theirs: Terms, peer: str) -> None:
    """Raises ProtocolError, with both values, when the two sides cannot work together."""
    differ = disagreement(mine, theirs)
    if differ is not None:
        raise ProtocolError(f"{peer} was configured otherwise: {differ}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What a receiver asks for."""

    policy_version: int
    receiver: str
    """Name of the engine, or of the host's weight cache; at most 64 bytes."""
    nonce: str
    """Names this staging; at most 64 bytes."""
    terms: Terms
    rank: int = 0
    """Worker of the receiver, from 0."""
    num_ranks: int = 1
    cohort: int = 1
    """Receivers' workers that stage this version at the same time: a collective waits for so many before it begins."""
    base_version: int | None = None
    """Of the weights that the receiver holds and can build upon; None: it needs all of them."""
    base_digest: str = ""
    """Manifest digest of those weights."""


class Incoming(Protocol):
    """One transfer at its server, not opened yet. One of `open` and `refuse` is called, then `close`, by one thread."""

    @property
    def requests(self) -> tuple[StageRequest, ...]:
        """One; of a collective, one for each member that came in time, all for the same version."""
        ...

    @property
    def peer(self) -> str:
        """For messages: who asks."""
        ...

    def open(self) -> SendChannel:
        """Accept, and get the channel. Raises WeightSyncError."""
        ...

    def refuse(self, reason: str) -> None: ...

    def cut(self, reason: str) -> None:
        """End the transfer from any thread; its waits fail with `reason`."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """Takes in transfers of one transport."""

    @property
    def address(self) -> str:
        """What receivers are given; complete after `start`."""
        ...

    def start(self, on_transfer: Callable[[Incoming], None]) -> None:
        """Begin to take transfers in; `on_transfer` is called for each, in a thread of its own. Raises AddressTaken."""
        ...

    def close(self) -> None:
        """Take nothing more in; cut what is under way; leave no socket, file or thread behind."""
        ...


class Receiving(ReceiveChannel, Protocol):
    """The receiver's end of one transfer; left with an exception, it tells the server why."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@runtime_checkable
class Borrowing(Receiving, Protocol):
    """A receiver's end to which memory may be lent. Unless the loan is taken over, leaving the transfer ends it."""

    def take_loan(self) -> LoanLike | None:
        """After the stream ended: the loan, which is the caller's to end from now on; None: the bytes were copied."""
        ...


class LoanLike(Protocol):
    @property
    def segments(self) -> Sequence[Segment]: ...

    def end(self, unread: bool) -> None:
        """`unread`: nobody reads it any more, and the lender may write it again."""
        ...

    def end_when_unread(self) -> None:
        """End it when the last view of the memory in this process is gone."""
        ...


Cut = Callable[[str], None]
"""Ends a transfer from any thread, with a reason."""


class OpenReceiver(Protocol):
    """`open_receiver` of a transport's module."""

    def __call__(
        self, address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
    ) -> Receiving:
        """Open the transfer that `request` asks for; all of it must end within `timeout_s`.

        Raises PeerLost (nobody serves there), PeerFailed (refused, with the server's reason), TransferTimeout.
        """
        ...
