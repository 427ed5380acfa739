"""The thread that keeps a producer's records on a Redis server.

Invariant: records are added in order, each exactly once, however often connections break and the server dies; what the server
lost is added again as long as there is a copy. While the server takes nothing everything waits, and says why.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import redis
import structlog

from sample_bus.carrier import Deliver, Frames
from sample_bus.errors import WireError
from sample_bus.events import ReadBack, StoreBlocked, Stored, StoreUnblocked, StreamFailed, StreamOpened
from sample_bus.redis_copies import Copies
from sample_bus.redis_entries import ServerRefused, add, kept, top_of
from sample_bus.redis_keys import RunKeys, frames_of
from sample_bus.redis_post import PIPELINE_BYTES
from sample_bus.redis_thread import Backoff, IoThread
from sample_bus.redis_wire import GONE, Broker, Wire, wait_readable

log = structlog.get_logger()

RETRY_S = 0.1
RETRY_MAX_S = 1.0
_LONG_S = 3600.0


class StoreThread:
    def __init__(self, broker: Broker, keys: RunKeys, producer: str, *, deliver: Deliver) -> None:
        self._broker = broker
        self._keys = keys
        self._producer = producer
        self._io = IoThread(f"{producer}-records", deliver=deliver)
        self._is_started = False
        self._wire: Wire | None = None
        self._backoff = Backoff(first_s=RETRY_S, longest_s=RETRY_MAX_S)
        self._next_try = 0.0
        self._todo: deque[Callable[[Wire], None]] = deque()
        """Work that needs the server, in order, before records are added."""
        self._key = ""
        self._epoch = 0
        self._copies = Copies(0)
        self._told_stored = 0
        self._is_blocked = False
        self._stop_at: float | None = None

    # ── called in the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def open_stream(self, run_id: str, *, renew: bool) -> None:
        if not self._is_started:
            self._is_started = True
            self._io.start(self._serve)
        self._io.command(lambda: self._todo.append(lambda wire: self._open(wire, run_id, renew)))

    def store(self, seq: int, frames: Frames) -> None:
        self._io.command(lambda: self._copies.add(seq, frames))

    def received(self, upto: int) -> None:
        """The trainer holds every record below `upto`. May be called in any thread."""
        self._io.command(lambda: self._copies.note_received(upto))

    def read(self, first: int, last: int) -> None:
        self._io.command(lambda: self._todo.append(lambda wire: self._read(wire, first, last)))

    async def close(self, *, flush_s: float) -> None:
        """Add what waits, within `flush_s`, and end the thread."""
        stop_at = time.monotonic() + flush_s
        self._io.command(lambda: self._stop(stop_at))
        await self._io.end(flush_s=flush_s, abort=self._abort)

    def _abort(self) -> None:
        wire = self._wire
        if wire is not None:
            wire.abort()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            while not self._is_done():
                self._sleep()
                self._io.run_commands()
                if self._has_work and time.monotonic() >= self._next_try and not self._is_done():
                    self._work()
                self._io.hand_over()
        finally:
            self._disconnect()

    def _is_done(self) -> bool:
        return self._stop_at is not None and (time.monotonic() >= self._stop_at or not (self._todo or self._copies.has_waiting))

    @property
    def _has_work(self) -> bool:
        return bool(self._todo) or self._copies.has_waiting or (self._wire is None and bool(self._key))

    def _sleep(self) -> None:
        now = time.monotonic()
        until = self._next_try if self._has_work else now + _LONG_S
        if self._stop_at is not None:
            until = min(until, self._stop_at)
        try:
            wait_readable([] if self._wire is None else [self._wire], self._io.wake_fd, max(0.0, until - now))
            if self._wire is not None and self._wire.readable():  # nothing is asked for: it can only be the end
                self._wire.receive()
        except GONE as error:
            self._lose(error)

    def _work(self) -> None:
        try:
            wire = self._wire
            if wire is None:
                wire = self._wire = Wire(self._broker, patience_s=self._broker.bulk_patience_s)
                self._resume(wire)
            while self._todo:
                self._todo[0](wire)
                self._todo.popleft()
            if self._copies.has_waiting:
                batch = self._copies.batch(PIPELINE_BYTES)
                add(wire, self._key, self._epoch, batch)
                self._note_stored(batch[-1][0] + 1)
            self._backoff.worked()
        except GONE as error:
            self._lose(error)
        except (ServerRefused, redis.ResponseError) as error:
            self._refused(f"{self._broker} takes no records: {error}")

    def _note_stored(self, upto: int) -> None:
        self._copies.note_stored(upto)
        if self._is_blocked:
            self._is_blocked = False
            self._io.emit(StoreUnblocked())
        if upto > self._told_stored:
            self._told_stored = upto
            self._io.emit(Stored(upto=upto))

    def _refused(self, problem: str) -> None:
        self._next_try = time.monotonic() + self._backoff.failed()
        if not self._is_blocked and (self._copies.has_waiting or self._todo):
            self._is_blocked = True
            self._io.emit(StoreBlocked(error=problem))

    def _lose(self, error: Exception) -> None:
        self._disconnect()
        self._refused(f"{self._broker} is gone: {error or type(error).__name__}")

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # the stream

    def _resume(self, wire: Wire) -> None:
        """The server is there again: find out what it has of the open stream."""
        if not self._key:
            return
        top = top_of(wire, self._key)
        lost = self._copies.resume(top.next_seq if top is not None and top.epoch == self._epoch else 0)
        if lost is not None:
            log.warning(
                "redis lost records",
                server=str(self._broker),
                stream=self._key,
                first=lost.first,
                last=lost.last - 1,
                added_again_from=lost.first_again,
            )

    def _open(self, wire: Wire, run_id: str, renew: bool) -> None:
        """Open the stream of that run as the server has it; what waits for the one that was open gets one more try."""
        if not renew:
            self._settle_old(wire)
        key = self._keys.stream(run_id, self._producer)
        try:
            top = top_of(wire, key)
            fresh = max(time.time_ns(), top.epoch + 1 if top is not None else 0)
            epoch, next_seq = (fresh, 0) if top is None or renew else (top.epoch, top.next_seq)
            sizes = {seq: sum(map(len, fields[1::2])) for seq, fields in kept(wire, key, epoch, 0, next_seq)}
        except (redis.ResponseError, WireError) as error:
            self._io.emit(StreamFailed(error=f"{self._broker}, stream {key}: {error}"))
            return
        self._key, self._epoch, self._copies, self._told_stored = key, epoch, Copies(next_seq), next_seq
        first = min(sizes, default=next_seq)
        self._io.emit(
            StreamOpened(
                run_id=run_id,
                epoch=epoch,
                committed=first,
                sizes=tuple(sizes.get(seq, 0) for seq in range(first, next_seq)),
            )
        )

    def _settle_old(self, wire: Wire) -> None:
        """One more try for what waits to go to the stream that is being left."""
        try:
            while self._copies.has_waiting:
                batch = self._copies.batch(PIPELINE_BYTES)
                add(wire, self._key, self._epoch, batch)
                self._note_stored(batch[-1][0] + 1)
        except ServerRefused as error:
            log.warning("records of an earlier run are given up", stream=self._key, first=self._copies.stored, error=str(error))

    def _read(self, wire: Wire, first: int, last: int) -> None:
        """Records as far as the server has them, or this process."""
        found: dict[int, tuple[bytes | memoryview, ...]] = {}
        for seq, fields in kept(wire, self._key, self._epoch, first, last):
            try:
                found[seq] = frames_of(fields)
            except WireError:
                found[seq] = ()
        for seq in range(first, last):
            copy = self._copies.get(seq)
            if seq not in found and copy is not None:
                found[seq] = tuple(copy)
        first = min(found, default=last)
        records = tuple(found.get(seq, ()) for seq in range(first, max(found, default=first - 1) + 1))
        self._io.emit(ReadBack(first=first, records=records))

    def _stop(self, stop_at: float) -> None:
        self._stop_at = stop_at
