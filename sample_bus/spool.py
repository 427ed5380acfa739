"""A producer's own copies of its records on disk, from the offer until a trainer's commit.

    DIRECTORY/state               epoch and the committed watermark, as text
    DIRECTORY/EPOCH-FIRST.log     a `RecordLog`: records FIRST, FIRST + 1, … of that epoch, up to the next file's FIRST

Invariant: sequence numbers are dense from the committed watermark to the next one; what `append` returned from is read again by
the next process; a file is deleted, or used again, only when everything in it is committed. The epoch changes only when copies
were lost.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.record_log import RecordLog, read_records

log = structlog.get_logger()

SEGMENT_BYTES = 16 << 20
MAX_SPARE = 4
"""Files that wait to be used again."""
_STATE = "state"
_LOCK = "lock"
_HEAD = struct.Struct("<QI")
_LENGTH = struct.Struct("<I")
_STATE_TEXT = re.compile(rb"(\d{20}) (\d{20})\n")
_LARGEST = (1 << 63) - 1

Frames = Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a spool holds."""

    epoch: int
    first: int
    """First record that is not committed."""
    next_seq: int


@dataclass(slots=True)
class _Segment:
    log: RecordLog
    first: int
    places: list[tuple[int, int]]
    """Of each record: offset in the file, and bytes of its frames."""

    @property
    def end(self) -> int:
        return self.first + len(self.places)


