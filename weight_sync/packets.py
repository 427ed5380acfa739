"""The control packets between processes of one host: one packet a message (SOCK_SEQPACKET).

receiver                                server
HELLO(request)                      ─►
                                    ◄─  WELCOME(terms), or FAIL(reason)
either a stream through a ring:
                                    ◄─  RING(bucket_bytes) + its descriptor
                                    ◄─  BUCKET(kind, sequence, slot, sizes, hash of the header)
FREE(slot)                          ─►
                                    ◄─  END(version, digest, totals)
DONE(digest)                        ─►
or a loan of the memory in which the weights lie:
                                    ◄─  TABLE(sizes) + the descriptor of what describes it
                                    ◄─  SEGMENT(index, bytes) + its descriptor, for each
                                    ◄─  END(version, digest, totals)
DONE(digest)                        ─►
RETURNED, once it reads no more     ─►
FAIL(reason), from either side at any time, ends the transfer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weight_sync.errors import ProtocolError
from weight_sync.handshake import decode_request, decode_terms, encode_request, encode_terms
from weight_sync.transport import PROTOCOL_VERSION, StageRequest, Terms

MAX_PACKET_BYTES = 1024
MAX_REASON_BYTES = 900
_MAGIC = b"HW"
_KIND = struct.Struct("<2sBB")
_RING = struct.Struct("<Q")
_BUCKET = struct.Struct("<BIIIIQ")
_FREE = struct.Struct("<I")
_END = struct.Struct("<q32sIQI")
_DONE = struct.Struct("<32s")
_TABLE = struct.Struct("<IQQ")
_SEGMENT = struct.Struct("<IQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    request: StageRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    terms: Terms
    """The server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPassed:
    bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePassed:
    """What is lent: so many segments, described in memory of its own."""

    num_segments: int
    table_bytes: int
    manifest_bytes: int
    """Of the table, from its begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPassed:
    index: int
    num_bytes: int
    header_bytes: int
    """Of the table, behind the headers of the segments before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSent:
    kind: int
    sequence: int
    slot: int
    payload_bytes: int
    header_bytes: int
    header_checksum: int
    """xxh3_64 of the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    policy_version: int
    manifest_digest: str
    num_tensors: int
    total_bytes: int
    num_buckets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    manifest_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePassed:
    """In place of a table: the directory in which the version lies."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """Nobody reads what was lent any more, nor anybody to whom it was lent on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    reason: str


Packet = (
    Hello | Welcome | RingPassed | TablePassed | SegmentPassed | FilePassed | BucketSent | Free | End | Done | Returned | Fail
)


def _digest(value: str) -> bytes:
    encoded = value.encode()
    if not 0 < len(encoded) <= 32 or "\0" in value:
        raise ProtocolError(f"got digest {value!r}, expected 1 to 32 bytes without NUL")
    return encoded


def encode(packet: Packet) -> bytes:
    match packet:
        case Hello():
            kind, body = 1, encode_request(packet.request)
        case Welcome():
            kind, body = 2, encode_terms(packet.terms)
        case BucketSent():
            kind, body = (
                3,
                _BUCKET.pack(
                    packet.kind,
                    packet.sequence,
                    packet.slot,
                    packet.payload_bytes,
                    packet.header_bytes,
                    packet.header_checksum,
                ),
            )
        case Free():
            kind, body = 4, _FREE.pack(packet.slot)
        case End():
            kind, body = (
                5,
                _END.pack(
                    packet.policy_version,
                    _digest(packet.manifest_digest),
                    packet.num_tensors,
                    packet.total_bytes,
                    packet.num_buckets,
                ),
            )
        case Done():
            kind, body = 6, _DONE.pack(_digest(packet.manifest_digest))
        case Fail():
            kind, body = 7, packet.reason.encode()[:MAX_REASON_BYTES]
        case RingPassed():
            kind, body = 8, _RING.pack(packet.bucket_bytes)
        case TablePassed():
            kind, body = 9, _TABLE.pack(packet.num_segments, packet.table_bytes, packet.manifest_bytes)
        case SegmentPassed():
            kind, body = 10, _SEGMENT.pack(packet.index, packet.num_bytes, packet.header_bytes)
        case Returned():
            kind, body = 11, b""
        case FilePassed():
            kind, body = 12, packet.path.encode()
            if len(body) > MAX_REASON_BYTES:
                raise ProtocolError(f"a path of {len(body)} bytes is longer than {MAX_REASON_BYTES}: {packet.path}")
    return _KIND.pack(_MAGIC, PROTOCOL_VERSION, kind) + body


def decode(data: bytes) -> Packet:
    """Raises `ProtocolError` on anything that `encode` does not write, and names both versions when they differ."""
    if len(data) < _KIND.size or data[:2] != _MAGIC:
        raise ProtocolError(f"got {data[:16]!r} ({len(data)} bytes), which is no weight-sync packet")
    _, version, kind = _KIND.unpack_from(data)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}")
    body = data[_KIND.size :]
    try:
        return _decode_body(kind, body)
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"packet of kind {kind} with {len(body)} bytes does not decode: {error}") from error


def _decode_body(kind: int, body: bytes) -> Packet:
    match kind:
        case 1:
            return Hello(request=decode_request(body))
        case 2:
            return Welcome(terms=decode_terms(body))
        case 3:
            bucket_kind, sequence, slot, payload_bytes, header_bytes, header_checksum = _BUCKET.unpack(body)
            return BucketSent(
                kind=bucket_kind,
                sequence=sequence,
                slot=slot,
                payload_bytes=payload_bytes,
                header_bytes=header_bytes,
                header_checksum=header_checksum,
            )
        case 4:
            return Free(slot=_FREE.unpack(body)[0])
        case 5:
            policy_version, digest, num_tensors, total_bytes, num_buckets = _END.unpack(body)
            return End(
                policy_version=policy_version,
                manifest_digest=digest.decode(),
                num_tensors=num_tensors,
                total_bytes=total_bytes,
                num_buckets=num_buckets,
            )
        case 6:
            return Done(manifest_digest=_DONE.unpack(body)[0].decode())
        case 7:
            return Fail(reason=body.decode(errors="replace"))
        case 8:
            return RingPassed(bucket_bytes=_RING.unpack(body)[0])
        case 9:
            num_segments, table_bytes, manifest_bytes = _TABLE.unpack(body)
            return TablePassed(num_segments=num_segments, table_bytes=table_bytes, manifest_bytes=manifest_bytes)
        case 10:
            index, num_bytes, header_bytes = _SEGMENT.unpack(body)
            return SegmentPassed(index=index, num_bytes=num_bytes, header_bytes=header_bytes)
        case 11:
            return Returned()
        case 12:
            return FilePassed(path=body.decode())
        case _:
            raise ProtocolError(f"packet kind {kind} is unknown")
