"""What reads bytes that others wrote: each reader as a function of bytes, with the promise that it keeps for all of them.

A target takes any bytes and returns, or raises an error that its reader documents (`PROMISED`). Whatever else it raises is a
defect. Several readers stand behind a checksum, which random bytes never pass; their targets put the right checksum on, as a
sender that means it would.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel

from sample_bus import frames, messages, wire
from sample_bus.closed_seat import ClosedSeat
from sample_bus.curve import SERVER_KEY
from sample_bus.door import judge
from sample_bus.errors import Insecure, JournalError, WireError
from sample_bus.journal import decode_record, encode_record, read_journal
from sample_bus.key_file import read_secret
from sample_bus.packing import pack, unpack
from sample_bus.quarantine import rejected_messages
from sample_bus.record_log import MAGIC, RecordLog, read_records
from sample_bus.redis_keys import frames_of, letter, place_of, read_letter
from sample_bus.spool import Spool, kept
from sample_bus.topics import decode_body

PROMISED = (WireError, JournalError, Insecure)
MAX_SAMPLE_BYTES = 8 << 20
LARGE = bytes(wire.LARGE_COLUMN_BYTES)
_PREFIX = struct.Struct("<4sBBHQQIIQ")
_RECORD = struct.Struct("<4sIQ")
_MARK = b"\xf0rec"
_SHARED_MEMORY = Path("/dev/shm")
BODIES: tuple[type[messages.Message], ...] = tuple(
    kind
    for _, kind in sorted(vars(messages).items())
    if isinstance(kind, type) and issubclass(kind, messages.Message) and kind not in (messages.Message, BaseModel)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    """Raises one of `PROMISED`, or nothing."""


# ── messages from a peer ─────────────────────────────────────────────────────────────────────────────────────────────


def raw_record(data: bytes) -> None:
    """Frames of a sample as they stand: a count, their lengths, their bytes."""
    count = data[0] % 5 if data else 0
    parts, at = [], 1
    for _ in range(count):
        length = int.from_bytes(data[at : at + 2], "little")
        parts.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    wire.decode(parts, max_bytes=MAX_SAMPLE_BYTES)


def sealed_record(data: bytes) -> None:
    """Kind, number of large frames, header length, header, body; prefix and checksum fit."""
    sample_id, record = wire.decode(sealed(data), max_bytes=MAX_SAMPLE_BYTES)
    again = wire.encode_closed(record, sample_id) if isinstance(record, ClosedSeat) else wire.encode(record, sample_id)
    _, same = wire.decode(again, max_bytes=MAX_SAMPLE_BYTES)
    same.validate()


def sealed(data: bytes) -> list[bytes]:
    kind, num_large = (data[0] % 4, data[1] % 4) if len(data) > 1 else (0, 0)
    length = int.from_bytes(data[2:4], "little")
    header, body = data[4 : 4 + length], data[4 + length :]
    rest = [] if kind == wire.KIND_CLOSED and not num_large and not body else [body, *[LARGE] * num_large]
    prefix = _PREFIX.pack(wire.MAGIC, wire.VERSION, kind, 0, 1, 2, len(header), 1 + len(rest), sum(map(len, rest)))
    digest = xxhash.xxh3_64(b"".join((prefix, header, *rest))).intdigest()
    return [prefix + struct.pack("<Q", digest) + header, *rest]


def control(data: bytes) -> None:
    """Number of frames that follow, the message's frame."""
    message = frames.decode_control(data[1:], data[0] % 3 if data else 0)
    again = frames.encode_control(message)
    if frames.decode_control(again, 1 if isinstance(message, frames.Data) else 0) != message:
        raise AssertionError(f"{message} comes back as another one")


def body(data: bytes) -> None:
    """Which message, its bytes."""
    kind = BODIES[(data[0] if data else 0) % len(BODIES)]
    message = decode_body(data[1:], kind, "body")
    decode_body(pack(message.model_dump(mode="json")), kind, "body")


def plain(data: bytes) -> None:
    unpack(pack(unpack(data, "plain")), "plain")


