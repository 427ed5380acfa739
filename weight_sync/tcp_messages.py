"""The messages of the network transports: msgpack arrays with the kind first; a bucket's bytes follow in a frame of their own.

receiver                                          server
HELLO(token, transfer, request, facts)        ─►           on the first connection
JOIN(token, transfer, stripe)                 ─►           on each of the others
                                              ◄─  WELCOME(terms, window, group) or FAIL(reason)
                                              ◄─  BUCKET(kind, sequence, header) + payload, bucket i on connection i mod n
CREDIT(number of buckets given back so far)   ─►
                                              ◄─  FILE(directory), of the file transport, in place of buckets
                                              ◄─  END(version, digest, totals), in its turn
DONE(digest)                                  ─►
FAIL(reason), from either side at any time, ends the transfer; PING asks only whether the connection stands.
Of a collective, only HELLO, WELCOME, DONE and FAIL travel here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack

from weight_sync.channel import StreamEnd
from weight_sync.errors import ProtocolError
from weight_sync.handshake import decode_request, decode_terms, encode_request, encode_terms
from weight_sync.tcp_address import MAX_CONNECTIONS, TOKEN_BYTES
from weight_sync.transport import StageRequest, Terms

MAX_REASON_LETTERS = 2000
MAX_MESSAGE_BYTES = 1 << 16
"""Of what a receiver sends; the server reads nothing longer."""
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    token: bytes = field(repr=False)
    transfer: str
    """32 hex digits, made by the receiver."""
    num_stripes: int
    request: StageRequest
    device: str = ""
    """Of a collective: UUID of the receiver's CUDA device; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    token: bytes = field(repr=False)
    transfer: str
    stripe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How to join the process group of one collective transfer."""

    store_port: int
    name: str
    rank: int
    """Of the receiver; the sender is 0."""
    size: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    terms: Terms
    window: int
    """Buckets that may be out at a time; 0 of a collective."""
    bucket_bytes: int
    """Of one message, at most."""
    group: Group | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHead:
    """Goes before the payload."""

    kind: int
    sequence: int
    header: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    num_released: int
    """Since the beginning of the transfer, so that nothing drifts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNamed:
    directory: str
    """In which the version lies, as both hosts see it."""


Message = Hello | Join | Welcome | BucketHead | StreamEnd | Credit | Done | Fail | Ping | FileNamed


def encode(message: Message) -> bytes:
    match message:
        case Hello():
            request = encode_request(message.request)
            fields: list[object] = [1, message.token, message.transfer, message.num_stripes, request, message.device]
        case Join():
            fields = [2, message.token, message.transfer, message.stripe]
        case Welcome():
            group = None if message.group is None else list(astuple(message.group))
            fields = [3, encode_terms(message.terms), message.window, message.bucket_bytes, group]
        case BucketHead():
            fields = [4, message.kind, message.sequence, message.header]
        case StreamEnd():
            fields = [
                5,
                message.policy_version,
                message.manifest_digest,
                message.num_tensors,
                message.total_bytes,
                message.num_buckets,
            ]
        case Credit():
            fields = [6, message.num_released]
        case Done():
            fields = [7, message.manifest_digest]
        case Fail():
            fields = [8, message.reason[:MAX_REASON_LETTERS]]
        case Ping():
            fields = [9]
        case FileNamed():
            fields = [10, message.directory]
    packed: bytes = msgpack.packb(fields)
    return packed


def decode(data: bytes | memoryview) -> Message:
    """Raises `ProtocolError` on anything that `encode` does not write."""
    try:
        kind, *fields = msgpack.unpackb(data, raw=False, use_list=True, max_bin_len=_MAX_HEADER_BYTES)
        read = _READERS.get(kind)
        if read is None:
            raise ValueError(f"kind {kind!r} is unknown")
        return read(*fields)
    except ProtocolError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message of {len(data)} bytes is none of this protocol: {error}") from error


def _hello(token: object, transfer: object, num_stripes: object, request: object, device: object) -> Hello:
    return Hello(
        token=_of(bytes, token, TOKEN_BYTES),
        transfer=_transfer(transfer),
        num_stripes=_number(num_stripes, low=1, high=MAX_CONNECTIONS),
        request=decode_request(_of(bytes, request, 4096)),
        device=_of(str, device, 128),
    )


def _join(token: object, transfer: object, stripe: object) -> Join:
    return Join(
        token=_of(bytes, token, TOKEN_BYTES),
        transfer=_transfer(transfer),
        stripe=_number(stripe, low=1, high=MAX_CONNECTIONS - 1),
    )


def _welcome(terms: object, window: object, bucket_bytes: object, group: object) -> Welcome:
    return Welcome(
        terms=decode_terms(_of(bytes, terms, 4096)),
        window=_number(window),
        bucket_bytes=_number(bucket_bytes, low=1),
        group=None if group is None else _group(*_of(list, group, 5)),
    )


def _group(store_port: object, name: object, rank: object, size: object, backend: object) -> Group:
    return Group(
        store_port=_number(store_port, low=1, high=65535),
        name=_of(str, name, 64),
        rank=_number(rank, low=1),
        size=_number(size, low=2),
        backend=_of(str, backend, 16),
    )


def _bucket(kind: object, sequence: object, header: object) -> BucketHead:
    return BucketHead(kind=_number(kind), sequence=_number(sequence), header=_of(bytes, header, _MAX_HEADER_BYTES))


def _end(version: object, digest: object, num_tensors: object, total_bytes: object, num_buckets: object) -> StreamEnd:
    return StreamEnd(
        policy_version=_number(version, low=-(1 << 62)),
        manifest_digest=_of(str, digest, 64),
        num_tensors=_number(num_tensors),
        total_bytes=_number(total_bytes),
        num_buckets=_number(num_buckets),
    )


_READERS: dict[object, Callable[..., Message]] = {
    1: _hello,
    2: _join,
    3: _welcome,
    4: _bucket,
    5: _end,
    6: lambda num_released: Credit(num_released=_number(num_released)),
    7: lambda digest: Done(manifest_digest=_of(str, digest, 64)),
    8: lambda reason: Fail(reason=_of(str, reason, MAX_REASON_LETTERS)),
    9: lambda: Ping(),
    10: lambda directory: FileNamed(directory=_of(str, directory, 4096)),
}


def _of(kind: type[Any], value: object, limit: int) -> Any:
    if type(value) is not kind or len(value) > limit:  # type: ignore[arg-type]
        raise ValueError(f"got {str(value)[:80]!r}, expected {kind.__name__} of at most {limit}")
    return value


def _number(value: object, *, low: int = 0, high: int = 1 << 62) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"got {str(value)[:80]!r}, expected an integer from {low} to {high}")
    return value


def _transfer(value: object) -> str:
    text: str = _of(str, value, 32)
    if len(bytes.fromhex(text)) != 16:
        raise ValueError(f"got {text!r}, expected 32 hex digits")
    return text