class Spool:
    """Belongs to one thread."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, sync: bool = False) -> None:
        """Open or make the spool in `directory`; the tail of a record that was being written is cut off.

        Raises JournalError naming what cannot be opened, JournalDamaged, and JournalError when another process holds it.
        """
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._segments: deque[_Segment] = deque()
        self._spare: list[RecordLog] = []
        self._epoch = self._committed = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{directory}: the spool cannot be written: {error.strerror or error}") from error
        try:
            self._state = -1
            self._take_lock()
            self._open_state()
            self._open_segments()
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def first(self) -> int:
        """First record that is kept."""
        return self._committed

    @property
    def next_seq(self) -> int:
        return self._segments[-1].end if self._segments else self._committed

    def sizes(self) -> tuple[int, ...]:
        """Bytes of the frames of each kept record, from `first` on."""
        sizes: list[int] = []
        for segment in self._segments:
            sizes.extend(nbytes for _, nbytes in segment.places[max(0, self._committed - segment.first) :])
        return tuple(sizes)

    def append(self, seq: int, frames: Frames) -> None:
        """Keep the next record. Raises OSError; nothing has changed then."""
        if seq != self.next_seq:
            raise AssertionError(f"spool {self._directory}: got record {seq}, expected {self.next_seq}")
        sizes = [memoryview(frame).nbytes for frame in frames]
        head = _HEAD.pack(seq, len(sizes)) + b"".join(_LENGTH.pack(size) for size in sizes)
        segment = self._segment_for(seq)
        offset = segment.log.append(head, *frames)
        if self._sync:
            segment.log.sync()
        segment.places.append((offset, sum(sizes)))

    def read(self, seq: int) -> tuple[memoryview, ...]:
        """Frames of a kept record. Raises JournalDamaged, and KeyError for one that is not kept."""
        for segment in self._segments:
            if segment.first <= seq < segment.end:
                offset, _ = segment.places[seq - segment.first]
                return _frames_of(segment.log.read(offset), seq, segment.log.path)
        raise KeyError(seq)

    def free(self, watermark: int) -> None:
        """Everything below `watermark` is committed. Raises OSError."""
        if watermark <= self._committed:
            return
        self._committed = min(watermark, self.next_seq)
        self._write_state()
        while len(self._segments) > 1 and self._segments[0].end <= self._committed:
            self._retire(self._segments.popleft())

    def renew(self) -> None:
        """Begin a new epoch: the trainer knows records that this spool has lost. What was kept is set aside, not deleted."""
        for segment in self._segments:
            segment.log.close()
            segment.log.path.rename(segment.log.path.with_suffix(".superseded"))
        self._segments.clear()
        self._epoch, self._committed = max(time.time_ns(), self._epoch + 1), 0
        self._write_state()

    def close(self) -> None:
        for segment in self._segments:
            segment.log.close()
        for spare in self._spare:
            spare.close()
            spare.path.unlink(missing_ok=True)
        self._segments.clear()
        self._spare.clear()
        for descriptor in (self._state, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._state = self._lock = -1

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self._directory}: another process offers samples from this spool") from None

    def _open_state(self) -> None:
        path = self._directory / _STATE
        try:
            self._state = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            text = os.pread(self._state, 200, 0)
            if text:
                self._epoch, self._committed = _parse_state(text, path)
                return
            if any(self._directory.glob("*.log")):
                raise JournalDamaged(f"{path}: empty, and records stand beside it")
            self._epoch, self._committed = time.time_ns(), 0
            self._write_state()
        except OSError as error:
            raise JournalError(f"{path}: the spool cannot be written: {error.strerror or error}") from error

    def _write_state(self) -> None:
        os.pwrite(self._state, b"%020d %020d\n" % (self._epoch, self._committed), 0)

    def _open_segments(self) -> None:
        for left in self._directory.glob("*.spare"):
            left.unlink()
        for path in sorted(self._directory.glob(f"{self._epoch:020d}-*.log")):
            first = _first_of(path)
            segment = _Segment(RecordLog(path), first, [])
            self._segments.append(segment)
            for offset, payload in segment.log.records():
                segment.places.append((offset, _checked_size(payload, segment.end, path)))
        for before, after in zip(list(self._segments), list(self._segments)[1:], strict=False):
            if before.end != after.first:
                raise JournalDamaged(f"{after.log.path}: begins with record {after.first}, expected {before.end}")
        if self._segments and not self._segments[0].first <= self._committed <= self._segments[-1].end:
            if self._committed > self._segments[-1].end:  # the machine lost the end: those were committed
                self._begin_segment(self._committed)
                return
            raise JournalDamaged(
                f"{self._segments[0].log.path}: begins with record {self._segments[0].first}, expected {self._committed}"
            )

    def _segment_for(self, seq: int) -> _Segment:
        if not self._segments or self._segments[-1].log.num_bytes >= self._segment_bytes:
            self._begin_segment(seq)
        return self._segments[-1]

    def _begin_segment(self, seq: int) -> None:
        path = self._directory / f"{self._epoch:020d}-{seq:020d}.log"
        if self._spare:
            self._spare[-1].renew(path)
            segment_log = self._spare.pop()
        else:
            try:
                segment_log = RecordLog(path)
            except JournalError as error:
                raise OSError(0, str(error)) from error
        while self._segments and self._segments[0].end <= self._committed:
            self._retire(self._segments.popleft())
        self._segments.append(_Segment(segment_log, seq, []))

    def _retire(self, segment: _Segment) -> None:
        """Everything in it is committed: keep the file for another use, or delete it."""
        if len(self._spare) < MAX_SPARE and segment.log.num_bytes >= self._segment_bytes:
            spare = segment.log.path.with_suffix(".spare")
            segment.log.renew(spare)
            self._spare.append(segment.log)
            return
        segment.log.close()
        segment.log.path.unlink(missing_ok=True)


def kept(directory: Path) -> Kept | None:
    """What the spool in `directory` holds, which may be in use; None if there is none. Raises JournalError, JournalDamaged."""
    path = directory / _STATE
    try:
        epoch, committed = _parse_state(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    next_seq = committed
    for segment in sorted(directory.glob(f"{epoch:020d}-*.log")):
        next_seq = max(next_seq, _first_of(segment) + sum(1 for _ in read_records(segment)))
    return Kept(epoch=epoch, first=committed, next_seq=next_seq)


def _parse_state(text: bytes, path: Path) -> tuple[int, int]:
    match = _STATE_TEXT.fullmatch(text)
    epoch, committed = (int(match[1]), int(match[2])) if match else (-1, -1)
    if not (0 <= epoch <= _LARGEST and 0 <= committed <= _LARGEST):
        raise JournalDamaged(f"{path}: got {text[:60]!r}, expected an epoch and a watermark")
    return epoch, committed


def _first_of(path: Path) -> int:
    try:
        return int(path.stem.split("-")[1])
    except (IndexError, ValueError):
        raise JournalDamaged(f"{path}: its name is no segment's") from None


def _sizes_of(payload: bytes | memoryview, seq: int, path: Path) -> list[int]:
    if len(payload) >= _HEAD.size:
        number, count = _HEAD.unpack_from(payload)
        head = _HEAD.size + count * _LENGTH.size
        if number == seq and head <= len(payload):
            sizes = [_LENGTH.unpack_from(payload, _HEAD.size + i * _LENGTH.size)[0] for i in range(count)]
            if head + sum(sizes) == len(payload):
                return sizes
    raise JournalDamaged(f"{path}: what should be record {seq} is another or none")


def _checked_size(payload: bytes, seq: int, path: Path) -> int:
    return sum(_sizes_of(payload, seq, path))


def _frames_of(payload: bytes, seq: int, path: Path) -> tuple[memoryview, ...]:
    view = memoryview(payload)
    sizes = _sizes_of(view, seq, path)
    at = _HEAD.size + len(sizes) * _LENGTH.size
    frames = []
    for size in sizes:
        frames.append(view[at : at + size])
        at += size
    return tuple(frames)