def broker(data: bytes) -> None:
    """What a Redis server hands over: a published message, or an entry's id and fields, apart by 0xff."""
    sender, frame = b"", b""
    with suppress(WireError):
        sender, frame = read_letter(data)
    if sender and read_letter(letter(sender, frame)) != (sender, frame):
        raise AssertionError(f"a letter of {sender!r} comes back as another one")
    place, *fields = data.split(b"\xff")
    place_of(place)
    wire.decode(frames_of(fields), max_bytes=MAX_SAMPLE_BYTES)


def door(data: bytes) -> None:
    """ZAP requests, their parts apart by 0xff."""
    verdict = judge(data.split(b"\xff"), lambda public: None)
    if verdict.status == b"200":
        raise AssertionError("nobody is listed and somebody got in")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def journal_record(data: bytes) -> None:
    record = decode_record(data, "record")
    if decode_record(encode_record(record), "record") != record and b"\xcb" not in data:  # NaN is not equal to itself
        raise AssertionError(f"{record} comes back as another one")


def record_log(data: bytes) -> None:
    """A log's bytes as they stand: what is read before opening it for writing is kept, and what is appended comes after."""
    with _directory() as name:
        path = Path(name) / "log"
        path.write_bytes(data)
        _use_log(path)


def sealed_records(data: bytes) -> None:
    """Records with checksums that fit, apart by lengths; then cut short and with one byte changed."""
    cut, at, flip = (data[0], int.from_bytes(data[1:3], "little"), data[3]) if len(data) > 3 else (0, 0, 0)
    rest, built = data[4:], bytearray(MAGIC)
    while rest:
        payload, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        built += record(payload)
    if flip and at < len(built):
        built[at] ^= flip
    with _directory() as name:
        path = Path(name) / "log"
        path.write_bytes(built[: len(built) - cut])
        _use_log(path)


def record(payload: bytes) -> bytes:
    digest = xxhash.xxh3_64(struct.pack("<I", len(payload)) + payload).intdigest()
    return _RECORD.pack(_MARK, len(payload), digest) + payload


def _use_log(path: Path) -> None:
    """Whatever the journal's reader says of the records, the log itself takes one more."""
    before = list(read_records(path))
    log = RecordLog(path)
    try:
        offset = log.append(b"one", b" more")
        if log.read(offset) != b"one more" or list(log.records()) != [*before, (offset, b"one more")]:
            raise AssertionError(f"{len(before)} records before, {len(list(log.records()))} after one more")
    finally:
        log.close()
    for _ in read_journal(path):
        pass


def spool(data: bytes) -> None:
    """State file, then payloads of a segment's records with checksums that fit, apart by lengths."""
    size = data[0] % 64 if data else 0
    state, rest, built = data[1 : 1 + size], data[1 + size :], bytearray(MAGIC)
    while rest:
        payload, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        built += record(payload)
    with _directory() as name:
        directory = Path(name)
        (directory / "state").write_bytes(state)
        (directory / f"{5:020d}-{0:020d}.log").write_bytes(built)
        kept(directory)
        opened = Spool(directory)
        try:
            for seq in range(opened.first, opened.next_seq):
                opened.read(seq)
            opened.append(opened.next_seq, [b"frame"])
            opened.free(opened.next_seq)
        finally:
            opened.close()


def quarantined(data: bytes) -> None:
    with _directory() as name:
        (Path(name) / "rejected-0000.msgpack").write_bytes(data)
        list(rejected_messages(Path(name)))


def key_file(data: bytes) -> None:
    with _directory() as name:
        path = Path(name) / SERVER_KEY
        path.write_bytes(data)
        path.chmod(0o600)
        read_secret(path)


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hr-fuzz-", dir=_SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None)


TARGETS = tuple(
    Target(name=run.__name__, run=run)
    for run in (
        sealed_record,
        raw_record,
        control,
        body,
        plain,
        broker,
        door,
        journal_record,
        record_log,
        sealed_records,
        spool,
        quarantined,
        key_file,
    )
)
