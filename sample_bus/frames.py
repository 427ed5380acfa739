"""Control messages of the bus: what each says, its bytes, and the decoder that accepts nothing else.

A message is one frame: a msgpack array [kind, field, …]. Only DATA has more frames: [kind, seq] and then the frames of `wire`.
Conversation of a client with the trainer, in order:

    HELLO → WELCOME | REFUSED       who I am / which run this is, and all topics
    OPEN → OPENED                   where my stream stands / where you believe it stands, what you account for, credit
    DATA → ACK                      a record / what was received, settled and committed, and the credit
    WITHHELD →                      a record is larger than this trainer takes; it stands in for DATA
    REJECTED ←                      a record did not decode, or was withheld; it will not be trained
    TOPIC ⇄                         a retained value changed
    REQUEST → REPLY
    HEARTBEAT ⇄                     from the I/O thread of each end
    RESET ←                         I do not know you: say HELLO again
    BYE ⇄                           I close in good order

Credit is a window from the ACK's own `received` on, as in TCP: `limit_samples` is an absolute sequence number, `room_bytes`
counts bytes of records from `received` on. So a lost or repeated ACK cannot make credit drift.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from sample_bus.errors import WireError
from sample_bus.packing import Buffer, pack, unpack

PROTOCOL = 3
MAX_CONTROL_BYTES = 16 << 20
MAX_TEXT = 4096
MAX_ITEMS = 1024
"""Fields of a message, or retained topics in a WELCOME."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    KIND: ClassVar[int] = 1
    protocol: int
    greeting: int
    """Number of this HELLO; the WELCOME that answers it carries it."""
    name: str
    role: str
    process: int
    """Names the client's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    KIND: ClassVar[int] = 5
    received: int
    """Sequence number expected next; everything below is held or settled."""
    settled: int
    """How many are settled, whichever they are."""
    committed: int
    """Everything below it is covered by a commit: the producer may free its copies."""
    limit_samples: int
    """Sequence numbers below it may be sent."""
    room_bytes: int
    """So many bytes of records from `received` on may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicValue:
    KIND: ClassVar[int] = 6
    name: str
    revision: int
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    KIND: ClassVar[int] = 2
    greeting: int
    incarnation: str
    run: str
    run_id: str
    """Names the run over restarts."""
    max_sample_bytes: int
    """A larger sample would be refused."""
    topics: list[TopicValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    KIND: ClassVar[int] = 3
    greeting: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    KIND: ClassVar[int] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    KIND: ClassVar[int] = 7
    id: int
    name: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    KIND: ClassVar[int] = 8
    id: int
    ok: bool
    body: bytes
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    KIND: ClassVar[int] = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    KIND: ClassVar[int] = 10
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Envelope of a sample; the sample's own frames follow it."""

    KIND: ClassVar[int] = 11
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A producer's stream, as it stands on its side."""

    KIND: ClassVar[int] = 12
    greeting: int
    epoch: int
    committed: int
    """First record that is kept."""
    next_seq: int
    """Number of the next record to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    KIND: ClassVar[int] = 13
    greeting: int
    ack: Ack
    origin_version: int
    accounted: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    KIND: ClassVar[int] = 14
    seq: int
    error: str
    lost: bool
    """There is nothing to decode: the broker has the record no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """In the place of a record that was kept when more was allowed."""

    KIND: ClassVar[int] = 15
    seq: int
    nbytes: int


Control = (
    Hello
    | Welcome
    | Refused
    | Reset
    | Ack
    | TopicValue
    | Request
    | Reply
    | Heartbeat
    | Bye
    | Data
    | Open
    | Opened
    | Rejected
    | Withheld
)
_KINDS: dict[int, type[Control]] = {kind.KIND: kind for kind in get_args(Control)}
_LAYOUT: dict[type[Control], dict[str, Any]] = {
    kind: {field.name: get_type_hints(kind)[field.name] for field in fields(kind)} for kind in _KINDS.values()
}


def encode_control(message: Control) -> bytes:
    """The message's frame. Raises WireError if it is larger than the bus carries."""
    frame = pack([message.KIND, *_values(message)])
    if len(frame) > MAX_CONTROL_BYTES:
        raise WireError(f"{type(message).__name__}: {len(frame)} bytes, expected at most {MAX_CONTROL_BYTES}")
    return frame


def decode_control(frame: Buffer, num_following: int = 0) -> Control:
    """The message of a frame that has `num_following` frames after it. Raises WireError."""
    if len(frame) > MAX_CONTROL_BYTES:
        raise WireError(f"control message: {len(frame)} bytes, expected at most {MAX_CONTROL_BYTES}")
    values = unpack(frame, "control message", max_items=MAX_ITEMS)
    if not isinstance(values, list) or not values or type(values[0]) is not int or values[0] not in _KINDS:
        raise WireError(f"control message: got {repr(values)[:80]}, expected [kind, …] with a known kind")
    kind = _KINDS[values[0]]
    if (kind is Data) != (num_following > 0):
        raise WireError(f"{kind.__name__}: followed by {num_following} frames")
    message: Control = _message(kind, values[1:])
    return message


def _values(message: Control) -> list[Any]:
    return [_plain(getattr(message, name)) for name in _LAYOUT[type(message)]]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _values(value) if type(value) in _LAYOUT else value


def _message(kind: type[Control], values: Any) -> Any:
    layout = _LAYOUT[kind]
    if not isinstance(values, list) or len(values) != len(layout):
        raise WireError(f"{kind.__name__}: got {repr(values)[:80]}, expected {len(layout)} fields")
    checked = {
        name: _checked(value, expected, f"{kind.__name__}.{name}")
        for (name, expected), value in zip(layout.items(), values, strict=True)
    }
    return kind(**checked)


def _checked(value: Any, expected: Any, where: str) -> Any:
    """The value itself, or what it stands for, once it is known to be as expected."""
    if expected in _LAYOUT:
        return _message(expected, value)
    if get_origin(expected) is list:
        if type(value) is not list:
            raise WireError(f"{where}: got {type(value).__name__}, expected list")
        return [_checked(item, get_args(expected)[0], where) for item in value]
    if type(value) is not expected:
        raise WireError(f"{where}: got {type(value).__name__}, expected {expected.__name__}")
    if expected is int and not 0 <= value < 1 << 63:
        raise WireError(f"{where}: got {value}, expected 0 to 2^63 - 1")
    if expected is str and len(value) > MAX_TEXT:
        raise WireError(f"{where}: got {len(value)} characters, expected at most {MAX_TEXT}")
    return value
