"""What stands in a bucket: tensor pieces, and behind them a header that says for each piece what it is.

Invariant: a bucket describes itself. Name, dtype, shape and place of every byte travel in the same bucket as the byte, so no
order has to be agreed on elsewhere. A tensor larger than the room left is cut; small ones share a bucket.

Layout, little-endian: `payload | header`, header = prefix (magic, sequence, policy version, number of pieces), then for each
piece an entry (tensor index, dtype, encoding, dimensions, length of its name, offset, length, place in the bucket, checksum,
bytes of its delta), its sizes and its name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from weight_sync.errors import ProtocolError
from weight_sync.manifest import DTYPE_CODES, DTYPES, TensorSpec

MIN_BUCKET_BYTES = 4096
ALIGNMENT = 64
_MIN_CUT_BYTES = 1024
_MAGIC = b"HRB2"
_PREFIX = struct.Struct("<4sIqI")
_ENTRY = struct.Struct("<IBBBHQQIQQ")


class Encoding(IntEnum):
    """How a tensor travels."""

    FULL = 0
    """All of its bytes."""
    UNCHANGED = 1
    """None: it is the tensor of this name in the base."""
    DELTA = 2
    """What changed since the base (`weight_sync.delta`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of one tensor, or of its delta, in one bucket."""

    index: int
    """Which tensor of the stream, from 0."""
    spec: TensorSpec
    offset: int
    """Byte offset in the tensor, or in its delta."""
    length: int
    """Bytes; 0 only for a tensor without elements or without changes."""
    position: int
    """Byte offset in the bucket, a multiple of 64."""
    checksum: int
    """xxh3_64 of the whole tensor in its last piece, 0 in earlier ones."""
    encoding: Encoding = Encoding.FULL
    delta_bytes: int = 0
    """Size of the whole delta; 0 unless `encoding` is DELTA."""

    @property
    def travel_bytes(self) -> int:
        """Of all pieces of the tensor."""
        return self.spec.num_bytes if self.encoding is Encoding.FULL else self.delta_bytes

    @property
    def is_last(self) -> bool:
        return self.offset + self.length == self.travel_bytes


def entry_bytes(spec: TensorSpec) -> int:
    """Bytes that a piece of this tensor takes in a header."""
    return _ENTRY.size + 8 * len(spec.shape) + len(spec.name.encode())


@dataclass(slots=True)
class BucketLayout:
    """Decides where the next piece of a bucket goes. `payload_end + header_bytes` never exceeds `bucket_bytes`."""

    bucket_bytes: int
    payload_end: int = 0
    header_bytes: int = _PREFIX.size
    num_pieces: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes < MIN_BUCKET_BYTES:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}; expected at least {MIN_BUCKET_BYTES}")

    def place(self, spec: TensorSpec, remaining: int) -> tuple[int, int] | None:
        """(position, length) of the next piece of a tensor with `remaining` bytes left; None: send this bucket first.

        The length is `remaining`, or a cut at a multiple of 64 bytes.
        """
        position = -(-self.payload_end // ALIGNMENT) * ALIGNMENT
        room = self.bucket_bytes - position - self.header_bytes - entry_bytes(spec)
        if remaining <= room:
            length = remaining
        else:
            length = max(0, room) // ALIGNMENT * ALIGNMENT
            if length < _MIN_CUT_BYTES:
                if self.num_pieces == 0:
                    raise ProtocolError(f"a bucket of {self.bucket_bytes} bytes has no room for a piece of {spec}")
                return None
        self.payload_end = position + length
        self.header_bytes += entry_bytes(spec)
        self.num_pieces += 1
        return position, length


def encode_header(pieces: Sequence[Piece], *, sequence: int, policy_version: int) -> bytes:
    parts = [_PREFIX.pack(_MAGIC, sequence, policy_version, len(pieces))]
    for piece in pieces:
        spec, name = piece.spec, piece.spec.name.encode()
        parts.append(
            _ENTRY.pack(
                piece.index,
                DTYPE_CODES[spec.dtype],
                piece.encoding,
                len(spec.shape),
                len(name),
                piece.offset,
                piece.length,
                piece.position,
                piece.checksum,
                piece.delta_bytes,
            )
        )
        parts.append(struct.pack(f"<{len(spec.shape)}Q", *spec.shape))
        parts.append(name)
    return b"".join(parts)


def decode_header(header: bytes, *, payload_bytes: int, sequence: int, policy_version: int) -> list[Piece]:
    """The pieces of a bucket whose payload has `payload_bytes` bytes.

    Raises:
        ProtocolError: the header is no header, is that of another bucket or version, or a piece lies outside its bucket or
            tensor.
    """
    try:
        magic, got_sequence, got_version, num_pieces = _PREFIX.unpack_from(header)
        if (magic, got_sequence, got_version) != (_MAGIC, sequence, policy_version):
            raise ProtocolError(
                f"got bucket {got_sequence} of version {got_version} ({magic!r}), expected {sequence} of {policy_version}"
            )
        pieces: list[Piece] = []
        at = _PREFIX.size
        for _ in range(num_pieces):
            index, code, encoding, dims, name_bytes, *place, checksum, delta_bytes = _ENTRY.unpack_from(header, at)
            offset, length, position = place
            at += _ENTRY.size
            shape = struct.unpack_from(f"<{dims}Q", header, at)
            at += 8 * dims
            name = header[at : at + name_bytes].decode()
            at += name_bytes
            spec = TensorSpec(name=name, dtype=DTYPES[code], shape=shape)
            pieces.append(
                Piece(
                    index=index,
                    spec=spec,
                    offset=offset,
                    length=length,
                    position=position,
                    checksum=checksum,
                    encoding=Encoding(encoding),
                    delta_bytes=delta_bytes,
                )
            )
    except (struct.error, ValueError, KeyError) as error:
        raise ProtocolError(f"header of bucket {sequence} ({len(header)} bytes) does not decode: {error!r}") from error
    if at != len(header):
        raise ProtocolError(f"header of bucket {sequence} has {len(header)} bytes, its pieces take {at}")
    for piece in pieces:
        if piece.position + piece.length > payload_bytes or piece.offset + piece.length > piece.travel_bytes:
            raise ProtocolError(
                f"bucket {sequence}: bytes {piece.offset}+{piece.length} of {piece.spec} at {piece.position} lie outside the "
                f"tensor ({piece.travel_bytes} bytes as it travels) or the bucket ({payload_bytes} bytes)"
            )
        least, most = (1, piece.spec.num_bytes - 1) if piece.encoding is Encoding.DELTA else (0, 0)
        if not least <= piece.delta_bytes <= most:
            raise ProtocolError(
                f"bucket {sequence}: {piece.spec}, {piece.encoding.name}, has a delta of {piece.delta_bytes} bytes, expected "
                f"{least} to {most}"
            )
    return pieces
