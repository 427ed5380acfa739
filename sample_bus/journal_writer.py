"""Writing a journal from an event loop: at once when the disk takes it, later and in order when it does not.

Invariant: records reach the file in the order of `write`; none is dropped. While the disk is full or read-only `is_blocked`
holds, a line every few seconds says so, and whoever needs a record to be durable waits in `flush`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from sample_bus.journal import Record, encode_record
from sample_bus.record_log import RecordLog

log = structlog.get_logger()

RETRY_S = 0.5
NOTICE_S = 10.0


class JournalWriter:
    """Belongs to the event loop. One process at a time writes a journal: its caller holds a lock on the run directory."""

    def __init__(self, path: Path, *, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called when `is_blocked` changes. Raises JournalError, JournalDamaged."""
        self._log = RecordLog(path)
        self._on_change = on_change
        self._pending: deque[bytes] = deque()
        self._written = asyncio.Event()
        self._written.set()
        self._retry: asyncio.TimerHandle | None = None
        self._noticed_at = 0.0
        self.problem = ""
        """Why records cannot be written; empty while they can."""

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def is_blocked(self) -> bool:
        return bool(self._pending)

    def write(self, record: Record) -> None:
        """Append now, or queue behind what could not be appended."""
        self._pending.append(encode_record(record))
        if len(self._pending) == 1:
            self._drain()

    async def flush(self) -> None:
        """Return when everything that was written before is in the file."""
        await self._written.wait()

    def close(self) -> None:
        """Try once more to write what is pending, and close the file."""
        if self._retry is not None:
            self._retry.cancel()
        if self._pending:
            self._drain()
        if self._retry is not None:
            self._retry.cancel()
            log.error("journal records lost", path=str(self.path), num_records=len(self._pending), problem=self.problem)
        self._log.close()

    def _drain(self) -> None:
        was_blocked = not self._written.is_set()
        self._retry = None
        try:
            while self._pending:
                self._log.append(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._written.clear()
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._drain)
            if time.monotonic() - self._noticed_at > NOTICE_S:
                self._noticed_at = time.monotonic()
                log.warning("journal cannot be written, waiting", path=str(self.path), problem=self.problem)
        else:
            self.problem = ""
            self._written.set()
            if was_blocked:
                self._noticed_at = 0.0
                log.info("journal can be written again", path=str(self.path))
        if was_blocked != (not self._written.is_set()):
            self._on_change()
