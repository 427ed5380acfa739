"""An append-only file of checksummed records: what the journals of both daemons and the spool are made of.

    file      magic `HDRLOG1\\n`, then records; or magic `HDRLOGR\\n` and a seed u64, then records and what an earlier use left
    record    mark 4s | length u32 | xxh3_64 u64 over length and payload, with the seed | payload      (little-endian)

Invariant: what `append` returned from is read again after the death of the process (not of the machine, unless `sync` was
called). A tail that is no whole record, cut off by a death or garbage, is removed when the file is opened for writing, with a
line that says so. Damage with whole records behind it is never taken for such a tail: it raises. A file that is used again
(`renew`: its pages are in memory already, new ones would have to be found and zeroed) gets a seed of its own, so what is left
of its earlier use is no record of it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog
import xxhash

from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.packing import Buffer

log = structlog.get_logger()

MAGIC = b"HDRLOG1\n"
MAGIC_RENEWED = b"HDRLOGR\n"
_SEED = struct.Struct("<Q")
_MARK = b"\xf0rec"
_HEAD = struct.Struct("<4sIQ")
_LENGTH = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
_READ_BYTES = 1 << 20
_READ_AHEAD_BYTES = 4096
"""Of a payload, read with its head."""
_MAX_PARTS = 512
"""Of one write; the system takes 1,024."""


class RecordLog:
    """A log open for writing; one process at a time holds it (its caller sees to that)."""

    def __init__(self, path: Path) -> None:
        """Open or make `path`; a torn tail is cut off. Raises JournalError naming the path, JournalDamaged."""
        self.path = path
        self._seed = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened for writing: {error.strerror or error}") from error
        try:
            self._end = self._recover()
        except BaseException:
            os.close(self._file)
            raise

    @property
    def num_bytes(self) -> int:
        return self._end

    def append(self, *parts: Buffer) -> int:
        """Write one record made of `parts` and return its offset. Raises OSError; the file is then as it was before."""
        length = sum(memoryview(part).nbytes for part in parts)
        return self._write([_HEAD.pack(_MARK, length, _checksum(length, parts, self._seed)), *parts], HEAD_BYTES + length)

    def append_all(self, payloads: Sequence[Buffer]) -> list[int]:
        """Write a record for each payload, all of them at once, and return their offsets. Raises OSError, as `append` does."""
        parts: list[Buffer] = []
        offsets: list[int] = []
        end = self._end
        for payload in payloads:
            length = memoryview(payload).nbytes
            parts += (_HEAD.pack(_MARK, length, _checksum(length, (payload,), self._seed)), payload)
            offsets.append(end)
            end += HEAD_BYTES + length
        if len(parts) > _MAX_PARTS:
            parts = [b"".join(parts)]
        self._write(parts, end - self._end)
        return offsets

    def read(self, offset: int) -> bytes:
        """Payload of the record at `offset`. Raises JournalDamaged."""
        found = os.pread(self._file, HEAD_BYTES + _READ_AHEAD_BYTES, offset)
        mark, length, checksum = _HEAD.unpack_from(found.ljust(HEAD_BYTES, b"\0"))
        payload = found[HEAD_BYTES : HEAD_BYTES + length]
        if len(payload) < length and mark == _MARK:
            payload += os.pread(self._file, length - len(payload), offset + HEAD_BYTES + len(payload))
        if mark != _MARK or len(payload) != length or _checksum(length, [payload], self._seed) != checksum:
            raise JournalDamaged(f"{self.path}: the record at byte {offset} is damaged")
        return payload

    def records(self) -> Iterator[tuple[int, bytes]]:
        """(offset, payload) of every record. Raises JournalDamaged."""
        yield from read_records(self.path)

    def sync(self) -> None:
        """Put what was appended on the disk itself."""
        os.fdatasync(self._file)

    def renew(self, path: Path) -> None:
        """Forget all records and go on as `path`; the file's bytes stay where they are. Raises OSError.

        First the name: a death in between must not leave the old name on a log without its records.
        """
        self.path.rename(path)
        self.path = path
        self._seed = int.from_bytes(os.urandom(_SEED.size), "little")
        os.pwrite(self._file, MAGIC_RENEWED + _SEED.pack(self._seed), 0)
        self._end = len(MAGIC_RENEWED) + _SEED.size

    def close(self) -> None:
        """Close the file; whatever is asked of the log afterwards raises OSError."""
        os.close(self._file)
        self._file = -1

    def _write(self, parts: Sequence[Buffer], num_bytes: int) -> int:
        at = self._end
        try:
            written = os.pwritev(self._file, parts, at)
            if written < num_bytes:
                rest = b"".join(parts)[written:]
                while rest:
                    count = os.pwrite(self._file, rest, at + written)
                    written, rest = written + count, rest[count:]
        except OSError:
            os.ftruncate(self._file, at)
            raise
        self._end = at + num_bytes
        return at

    def _recover(self) -> int:
        size = os.fstat(self._file).st_size
        is_renewed = os.pread(self._file, len(MAGIC_RENEWED), 0) == MAGIC_RENEWED
        if size < len(MAGIC) + (_SEED.size if is_renewed else 0):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, MAGIC, 0)
            return len(MAGIC)
        with self.path.open("rb") as file:
            self._seed = _read_header(file, self.path)
            end = file.tell()
        for offset, payload in read_records(self.path):
            end = offset + HEAD_BYTES + len(payload)
        if end < size and not is_renewed:
            log.warning("torn record cut off", path=str(self.path), at_bytes=end, num_bytes=size - end)
            os.ftruncate(self._file, end)
        return end


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of every whole record of a log that may be in use; ends before a tail that is none.

    Raises JournalError if it is no log or cannot be read, JournalDamaged if a record is damaged and whole ones follow it.
    """
    try:
        with path.open("rb", buffering=_READ_BYTES) as file:
            seed = _read_header(file, path)
            offset = file.tell()
            while True:
                payload = _next(file, os.fstat(file.fileno()).st_size - offset, seed)
                if payload is None and (behind := _first_whole(path, offset + 1, seed)) is not None:
                    file.seek(0, os.SEEK_END)  # drops the buffer: it may hold what stood there before
                    file.seek(offset)  # a writer may have finished it since
                    payload = _next(file, os.fstat(file.fileno()).st_size - offset, seed)
                    if payload is None:
                        raise JournalDamaged(
                            f"{path}: the record at byte {offset} is damaged, and a whole one follows at byte {behind}"
                        )
                if payload is None:
                    return
                yield offset, payload
                offset += HEAD_BYTES + len(payload)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_header(file: BinaryIO, path: Path) -> int:
    """The seed of a log's checksums; the file then stands at its first record. Raises JournalError."""
    magic = file.read(len(MAGIC))
    if magic == MAGIC_RENEWED:
        seed = file.read(_SEED.size)
        return int(_SEED.unpack(seed)[0]) if len(seed) == _SEED.size else 0
    if not MAGIC.startswith(magic):
        raise JournalError(f"{path}: got {magic!r} at its beginning, expected {MAGIC!r}")
    return 0


