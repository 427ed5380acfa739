"""Deleting what is committed from the producers' streams.

Invariant: an entry is acknowledged and deleted in one transaction, by its own id, and only when a commit covers it; a stream is
never trimmed by length. Everything below a watermark goes, and nothing above it, so what is left is dense.
"""

from __future__ import annotations

import time

import redis
import structlog

from sample_bus.position import StreamPosition
from sample_bus.redis_entries import kept
from sample_bus.redis_keys import GROUP, RunKeys, entry_id
from sample_bus.redis_wire import Command, Wire

log = structlog.get_logger()

CHUNK = 500
"""Entries of one transaction."""
RETRY_S = 1.0

Place = tuple[str, int]


class Commits:
    def __init__(self, keys: RunKeys, run_id: str) -> None:
        self._keys = keys
        self._run_id = run_id
        self._wanted: dict[Place, int] = {}
        """Watermark up to which entries are to be deleted."""
        self._deleted: dict[Place, int] = {}
        """Below it there is nothing."""
        self.next_try = 0.0
        """When the server, which did not delete, is asked again; by the monotonic clock."""

    def __bool__(self) -> bool:
        """Whether something is to be deleted."""
        return bool(self._wanted)

    def add(self, stream: StreamPosition) -> None:
        place = (stream.producer, stream.epoch)
        if stream.watermark > self._deleted.get(place, 0):
            self._wanted[place] = max(stream.watermark, self._wanted.get(place, 0))

    def server_changed(self) -> None:
        """What it has may be something else now."""
        self._deleted.clear()

    def carry_out(self, serving: Wire) -> None:
        """Delete what is wanted. What the server does not delete for now stays wanted. Raises GONE."""
        if not self._wanted or time.monotonic() < self.next_try:
            return
        for place, watermark in list(self._wanted.items()):
            try:
                self._delete(serving, place, watermark)
            except redis.ResponseError as error:
                log.warning("committed records are not deleted for now", producer=place[0], error=str(error))
                self.next_try = time.monotonic() + RETRY_S
                return
            self._deleted[place] = watermark
            del self._wanted[place]

    def _delete(self, serving: Wire, place: Place, watermark: int) -> None:
        producer, epoch = place
        key = self._keys.stream(self._run_id, producer)
        first = self._deleted.get(place)
        if first is None:
            first = next((seq for seq, _ in kept(serving, key, epoch, 0, watermark)), watermark)
        for start in range(first, watermark, CHUNK):
            ids = [entry_id(epoch, seq) for seq in range(start, min(start + CHUNK, watermark))]
            commands: list[Command] = [("MULTI",), ("XACK", key, GROUP, *ids), ("XDEL", key, *ids), ("EXEC",)]
            replies = serving.calls(commands)
            for reply in replies if isinstance(replies[-1], redis.ResponseError) else replies[-1]:
                if isinstance(reply, redis.ResponseError):
                    raise reply
