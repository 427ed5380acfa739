"""A producer's records between the event loop, its spool and its socket. Lives in the I/O thread.

Invariant: a record is sent only once it is in the spool, in order, below the limit that was set, or if it is larger than the
trainer takes its number alone; while the disk does not take
it everything behind it waits, and nothing is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sample_bus import wire
from sample_bus.errors import JournalError
from sample_bus.events import (
    SERVER,
    Event,
    ReadBack,
    StoreBlocked,
    Stored,
    StoreUnblocked,
    StreamFailed,
    StreamOpened,
)
from sample_bus.frames import Data, Withheld, encode_control
from sample_bus.spool import Spool

RETRY_S = 0.25
"""How soon a record is tried again that the disk did not take."""

Frames = Sequence[bytes | memoryview]


class Thread(Protocol):
    """What it needs of the I/O thread."""

    def emit(self, event: Event) -> None: ...

    def enqueue(self, peer: bytes, frames: Frames, key: str | None = None) -> None: ...

    def at_end(self, command: Callable[[], None]) -> None: ...

    def after(self, delay_s: float, command: Callable[[], None]) -> None: ...


class Outflow:
    def __init__(self, thread: Thread, root: Path | None, producer: str, *, sync: bool) -> None:
        """`root` holds a directory per run; None: this client offers nothing."""
        self._thread = thread
        self._root = root
        self._producer = producer
        self._sync = sync
        self._spool: Spool | None = None
        self._waiting: deque[tuple[int, Frames]] = deque()
        self._fresh: dict[int, Frames] = {}
        """Kept records that were not delivered and are still in memory."""
        self._cursor: int | None = None
        self._limit = 0
        self._max_bytes: int | None = None
        self._blocked = False

    def open_stream(self, run_id: str, *, renew: bool) -> None:
        self.close()
        if self._root is None:
            self._thread.emit(StreamFailed(error="this client was opened without a spool directory"))
            return
        try:
            spool = self._spool = Spool(self._root / run_id / self._producer, sync=self._sync)
            if renew:
                spool.renew()
        except (JournalError, OSError) as error:
            self.close()
            self._thread.emit(StreamFailed(error=str(error)))
            return
        self._thread.emit(StreamOpened(run_id=run_id, epoch=spool.epoch, committed=spool.first, sizes=spool.sizes()))

    def store(self, seq: int, frames: Frames) -> None:
        self._waiting.append((seq, frames))
        if len(self._waiting) == 1:  # the others of this batch go with it
            self._thread.at_end(self._store_waiting)

    def deliver(self, first: int | None, limit: int) -> None:
        if first is not None:
            self._cursor = first
        self._limit = limit
        self._deliver()

    def bound(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def hold(self) -> None:
        self._cursor = None
        self._fresh.clear()

    def free(self, watermark: int) -> None:
        if self._spool is not None:
            try:
                self._spool.free(watermark)
            except OSError:
                pass  # the copies stay until the next commit

    def read(self, first: int, last: int) -> None:
        """Copies of records first … last - 1, as far as they are kept."""
        spool = self._spool
        records: list[tuple[memoryview, ...]] = []
        if spool is not None:
            first = max(first, spool.first)
            records = [spool.read(seq) for seq in range(first, min(last, spool.next_seq))]
        self._thread.emit(ReadBack(first=first, records=tuple(records)))

    def is_idle(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        """Close the spool, after one more try to write what waits."""
        if self._spool is not None:
            if self._waiting:
                self._store_waiting()
            self._spool.close()
        self._spool = None
        self._waiting.clear()
        self.hold()
        self._blocked = False

    def _store_waiting(self) -> None:
        spool = self._spool
        if spool is None or not self._waiting:
            return
        try:
            while self._waiting:
                seq, frames = self._waiting[0]
                spool.append(seq, frames)
                self._waiting.popleft()
                if self._cursor is not None:
                    self._fresh[seq] = frames
        except OSError as error:
            self._thread.after(RETRY_S, self._store_waiting)
            if not self._blocked:
                self._blocked = True
                self._thread.emit(StoreBlocked(error=error.strerror or str(error)))
        else:
            if self._blocked:
                self._blocked = False
                self._thread.emit(StoreUnblocked())
        self._thread.emit(Stored(upto=spool.next_seq))
        self._deliver()

    def _deliver(self) -> None:
        spool = self._spool
        if self._cursor is None or spool is None:
            return
        while self._cursor < min(self._limit, spool.next_seq):
            seq = self._cursor
            frames = self._fresh.pop(seq, None) or spool.read(seq)
            self._cursor += 1
            nbytes = wire.num_bytes(frames)
            if self._max_bytes is not None and nbytes > self._max_bytes:
                self._thread.enqueue(SERVER, [encode_control(Withheld(seq=seq, nbytes=nbytes))])
            else:
                self._thread.enqueue(SERVER, [encode_control(Data(seq=seq)), *frames])
