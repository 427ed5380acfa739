"""What stands in a bucket: tensor pieces, and behind them a header that says for each piece what it is.

Invariant: a bucket describes itself. Name, dtype, shape and place of every byte travel in the same bucket as the byte, so no
order has to be agreed on elsewhere. A tensor larger than the room left is cut; small ones share a bucket.

Layout, little-endian: `payload | header`, header = prefix (magic, sequence, policy version, number of pieces), then for each
piece an entry (tensor index, dtype, dimensions, length of its name, offset in the tensor, length, place in the bucket,
checksum), its sizes and its name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from weight_sync.errors import ProtocolError
from weight_sync.manifest import DTYPE_CODES, DTYPES, TensorSpec

MIN_BUCKET_BYTES = 4096
ALIGNMENT = 64
_MIN_CUT_BYTES = 1024
_MAGIC = b"HRB1"
_PREFIX = struct.Struct("<4sIqI")
_ENTRY = struct.Struct("<IBBHQQIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of one tensor in one bucket."""

    index: int
    """Which tensor of the stream, from 0."""
    spec: TensorSpec
    offset: int
    """Byte offset in the tensor."""
    length: int
    """Bytes; 0 only for a tensor without elements."""
    position: int
    """Byte offset in the bucket, a multiple of 64."""
    checksum: int
    """xxh3_64 of the whole tensor in its last piece, 0 in earlier ones."""

    @property
    def is_last(self) -> bool:
        return self.offset + self.length == self.spec.num_bytes


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
                len(spec.shape),
                len(name),
                piece.offset,
                piece.length,
                piece.position,
                piece.checksum,
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
            index, code, dims, name_bytes, offset, length, position, checksum = _ENTRY.unpack_from(header, at)
            at += _ENTRY.size
            shape = struct.unpack_from(f"<{dims}Q", header, at)
            at += 8 * dims
            name = header[at : at + name_bytes].decode()
            at += name_bytes
            spec = TensorSpec(name=name, dtype=DTYPES[code], shape=shape)
            pieces.append(Piece(index=index, spec=spec, offset=offset, length=length, position=position, checksum=checksum))
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise ProtocolError(f"header of bucket {sequence} ({len(header)} bytes) does not decode: {error!r}") from error
    if at != len(header):
        raise ProtocolError(f"header of bucket {sequence} has {len(header)} bytes, its pieces take {at}")
    for piece in pieces:
        if piece.position + piece.length > payload_bytes or piece.offset + piece.length > piece.spec.num_bytes:
            raise ProtocolError(
                f"bucket {sequence}: bytes {piece.offset}+{piece.length} of {piece.spec} at {piece.position} lie outside the "
                f"tensor ({piece.spec.num_bytes} bytes) or the bucket ({payload_bytes} bytes)"
            )
    return pieces
