"""What a run keeps of its bus with `bus.retain`: every record that was leased, in `RUN_DIR/retained/RUN_ID/`.

    000001.log, 000002.log, …   segments (`RecordLog`); each process of the trainer begins one of its own
    payload                     number of frames u32 | bytes of each u64 … | frames of `wire`      (little-endian)

Invariant: once `flush` has returned, every record given to `keep` is in a file and decodes to what was leased. A record that
comes again after a restart is kept again; `Kept` holds the first copy.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

import structlog

from sample_bus import wire
from sample_bus.errors import JournalDamaged, JournalError, WireError
from sample_bus.packing import Buffer
from sample_bus.protocols import Lease, Leased
from sample_bus.record_log import HEAD_BYTES, RecordLog, read_records
from sample_bus.sample import Sample, SampleId

log = structlog.get_logger()

SEGMENT_BYTES = 256 << 20
"""A segment that has grown to this is followed by a new one."""
RETRY_S = 0.5
NOTICE_S = 10.0
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def retained_dir(run_dir: Path, run_id: str) -> Path:
    return run_dir / "retained" / run_id


class Retained:
    """Writes; belongs to the event loop of the one trainer that is at work in the run directory.

    A disk that is full or read-only loses nothing: records wait in memory, in order, as many as the bus gives credit for while
    the trainer waits in `flush` before it trains them; a line every few seconds says so.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Nothing is made before the first record. Raises JournalError if the directory cannot be read."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._number = max(map(int, (path.stem for path in _segments(directory))), default=0) + 1
        self._segment: RecordLog | None = None
        self._pending: deque[Lease] = deque()
        self._written = asyncio.Event()
        self._written.set()
        self._retry: asyncio.TimerHandle | None = None
        self._noticed_at = 0.0

    @property
    def is_blocked(self) -> bool:
        return bool(self._pending)

    def keep(self, lease: Lease) -> None:
        """Write the record now, or behind what could not be written. Raises nothing for a disk that takes none."""
        self._pending.append(lease)
        if len(self._pending) == 1:
            self._drain()

    async def flush(self) -> None:
        """Return when everything given to `keep` before is in a file."""
        await self._written.wait()

    def close(self) -> None:
        """Try once more to write what is pending, and close the file."""
        self._cancel_retry()
        if self._pending:
            self._drain()
        self._cancel_retry()
        if self._pending:
            log.error("records were not kept", path=str(self._directory), num_records=len(self._pending))
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _drain(self) -> None:
        self._retry = None
        try:
            while self._pending:
                self._append(self._pending[0])
                self._pending.popleft()
        except (OSError, JournalError) as error:
            self._written.clear()
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._drain)
            if time.monotonic() - self._noticed_at > NOTICE_S:
                self._noticed_at = time.monotonic()
                problem = getattr(error, "strerror", None) or str(error)
                log.warning("records cannot be kept, waiting", path=str(self._directory), problem=problem)
        else:
            if not self._written.is_set():
                self._noticed_at = 0.0
                log.info("records can be kept again", path=str(self._directory))
            self._written.set()

    def _append(self, lease: Lease) -> None:
        if self._segment is not None and self._segment.num_bytes >= self._segment_bytes:
            self._segment.close()
            self._segment = None
            self._number += 1
        if self._segment is None:
            self._segment = RecordLog(self._directory / f"{self._number:06d}.log")
        frames = (
            wire.encode(lease.sample, lease.id) if isinstance(lease, Leased) else wire.encode_closed(lease.closed, lease.id)
        )
        lengths = [_LENGTH.pack(memoryview(frame).nbytes) for frame in frames]
        self._segment.append(_COUNT.pack(len(frames)), *lengths, *frames)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


class Kept:
    """Reads what a run kept, which may still go on: samples by id. Closed seats are passed over, they train nothing."""

    def __init__(self, directory: Path) -> None:
        """Read every segment once. Raises JournalError, JournalDamaged naming the file."""
        self._places: dict[SampleId, tuple[Path, int, int]] = {}
        """Segment, offset and bytes of the payload."""
        self.num_bytes = 0
        for path in _segments(directory):
            for offset, payload in read_records(path):
                record_id, record = _decode(payload, f"{path} at byte {offset}")
                if isinstance(record, Sample) and record_id not in self._places:
                    self._places[record_id] = (path, offset + HEAD_BYTES, len(payload))
                    self.num_bytes += len(payload)

    @property
    def ids(self) -> Collection[SampleId]:
        return self._places.keys()

    def sample(self, sample_id: SampleId) -> Sample:
        """Raises KeyError if it was not kept, JournalDamaged if its bytes have changed since the start."""
        path, offset, length = self._places[sample_id]
        where = f"{path} at byte {offset - HEAD_BYTES}"
        try:
            with path.open("rb") as file:
                file.seek(offset)
                payload = file.read(length)
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from error
        got, sample = _decode(payload, where)
        if got != sample_id or not isinstance(sample, Sample):
            raise JournalDamaged(f"{where}: got record {got}, expected sample {sample_id}")
        return sample


def _segments(directory: Path) -> list[Path]:
    """Oldest first."""
    try:
        return sorted((path for path in directory.glob("*.log") if path.stem.isdigit()), key=lambda path: int(path.stem))
    except OSError as error:
        raise JournalError(f"{directory}: cannot be read: {error.strerror or error}") from error


def _decode(payload: Buffer, where: str) -> tuple[SampleId, object]:
    view = memoryview(payload)
    try:
        (count,) = _COUNT.unpack_from(view)
        at = _COUNT.size + count * _LENGTH.size
        if at > view.nbytes:
            raise WireError(f"{count} frames in {view.nbytes} bytes")
        frames: list[bytes | memoryview] = []
        for index in range(count):
            (length,) = _LENGTH.unpack_from(view, _COUNT.size + index * _LENGTH.size)
            frames.append(view[at : at + length])
            at += length
        return wire.decode(frames, max_bytes=view.nbytes)
    except (struct.error, WireError) as error:
        raise JournalDamaged(f"{where}: no record of the bus: {error}") from error
