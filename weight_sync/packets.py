"""The control packets of the shared-memory channel: one fixed struct each, one packet a message (SOCK_SEQPACKET).

receiver                                server
HELLO(version, engine, nonce, rank) ─►
                                    ◄─  WELCOME(bucket_bytes) + file descriptor of the ring, or FAIL(reason)
                                    ◄─  BUCKET(kind, sequence, slot, sizes, hash of the header)
FREE(slot)                          ─►
                                    ◄─  END(version, digest, totals)
DONE(digest)                        ─►
FAIL(reason), from either side at any time, ends the transfer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from weight_sync.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 1024
MAX_REASON_BYTES = 900
_MAGIC = b"HW"
_KIND = struct.Struct("<2sBB")
_HELLO = struct.Struct("<qHH64s64s")
_WELCOME = struct.Struct("<Q")
_BUCKET = struct.Struct("<BIIIIQ")
_FREE = struct.Struct("<I")
_END = struct.Struct("<q32sIQI")
_DONE = struct.Struct("<32s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    policy_version: int
    engine: str
    """At most 64 bytes."""
    nonce: str
    """Names this staging; at most 64 bytes."""
    rank: int
    """Worker of the engine, from 0."""
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    bucket_bytes: int


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
class Fail:
    reason: str


Packet = Hello | Welcome | BucketSent | Free | End | Done | Fail


def _text(value: str, limit: int) -> bytes:
    encoded = value.encode()
    if not 0 < len(encoded) <= limit or "\0" in value:
        raise ProtocolError(f"got {value!r}, expected 1 to {limit} bytes without NUL")
    return encoded


def encode(packet: Packet) -> bytes:
    match packet:
        case Hello():
            engine, nonce = _text(packet.engine, 64), _text(packet.nonce, 64)
            kind, body = 1, _HELLO.pack(packet.policy_version, packet.rank, packet.num_ranks, engine, nonce)
        case Welcome():
            kind, body = 2, _WELCOME.pack(packet.bucket_bytes)
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
                    _text(packet.manifest_digest, 32),
                    packet.num_tensors,
                    packet.total_bytes,
                    packet.num_buckets,
                ),
            )
        case Done():
            kind, body = 6, _DONE.pack(_text(packet.manifest_digest, 32))
        case Fail():
            kind, body = 7, packet.reason.encode()[:MAX_REASON_BYTES]
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
            policy_version, rank, num_ranks, engine, nonce = _HELLO.unpack(body)
            hello = Hello(
                policy_version=policy_version,
                engine=engine.rstrip(b"\0").decode(),
                nonce=nonce.rstrip(b"\0").decode(),
                rank=rank,
                num_ranks=num_ranks,
            )
            if not hello.engine or not hello.nonce or not 0 <= rank < num_ranks:
                raise ProtocolError(f"got {hello}, expected an engine, a nonce and 0 <= rank < num_ranks")
            return hello
        case 2:
            return Welcome(bucket_bytes=_WELCOME.unpack(body)[0])
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
        case _:
            raise ProtocolError(f"packet kind {kind} is unknown")
