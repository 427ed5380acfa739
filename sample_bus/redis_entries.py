"""Commands on one producer's stream, and how their replies are to be read. Shared by its two ends.

Invariant: records are added in order and all of a batch or none: a server that refuses one (out of memory, disk full) has not
taken a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import redis

from sample_bus.errors import BusError
from sample_bus.redis_keys import Buffer, entry_id, fields_of, frames_of, place_of
from sample_bus.redis_wire import Command, Reply, Wire

READ_BYTES = 1 << 20
"""About so much is read at once."""
_MAX_NUMBER = (1 << 64) - 1
_SAME_OR_SMALLER = "equal or smaller"


class ServerRefused(BusError):
    """Raised when the server does not take a record for now: out of memory, disk full, read-only, not allowed."""


class StreamTaken(BusError):
    """Raised when somebody else writes this producer's stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """The last place that was ever used in a stream."""

    epoch: int
    next_seq: int


def top_of(wire: Wire, key: str) -> Top | None:
    """None: the stream does not exist, or never had an entry. Raises redis.ResponseError."""
    try:
        facts = wire.call("XINFO", "STREAM", key)
    except redis.ResponseError as error:
        if "no such key" in str(error):
            return None
        raise
    epoch, seq = place_of(dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"])
    return None if seq < 0 else Top(epoch=epoch, next_seq=seq + 1)


def add(wire: Wire, key: str, epoch: int, batch: Sequence[tuple[int, Sequence[Buffer]]]) -> None:
    """Afterwards the server has taken the whole batch, now or earlier.

    Raises ServerRefused, when it took nothing of it now; StreamTaken; GONE, when that is unknown.
    """
    commands: list[Command] = [("XADD", key, entry_id(epoch, seq), *fields_of(frames)) for seq, frames in batch]
    if len(commands) > 1:
        commands = [("MULTI",), *commands, ("EXEC",)]
    for (seq, frames), reply in zip(batch, _outcomes(wire.calls(commands)), strict=True):
        if not isinstance(reply, redis.ResponseError):
            continue
        if _SAME_OR_SMALLER not in str(reply):
            raise ServerRefused(str(reply))
        if not _is_ours(wire, key, epoch, seq, frames):
            raise StreamTaken(f"record {seq} of stream {key} is not ours: another process offers under this producer's name")


def _outcomes(replies: list[Reply]) -> list[Reply]:
    """Each record's own reply. Raises ServerRefused."""
    if len(replies) == 1:
        return replies
    if isinstance(replies[-1], redis.ResponseError):
        errors = [reply for reply in replies if isinstance(reply, redis.ResponseError)]
        raise ServerRefused(str(errors[0]))
    outcomes: list[Reply] = replies[-1]
    return outcomes


def _is_ours(wire: Wire, key: str, epoch: int, seq: int, frames: Sequence[Buffer]) -> bool:
    """Whether the record that the server has at this place is ours; one that was committed and deleted is."""
    there = wire.call("XRANGE", key, entry_id(epoch, seq), entry_id(epoch, seq))
    if there:
        return frames_of(there[0][1]) == tuple(bytes(frame) for frame in frames)
    top = top_of(wire, key)
    return top is not None and top.epoch == epoch


def kept(wire: Wire, key: str, epoch: int, first: int, last: int | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """Number, and fields and values, of the entries that the stream has from `first` to `last` - 1."""
    end = f"{epoch}-{_MAX_NUMBER}" if last is None else entry_id(epoch, last - 1)
    count = 1
    while last is None or first < last:
        entries = wire.call("XRANGE", key, entry_id(epoch, first), end, "COUNT", count)
        size = 1
        for name, fields in entries:
            size += sum(len(field) for field in fields)
            first = place_of(name)[1] + 1
            yield first - 1, fields
        if len(entries) < count:
            return
        count = max(1, min(1000, READ_BYTES * count // size))
