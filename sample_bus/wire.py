"""Wire format of a record: `HDR1`.

    frame 0   prefix (48 bytes, little-endian) and header (msgpack map of scalars)
    frame 1   body of a sample: the small columns, each at a multiple of 64 bytes
    frame 2…  one large column each (64 KiB and more), sent without a copy

A closed seat is frame 0 alone.

    prefix    magic 4s | version u8 | kind u8 | flags u16 | epoch u64 | seq u64 | header_len u32 | n_frames u32 | body_len u64 |
              xxh3_64 u64 over everything else: the 40 bytes before it, header, body, large columns
    columns   raw little-endian; their order and dtypes are fixed, so `num_tokens`, `num_runs`, `num_segments` and `num_rewards`
              (0: the column is left out) say where each lies

Invariant: `decode` returns exactly what `encode` was given, or raises WireError; no bytes make it do anything else. Arrays are
read-only views on the frames.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import WireError
from sample_bus.packing import Buffer, pack, unpack
from sample_bus.sample import Sample, SampleId, StopReason

MAGIC = b"HDR1"
VERSION = 3
KIND_SAMPLE = 1
KIND_CLOSED = 2
MAX_HEADER_BYTES = 64 << 10
LARGE_COLUMN_BYTES = 64 << 10
_ALIGN = 64
_MAX_ITEMS = 64
"""Keys of a header; its lists are shorter."""
_PREFIX = struct.Struct("<4sBBHQQIIQ")
_CHECKSUM = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
_PREFIX_FIELDS = ("magic", "version", "kind", "flags", "frames", "header bytes", "body bytes")
_PER_TOKEN = (("tokens", np.dtype("<i4")), ("loss_mask", np.dtype("u1")), ("behavior_logprobs", np.dtype("<f4")))
_PER_RUN = (("version_starts", np.dtype("<i4")), ("versions", np.dtype("<i4")), ("kept_cache", np.dtype("u1")))
"""Columns in the order in which they travel: one value a token, then one a run of equal versions; then those below."""
_SEGMENT_STARTS = ("segment_starts", np.dtype("<i4"))
_TOKEN_REWARDS = ("token_rewards", np.dtype("<f4"))
_LENGTHS = ("num_tokens", "num_runs", "num_segments", "num_rewards")
_SCALARS: dict[str, type[Any]] = {
    "task_id": str,
    "group_id": str,
    "rollout_id": str,
    "attempt": int,
    "seat": int,
    "group_size": int,
    "data_source": str,
    "reward": float,
    "temperature": float,
    "stop_reason": str,
    "num_turns": int,
    "settings_revision": int,
    "incarnation": str,
    "produced_at": float,
    "reward_parts": dict,
    "counts": dict,
}
_CLOSED: dict[str, type[Any]] = {
    "task_id": str,
    "group_id": str,
    "rollout_id": str,
    "attempt": int,
    "seat": int,
    "group_size": int,
    "data_source": str,
    "reason": str,
    "message": str,
    "settings_revision": int,
    "incarnation": str,
    "closed_at": float,
}
_HEADERS: dict[int, dict[str, type[Any]]] = {
    KIND_SAMPLE: {"producer": str, **dict.fromkeys(_LENGTHS, int), **_SCALARS},
    KIND_CLOSED: {"producer": str, **_CLOSED},
}
_NAMES = {kind: list(layout) for kind, layout in _HEADERS.items()}
_TYPES = {kind: list(layout.values()) for kind, layout in _HEADERS.items()}
_INTS = {kind: [name for name, of in layout.items() if of is int] for kind, layout in _HEADERS.items()}
_FLOATS = {kind: [name for name, of in layout.items() if of is float] for kind, layout in _HEADERS.items()}
_STOP_REASONS = {reason.value: reason for reason in StopReason}


def encode(sample: Sample, sample_id: SampleId) -> list[bytes | memoryview]:
    """Frames of a sample. Large columns are views on the sample's arrays: leave those unchanged until the frames are sent.

    Raises WireError for a sample whose scalars are of the wrong type or whose header is too large. Does not call
    `sample.validate`.
    """
    return stamp(prepare(sample, sample_id.producer), sample_id.epoch, sample_id.seq)


def encode_closed(closed: ClosedSeat, sample_id: SampleId) -> list[bytes | memoryview]:
    """Frames of a closed seat. Raises WireError as `encode`."""
    return stamp(prepare_closed(closed, sample_id.producer), sample_id.epoch, sample_id.seq)


def prepare_closed(closed: ClosedSeat, producer: str) -> list[bytes | memoryview]:
    """Its header: all but the prefix."""
    header: dict[str, Any] = {"producer": producer}
    for name, kind in _CLOSED.items():
        header[name] = kind(getattr(closed, name))
    return [_packed(header, KIND_CLOSED, closed.rollout_id)]


def prepare(sample: Sample, producer: str) -> list[bytes | memoryview]:
    """Header, body and large columns: all but the prefix, which takes the place in the stream.

    Raises WireError for columns whose lengths do not fit together.
    """
    lengths = (sample.tokens.size, sample.versions.size, sample.segment_starts.size, sample.token_rewards.size)
    small: list[bytes] = []
    large: list[bytes | memoryview] = []
    end = 0
    for name, dtype, length in _columns_of(*lengths):
        array = np.ascontiguousarray(getattr(sample, name), dtype=dtype)
        if array.size != length:
            raise WireError(f"{name}: {array.size} values, expected {length} (rollout {sample.rollout_id[:80]})")
        if array.nbytes >= LARGE_COLUMN_BYTES:
            large.append(array.view(np.uint8).data)
        else:
            gap = -end % _ALIGN
            small += (bytes(gap), array.tobytes())
            end += gap + array.nbytes
    header: dict[str, Any] = {"producer": producer, **dict(zip(_LENGTHS, lengths, strict=True))}
    for name, kind in _SCALARS.items():
        header[name] = kind(getattr(sample, name))
    return [_packed(header, KIND_SAMPLE, sample.rollout_id), b"".join(small), *large]


def stamp(parts: Sequence[bytes | memoryview], epoch: int, seq: int) -> list[bytes | memoryview]:
    """Frames of prepared parts at their place in the stream."""
    header, *columns = parts
    prefix = _PREFIX.pack(
        MAGIC,
        VERSION,
        KIND_SAMPLE if columns else KIND_CLOSED,
        0,
        epoch,
        seq,
        len(header),
        len(parts),
        num_bytes(columns),
    )
    checksum = _CHECKSUM.pack(_digest(prefix, parts))
    return [b"".join((prefix, checksum, header)), *columns]


def num_bytes(frames: Sequence[Buffer]) -> int:
    """Bytes on the wire."""
    return sum(memoryview(frame).nbytes for frame in frames)


def decode(frames: Sequence[bytes | memoryview], *, max_bytes: int) -> tuple[SampleId, Sample | ClosedSeat]:
    """Identity and record of frames. Raises WireError naming the field, what was got and what was expected."""
    views = [memoryview(frame).cast("B").toreadonly() for frame in frames]
    total = sum(view.nbytes for view in views)
    if total > max_bytes:
        raise WireError(f"sample: {total} bytes, expected at most {max_bytes}")
    if not views or views[0].nbytes < PREFIX_BYTES:
        raise WireError(f"prefix: {views[0].nbytes if views else 0} bytes, expected {PREFIX_BYTES}")
    magic, version, kind, flags, epoch, seq, header_len, n_frames, body_len = _PREFIX.unpack_from(views[0])
    got = (magic, version, kind, flags, n_frames, header_len, body_len)
    expected_kind = KIND_SAMPLE if len(views) > 1 else KIND_CLOSED
    expected = (MAGIC, VERSION, expected_kind, 0, len(views), views[0].nbytes - PREFIX_BYTES, total - views[0].nbytes)
    if got != expected:
        name, mine, theirs = next(
            triple for triple in zip(_PREFIX_FIELDS, got, expected, strict=True) if triple[1] != triple[2]
        )
        raise WireError(f"{name}: got {mine!r}, expected {theirs!r} (epoch {epoch}, seq {seq})")
    if header_len > MAX_HEADER_BYTES:
        raise WireError(f"header: {header_len} bytes, expected at most {MAX_HEADER_BYTES} (epoch {epoch}, seq {seq})")
    (checksum,) = _CHECKSUM.unpack_from(views[0], _PREFIX.size)
    header_view = views[0][PREFIX_BYTES:]
    computed = _digest(views[0][: _PREFIX.size], [header_view, *views[1:]])
    if computed != checksum:
        raise WireError(f"checksum: got {checksum:016x}, expected {computed:016x} (epoch {epoch}, seq {seq})")
    header = _checked_header(unpack(header_view, "header", max_items=_MAX_ITEMS), kind)
    producer = header.pop("producer")
    record = _closed_seat(header) if kind == KIND_CLOSED else _sample(header, views)
    return SampleId(producer, epoch, seq), record


def _sample(header: dict[str, Any], views: Sequence[memoryview]) -> Sample:
    """The sample of a checked header, all its values checked too."""
    columns = _columns([header.pop(name) for name in _LENGTHS], views)
    header["stop_reason"] = _STOP_REASONS[header["stop_reason"]]
    sample = Sample(**header, **columns)
    sample.check_values()
    return sample


def _closed_seat(header: dict[str, Any]) -> ClosedSeat:
    closed = ClosedSeat(**header)
    closed.validate()
    return closed


def _packed(header: dict[str, Any], kind: int, rollout_id: str) -> bytes:
    packed = pack(_checked_header(header, kind))
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"header: {len(packed)} bytes, expected at most {MAX_HEADER_BYTES} (rollout {rollout_id[:80]})")
    return packed


def _digest(prefix: Buffer, parts: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64(prefix)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _checked_header(header: Any, kind: int) -> dict[str, Any]:
    """The header itself, once every value in it is known to be of its type and range."""
    if type(header) is not dict or list(header) != _NAMES[kind]:
        raise WireError(f"header: {_oddity(header, kind)}")
    if list(map(type, header.values())) != _TYPES[kind]:
        name = next(name for name, of in _HEADERS[kind].items() if type(header[name]) is not of)
        raise WireError(f"{name}: got {type(header[name]).__name__}, expected {_HEADERS[kind][name].__name__}")
    for name in _INTS[kind]:
        if not 0 <= header[name] < 1 << 31:
            raise WireError(f"{name}: got {header[name]}, expected 0 to 2^31 - 1")
    for name in _FLOATS[kind]:
        if not math.isfinite(header[name]):
            raise WireError(f"{name}: got {header[name]}, expected a finite number")
    if kind == KIND_SAMPLE and header["stop_reason"] not in _STOP_REASONS:
        raise WireError(
            f"stop_reason: got {header['stop_reason'][:40]!r}, expected one of {[reason.value for reason in StopReason]}"
        )
    return header


def _oddity(header: Any, kind: int) -> str:
    if not isinstance(header, dict):
        return f"got {type(header).__name__}, expected a map"
    odd = sorted(map(repr, header.keys() ^ _HEADERS[kind].keys()))[:5]
    return f"got other keys than expected: {odd}" if odd else "its keys are in another order than expected"


def _columns_of(num_tokens: int, num_runs: int, num_segments: int, num_rewards: int) -> list[tuple[str, np.dtype[Any], int]]:
    """Name, dtype and length of each column."""
    columns = [(name, dtype, num_tokens) for name, dtype in _PER_TOKEN]
    columns += [(name, dtype, num_runs) for name, dtype in _PER_RUN]
    columns.append((*_SEGMENT_STARTS, num_segments))
    if num_rewards:
        columns.append((*_TOKEN_REWARDS, num_rewards))
    return columns


def _columns(lengths: Sequence[int], views: Sequence[memoryview]) -> dict[str, Any]:
    """Arrays by name, each a view. Every byte of every frame has one owner."""
    num_tokens, num_runs, num_segments, num_rewards = lengths
    if num_tokens < 1 or num_runs < 1 or num_segments < 1:
        raise WireError(
            f"columns: got {num_tokens} tokens in {num_runs} runs and {num_segments} segments, expected at least 1 each"
        )
    if num_rewards not in (0, num_tokens):
        raise WireError(f"num_rewards: got {num_rewards}, expected 0 or {num_tokens}, one for each token")
    columns: dict[str, Any] = {}
    body, end, next_frame = views[1], 0, 2
    for name, dtype, length in _columns_of(*lengths):
        nbytes = length * dtype.itemsize
        if nbytes >= LARGE_COLUMN_BYTES:
            fits = next_frame < len(views) and views[next_frame].nbytes == nbytes
            frame, offset, next_frame = next_frame, 0, next_frame + 1
        else:
            frame, offset = 1, end + -end % _ALIGN
            end = offset + nbytes
            fits = end <= body.nbytes
        if not fits:
            raise WireError(f"{name}: {length} values at byte {offset} of frame {frame} do not fit what was sent")
        columns[name] = np.frombuffer(views[frame], dtype, length, offset)
    if next_frame != len(views) or end != body.nbytes:
        raise WireError(f"columns: {len(views)} frames with a body of {body.nbytes} bytes hold more than the columns")
    return columns
