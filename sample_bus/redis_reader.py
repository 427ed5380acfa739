"""The thread that reads the producers' streams for the trainer, and deletes what is committed.

Two connections: one waits in a blocking read, the other serves meanwhile, and ends that wait when another stream is to be read.
Invariant: own pending entries come before new ones; an entry is acknowledged and deleted only when a commit covers it; a stream
or group that the server lost is made again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import redis
import structlog

from configs.schema import BusSettings
from sample_bus import wire
from sample_bus.carrier import Deliver
from sample_bus.errors import WireError
from sample_bus.events import STREAM, ArrivedClosure, ArrivedSample, Malformed, Missing
from sample_bus.frames import Ack, Data, encode_control
from sample_bus.position import StreamPosition
from sample_bus.redis_commits import Commits
from sample_bus.redis_entries import kept
from sample_bus.redis_intake import Entry, Intake
from sample_bus.redis_keys import CONSUMER, GROUP, RunKeys, entry_id, frames_of, place_of
from sample_bus.redis_store import RETRY_MAX_S, RETRY_S
from sample_bus.redis_thread import Backoff, IoThread
from sample_bus.redis_wire import GONE, Broker, Reply, Wire, wait_readable
from sample_bus.sample import Sample

log = structlog.get_logger()

_GROUP_IS_GONE = ("NOGROUP", "UNBLOCKED")
_UNBLOCK_AGAIN_S = 0.005
_LONG_S = 3600.0


class ReaderThread:
    def __init__(self, broker: Broker, bus: BusSettings, keys: RunKeys, run_id: str, *, deliver: Deliver) -> None:
        self._broker = broker
        self._keys = keys
        self._run_id = run_id
        self._max_bytes = min(bus.max_sample_bytes, bus.max_queued_bytes)
        self._io = IoThread("records", deliver=deliver)
        self._block_s = broker.bulk_patience_s / 2
        self._intakes: dict[str, Intake] = {}
        self._commits = Commits(keys, run_id)
        self._blocking: Wire | None = None
        self._serving: Wire | None = None
        self._client_id = 0
        self._asked_for: frozenset[str] = frozenset()
        """Keys of the blocking read that is under way."""
        self._answer_by = 0.0
        self._backoff = Backoff(first_s=RETRY_S, longest_s=RETRY_MAX_S)
        self._next_try = 0.0
        self._problem = ""
        self._stop_at: float | None = None

    # ── called in the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._io.start(self._serve)

    def open_stream(self, producer: str, epoch: int, first: int) -> None:
        intake = Intake(producer, self._keys.stream(self._run_id, producer), epoch, first, max_bytes=self._max_bytes)
        self._io.command(lambda: self._open(intake))

    def close_streams(self, producer: str) -> None:
        self._io.command(lambda: self._close(producer))

    def room(self, producer: str, ack: Ack) -> None:
        self._io.command(lambda: self._open_room(producer, ack))

    def commit(self, stream: StreamPosition) -> None:
        self._io.command(lambda: self._commits.add(stream))

    async def close(self, *, flush_s: float) -> None:
        """Delete what is committed, within `flush_s`, and end the thread."""
        stop_at = time.monotonic() + flush_s
        self._io.command(lambda: self._stop(stop_at))
        await self._io.end(flush_s=flush_s, abort=self._abort)

    def _abort(self) -> None:
        for wire_ in (self._serving, self._blocking):
            if wire_ is not None:
                wire_.abort()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            while not self._is_done():
                self._sleep()
                self._io.run_commands()
                if time.monotonic() >= self._next_try and not self._is_done():
                    self._work()
                self._io.hand_over()
        finally:
            self._disconnect()

    def _is_done(self) -> bool:
        return self._stop_at is not None and (time.monotonic() >= self._stop_at or not self._commits)

    def _sleep(self) -> None:
        now = time.monotonic()
        until = now + _LONG_S
        if self._asked_for:
            until = self._answer_by
        if self._next_try > now or self._blocking is None:
            until = min(until, self._next_try)
        if self._commits:
            until = min(until, max(self._next_try, self._commits.next_try))
        if self._stop_at is not None:
            until = min(until, self._stop_at)
        try:
            wires = [wire for wire in (self._blocking, self._serving) if wire is not None]
            wait_readable(wires, self._io.wake_fd, max(0.0, until - now))
        except GONE as error:
            self._lose(error)

    def _work(self) -> None:
        try:
            if self._serving is None or self._blocking is None:
                self._connect()
            serving, blocking = self._serving, self._blocking
            assert serving is not None
            assert blocking is not None
            if self._asked_for:
                self._finish_read(blocking, serving)
            elif blocking.readable():
                blocking.receive()
            if serving.readable():
                serving.receive()
            self._commits.carry_out(serving)
            self._hand_over_held()
            if self._asked_for and self._wants_others():
                self._unblock(blocking, serving)
            if not self._asked_for and self._stop_at is None:
                self._read_pending(serving)
                self._begin_read(blocking)
            self._backoff.worked()
            self._problem = ""
        except (*GONE, redis.ResponseError, WireError) as error:
            self._lose(error)

    def _connect(self) -> None:
        self._disconnect()
        self._serving = Wire(self._broker, patience_s=self._broker.bulk_patience_s)
        self._blocking = Wire(self._broker, patience_s=self._broker.bulk_patience_s)
        self._client_id = int(self._blocking.call("CLIENT", "ID"))
        for intake in self._intakes.values():
            self._join(intake, self._serving)

    def _lose(self, error: Exception) -> None:
        self._next_try = time.monotonic() + self._backoff.failed()
        problem = str(error) or type(error).__name__
        if problem != self._problem:
            self._problem = problem
            log.warning("streams cannot be read for now", server=str(self._broker), error=problem)
        self._disconnect()

    def _disconnect(self) -> None:
        for wire_ in (self._serving, self._blocking):
            if wire_ is not None:
                wire_.close()
        self._serving = self._blocking = None
        self._asked_for = frozenset()
        self._commits.server_changed()

    # streams

    def _open(self, intake: Intake) -> None:
        self._intakes[intake.producer] = intake
        if self._serving is not None:
            try:
                self._join(intake, self._serving)
            except (*GONE, redis.ResponseError) as error:
                self._lose(error)

    def _close(self, producer: str) -> None:
        self._intakes.pop(producer, None)

    def _open_room(self, producer: str, ack: Ack) -> None:
        intake = self._intakes.get(producer)
        if intake is not None:
            intake.open_room(received=ack.received, limit=ack.limit_samples, room_bytes=ack.room_bytes)

    def _stop(self, stop_at: float) -> None:
        self._stop_at = stop_at

    def _join(self, intake: Intake, serving: Wire) -> None:
        """Make the stream's group if it has none, and take over what other consumers of it left pending."""
        try:
            serving.call("XGROUP", "CREATE", intake.key, GROUP, "0", "MKSTREAM")
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        intake.reads_pending = True
        start: str | bytes = "0-0"
        while start != b"0-0":
            start = serving.call("XAUTOCLAIM", intake.key, GROUP, CONSUMER, 0, start, "COUNT", 1000, "JUSTID")[0]

    # reading

    def _read_pending(self, serving: Wire) -> None:
        """Take what was delivered to this consumer before, as far as there is room."""
        for intake in list(self._intakes.values()):
            while intake.reads_pending and (count := intake.count()):
                after = f"{intake.epoch}-{intake.next_read}"  # entry numbers are one higher
                reply = self._read(serving, count, [intake.key], [after])
                entries = reply[0][1] if reply else []
                intake.reads_pending = bool(entries)
                self._take(intake, entries, serving)
                self._hand_over_held()

    def _read(self, wire_: Wire, count: int, keys: list[str], ids: list[str]) -> Reply:
        try:
            return wire_.call("XREADGROUP", "GROUP", GROUP, CONSUMER, "COUNT", count, "STREAMS", *keys, *ids)
        except redis.ResponseError as error:
            self._regroup(error, wire_)
            return None

    def _regroup(self, error: redis.ResponseError, serving: Wire) -> None:
        """The server lost a stream or its group: make them again. Raises any other error."""
        if not str(error).startswith(_GROUP_IS_GONE):
            raise error
        log.warning("redis lost a stream's group", server=str(self._broker), error=str(error))
        for intake in self._intakes.values():
            self._join(intake, serving)

    def _readable(self) -> list[Intake]:
        return [intake for intake in self._intakes.values() if intake.count() > 0]

    def _begin_read(self, blocking: Wire) -> None:
        """Ask for new entries of all streams that have room."""
        intakes = [intake for intake in self._readable() if not intake.reads_pending]
        if not intakes:
            return
        keys = [intake.key for intake in intakes]
        count = min(intake.count() for intake in intakes)
        options = ("COUNT", count, "BLOCK", int(self._block_s * 1000))
        blocking.send(("XREADGROUP", "GROUP", GROUP, CONSUMER, *options, "STREAMS", *keys, *[">"] * len(keys)))
        self._asked_for = frozenset(keys)
        self._answer_by = time.monotonic() + self._block_s + self._broker.bulk_patience_s

    def _finish_read(self, blocking: Wire, serving: Wire) -> None:
        """Take the answer of the blocking read, if it is there."""
        if not blocking.readable():
            if time.monotonic() >= self._answer_by:
                raise redis.TimeoutError(f"a read that blocks for {self._block_s:g} s was not answered")
            return
        reply = blocking.receive()
        self._asked_for = frozenset()
        if isinstance(reply, redis.ResponseError):
            self._regroup(reply, serving)
            return
        by_key = {intake.key.encode(): intake for intake in self._intakes.values()}
        for key, entries in reply or ():
            intake = by_key.get(key)
            if intake is not None and not intake.reads_pending:  # otherwise they are pending from now on, and read as such
                self._take(intake, entries, serving)

    def _wants_others(self) -> bool:
        return any(intake.reads_pending or intake.key not in self._asked_for for intake in self._readable())

    def _unblock(self, blocking: Wire, serving: Wire) -> None:
        """End the blocking read. It may not have begun: ask until there is an answer to it."""
        deadline = time.monotonic() + self._broker.patience_s
        while not serving.call("CLIENT", "UNBLOCK", self._client_id) and not blocking.readable(_UNBLOCK_AGAIN_S):
            if time.monotonic() > deadline:
                raise redis.TimeoutError("a blocking read cannot be ended")
        self._finish_unblocked(blocking, serving)

    def _finish_unblocked(self, blocking: Wire, serving: Wire) -> None:
        if blocking.readable(self._broker.patience_s):
            self._finish_read(blocking, serving)
            self._hand_over_held()

    def _take(self, intake: Intake, entries: Iterable[Reply], serving: Wire) -> None:
        for name, fields in entries:
            epoch, seq = place_of(name)
            if epoch != intake.epoch:
                continue  # its producer has not opened that one
            for missing in self._look_for(intake, intake.gap_before(seq), serving):
                intake.take(missing)
            if fields is None and seq == intake.next_read:
                [entry] = self._look_for(intake, range(seq, seq + 1), serving)
                intake.take(entry)
            else:
                intake.take(Entry(seq, fields))

    def _look_for(self, intake: Intake, seqs: range, serving: Wire) -> list[Entry]:
        """Entries that should have been read: somebody acknowledged them or deleted them."""
        if not seqs:
            return []
        found = dict(kept(serving, intake.key, intake.epoch, seqs.start, seqs.stop))
        log.error("stream has a gap", stream=intake.key, first=seqs.start, last=seqs.stop - 1, still_there=len(found))
        return [Entry(seq, found.get(seq)) for seq in seqs]

    # handing over

    def _hand_over_held(self) -> None:
        for intake in self._intakes.values():
            while (entry := intake.hand_over()) is not None:
                self._emit(intake, entry)

    def _emit(self, intake: Intake, entry: Entry) -> None:
        frames: tuple[memoryview, ...] = ()
        if entry.fields is None:
            self._io.emit(Missing(place=(intake.producer, intake.epoch), seq=entry.seq))
            return
        try:
            envelope = memoryview(encode_control(Data(seq=entry.seq)))
            frames = (envelope, *(memoryview(field) for field in entry.fields))
            found = frames_of(entry.fields)
            frames = (envelope, *(memoryview(frame) for frame in found))
            record_id, record = wire.decode(found, max_bytes=self._max_bytes)
            if record_id != (intake.producer, intake.epoch, entry.seq):
                raise WireError(f"id: got {record_id}, expected {entry_id(intake.epoch, entry.seq)} of {intake.producer}")
        except WireError as error:
            place = (intake.producer, intake.epoch)
            self._io.emit(Malformed(peer=STREAM, place=place, seq=entry.seq, error=str(error), frames=frames))
            return
        if isinstance(record, Sample):
            self._io.emit(
                ArrivedSample(peer=STREAM, seq=entry.seq, nbytes=entry.nbytes, id=record_id, sample=record, frames=frames)
            )
        else:
            self._io.emit(
                ArrivedClosure(peer=STREAM, seq=entry.seq, nbytes=entry.nbytes, id=record_id, closed=record, frames=frames)
            )