def _checksum(length: int, parts: Sequence[Buffer], seed: int) -> int:
    digest = xxhash.xxh3_64(_LENGTH.pack(length), seed)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _next(file: BinaryIO, available: int, seed: int) -> bytes | None:
    """The record at the file's position, if it is whole within so many bytes."""
    head = file.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    mark, length, checksum = _HEAD.unpack(head)
    if mark != _MARK or HEAD_BYTES + length > available:
        return None
    payload = file.read(length)
    return payload if len(payload) == length and _checksum(length, [payload], seed) == checksum else None


def _first_whole(path: Path, start: int, seed: int) -> int | None:
    """Offset of the first whole record at or behind `start`."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()  # only of a file whose tail is no record, and only that tail
    view = memoryview(data)
    at = data.find(_MARK)
    while at >= 0:
        if _is_whole(view[at:], seed):
            return start + at
        at = data.find(_MARK, at + 1)
    return None


def _is_whole(data: memoryview, seed: int) -> bool:
    """Whether a whole record stands at the beginning of `data`; nothing is copied."""
    if len(data) < HEAD_BYTES:
        return False
    _, length, checksum = _HEAD.unpack_from(data)
    end = HEAD_BYTES + length
    return bool(end <= len(data) and _checksum(length, [data[HEAD_BYTES:end]], seed) == checksum)
