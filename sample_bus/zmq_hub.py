"""The trainer's end of the bus over ZeroMQ: takes samples from one rollouter, answers requests, keeps the topics.

Invariant: a sample that arrived is handed out by `lease` exactly once, in the order of arrival; unsettled samples never exceed
`bus.max_queued_samples` and `bus.max_queued_bytes`, whatever the producer does and however often it reconnects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
import zmq

from configs.schema import BusSettings
from sample_bus.answers import Answers
from sample_bus.credit import Stream
from sample_bus.errors import AddressInUse, BusError, PeerLost
from sample_bus.feed import Feed
from sample_bus.frames import PROTOCOL, Ack, Bye, Control, Heartbeat, Hello, Refused, Reply, Request, Reset, TopicValue, Welcome
from sample_bus.messages import Message
from sample_bus.peers import LossReason, LostPeer, Role
from sample_bus.protocols import ConsumerStatistics, Handler, Leased
from sample_bus.quarantine import Quarantine
from sample_bus.sample import SampleId
from sample_bus.topics import TopicBoard, encode_body
from sample_bus.zmq_io import (
    HIGH_WATER_MARK,
    Arrived,
    ArrivedSample,
    Crashed,
    Disconnected,
    Event,
    HeardAgain,
    Malformed,
    Silent,
    SocketThread,
)

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
NOTICE_S = 5.0
"""How often a long wait says what it waits for."""


@dataclass(slots=True, eq=False)
class _Session:
    """A client that was welcomed."""

    peer: bytes
    name: str
    role: Role
    epoch: int
    connected: bool = True


class ZmqHub:
    def __init__(self, bus: BusSettings, *, address: str, run: str, incarnation: str, quarantine: Quarantine) -> None:
        self._bus = bus
        self._address = address
        self._run = run
        self._incarnation = incarnation
        self._quarantine = quarantine
        self._max_sample_bytes = min(bus.max_sample_bytes, bus.max_queued_bytes)
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._answers = Answers()
        self._losses: Feed[LostPeer] = Feed()
        self._arrivals: Feed[str] = Feed()
        self._sessions: dict[bytes, _Session] = {}
        self._rollouter: _Session | None = None
        self._candidates: dict[bytes, Hello] = {}
        self._streams: dict[tuple[str, int], Stream] = {}
        self._queue: deque[Leased] = deque()
        self._arrived = asyncio.Event()
        self._leased: dict[SampleId, int] = {}
        self._origin_version = 0
        self._accounted_before = 0
        self._settled = self._dropped = self._received = self._rejected = self._duplicates = 0
        self._ack_scheduled = False
        self._failure: BusError | None = None
        self._io: SocketThread

    def open(self) -> None:
        """Bind and start. Raises AddressInUse."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._bus.max_sample_bytes, 32 << 20))
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            context.term()
            raise AddressInUse(f"{self._address}: cannot listen there: {error}") from error
        self._address = socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self._io = SocketThread(
            context,
            socket,
            name="hub",
            deliver=self._take,
            heartbeat_interval_s=self._bus.heartbeat_interval_s,
            heartbeat_timeout_s=self._bus.heartbeat_timeout_s,
            max_sample_bytes=self._bus.max_sample_bytes,
        )
        self._io.start()
        log.info("bus listens", address=self._address, incarnation=self._incarnation)

    async def close(self) -> None:
        """Say goodbye to all clients and free the address."""
        for session in self._sessions.values():
            self._io.send_control(session.peer, Bye(reason="the trainer closed the bus"))
        self._fail(BusError("the bus is closed"))
        await self._answers.close()
        await self._io.close(flush_s=1.0)

    # ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def lease(self) -> Leased:
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        leased = self._queue.popleft()
        self._leased[leased.id] = leased.nbytes
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        unknown = [sample_id for sample_id in ids if sample_id not in self._leased]
        if unknown or len(set(ids)) != len(ids):
            first = (unknown or list(ids))[0]
            raise BusError(f"acknowledge: {len(unknown)} of {len(ids)} ids are not leased or named twice, first {first}")
        for sample_id in ids:
            self._streams[sample_id.producer, sample_id.epoch].settle(self._leased.pop(sample_id))
        self._settled += len(ids)
        self._dropped += len(ids) if dropped else 0
        if ids and not self._ack_scheduled:
            self._ack_scheduled = True
            asyncio.get_running_loop().call_soon(self._acknowledge_stream)

    def consumer_statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(
            received=self._received,
            queued=len(self._queue) + len(self._leased),
            queued_bytes=sum(stream.queued_bytes for stream in self._streams.values()),
            rejected=self._rejected,
            duplicates=self._duplicates,
        )

    def set_origin(self, origin_version: int, accounted: int = 0) -> None:
        self._origin_version = origin_version
        self._accounted_before = accounted
        self._settled = self._dropped = 0

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return self._address

    @property
    def rollouter(self) -> str | None:
        return self._rollouter.name if self._rollouter is not None and self._rollouter.connected else None

    async def wait_rollouter(self, timeout_s: float) -> str:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while self.rollouter is None:
            if self._failure is not None:
                raise self._failure
            waited = loop.time() - started
            if waited >= timeout_s:
                raise PeerLost(f"no rollouter came to {self._address} within {timeout_s:g} s")
            try:
                async with asyncio.timeout(min(NOTICE_S, timeout_s - waited)):
                    await self._arrivals.wait_next()
            except TimeoutError:
                log.info(
                    "waiting for a rollouter",
                    address=self._address,
                    waited_s=round(loop.time() - started, 1),
                    deadline_s=timeout_s,
                )
        return self.rollouter

    def rollouter_lost(self) -> AsyncIterator[LostPeer]:
        return self._losses.follow()

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, topic: str, kind: type[M]) -> M | None:
        return self._board.get(topic, kind)

    def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        return self._board.watch(topic, kind)

    async def publish(self, topic: str, value: Message) -> None:
        if self._failure is not None:
            raise self._failure
        self._own_topics.add(topic)
        self._spread(topic, encode_body(value), source=None)

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        return await self._answers.ask(name, body, reply, timeout_s=timeout_s or self._bus.request_timeout_s)

    def handle(self, name: str, kind: type[Message], handler: Handler) -> None:
        self._answers.handle(name, kind, handler)

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ArrivedSample():
                    self._take_sample(event)
                case Malformed():
                    self._reject(event)
                case Arrived():
                    self._take_control(event.peer, event.message)
                case Disconnected() | Silent():
                    self._note_absence(event)
                case HeardAgain():
                    self._refuse_candidates(event.peer)
                case Crashed():
                    self._fail(BusError(f"the bus failed: {event.error}"))
        if any(isinstance(event, ArrivedSample | Malformed) for event in events):
            self._acknowledge_stream()

    def _take_sample(self, event: ArrivedSample) -> None:
        session = self._sessions.get(event.peer)
        if session is None or session.role is not Role.ROLLOUTER:
            self._io.send_control(event.peer, Reset(), key="reset")
            return
        stream = self._streams[session.name, session.epoch]
        if event.seq < stream.received:
            self._duplicates += 1
            return
        if event.seq > stream.received:
            self._io.send_control(event.peer, Reset(), key="reset")
            return
        if event.id != SampleId(session.name, session.epoch, event.seq):
            error = f"id: got {event.id}, expected {SampleId(session.name, session.epoch, event.seq)}"
            self._reject(Malformed(peer=event.peer, seq=event.seq, error=error, frames=(b"",) * 2), nbytes=event.nbytes)
            return
        stream.receive(event.nbytes)
        self._received += 1
        self._queue.append(Leased(id=event.id, sample=event.sample, nbytes=event.nbytes))
        self._arrived.set()

    def _reject(self, event: Malformed, nbytes: int | None = None) -> None:
        """Count and keep what did not decode; if it has a place in a stream, give its credit back."""
        session = self._sessions.get(event.peer)
        stream = self._streams.get((session.name, session.epoch)) if session is not None else None
        if stream is not None and event.seq is not None:
            if event.seq != stream.received:
                return
            size = event.nbytes if nbytes is None else nbytes
            stream.receive(size)
            stream.settle(size)
        self._rejected += 1
        source = session.name if session is not None else f"unknown client {event.peer.hex()}"
        path = self._quarantine.keep(event.frames, event.error, source)
        log.warning("message rejected", source=source, seq=event.seq, error=event.error, kept=str(path) if path else "no room")

    def _take_control(self, peer: bytes, message: Control) -> None:
        session = self._sessions.get(peer)
        if isinstance(message, Hello):
            self._consider(peer, message)
        elif session is None:
            if peer not in self._candidates and not isinstance(message, Bye):
                self._io.send_control(peer, Reset(), key="reset")
        elif isinstance(message, TopicValue):
            self._take_topic(session, message)
        elif isinstance(message, Request):
            self._answers.answer((session.name, session.epoch), message, lambda reply: self._reply(session.epoch, reply))
        elif isinstance(message, Bye):
            self._leave(session, LossReason.LEFT, 0.0)
        elif not isinstance(message, Heartbeat):
            log.warning("message of an unexpected kind", source=session.name, kind=type(message).__name__)

    def _take_topic(self, session: _Session, message: TopicValue) -> None:
        if session.role is not Role.ROLLOUTER or message.name in self._own_topics:
            log.warning("topic refused", source=session.name, topic=message.name)
            return
        self._spread(message.name, message.value, source=session)

    def _spread(self, topic: str, value: bytes, source: _Session | None) -> None:
        revision = self._board.set(topic, value)
        message = TopicValue(name=topic, revision=revision, value=value)
        for session in self._sessions.values():
            if session is not source and session.connected:
                self._io.send_control(session.peer, message, key=f"topic {topic}")

    def _reply(self, epoch: int, reply: Reply) -> None:
        for session in self._sessions.values():
            if session.epoch == epoch and session.connected:
                self._io.send_control(session.peer, reply)

    # ── clients that come and go ─────────────────────────────────────────────────────────────────────────────────────

    def _consider(self, peer: bytes, hello: Hello) -> None:
        present = self._rollouter
        if hello.protocol != PROTOCOL:
            self._refuse(peer, hello, f"it speaks protocol {hello.protocol}, the trainer {PROTOCOL}")
        elif hello.role not in set(Role):
            self._refuse(peer, hello, f"unknown role {hello.role[:40]!r}")
        elif hello.role == Role.ROLLOUTER and present and present.connected and present.epoch != hello.epoch:
            self._candidates[peer] = hello
            self._io.probe(present.peer)
        else:
            self._welcome(peer, hello)

    def _refuse(self, peer: bytes, hello: Hello, reason: str) -> None:
        log.warning("client refused", name=hello.name, reason=reason)
        self._io.send_control(peer, Refused(greeting=hello.greeting, reason=reason))

    def _refuse_candidates(self, peer: bytes) -> None:
        present = self._rollouter
        if present is not None and present.peer == peer:
            candidates, self._candidates = self._candidates, {}
            for other, hello in candidates.items():
                self._refuse(
                    other, hello, f"rollouter {present.name!r} is connected and alive, and this version takes one rollouter"
                )

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        session = _Session(peer, hello.name, Role(hello.role), hello.epoch)
        for other in [other for other in self._sessions.values() if other.epoch == hello.epoch and other.peer != peer]:
            self._io.forget(self._sessions.pop(other.peer).peer)
        self._sessions[peer] = session
        self._io.track(peer)
        stream = self._place(session, hello) if session.role is Role.ROLLOUTER else Stream(0, 0)
        self._io.send_control(peer, self._welcome_message(hello, stream))
        log.info("client connected", name=session.name, role=session.role.value)
        if session.role is Role.ROLLOUTER:
            self._arrivals.add(session.name)

    def _place(self, session: _Session, hello: Hello) -> Stream:
        """Make the session the rollouter and return its stream."""
        before, self._rollouter = self._rollouter, session
        if before is not None and before.epoch != session.epoch:
            if self._sessions.pop(before.peer, None) is not None:
                self._io.forget(before.peer)
            self._losses.add(LostPeer(name=before.name, reason=LossReason.REPLACED, silent_s=0.0))
            log.warning("rollouter replaced", before=before.name, now=session.name)
        place = (session.name, session.epoch)
        self._streams = {key: stream for key, stream in self._streams.items() if stream.queued or key == place}
        stream = self._streams.setdefault(place, Stream(hello.first_unreceived, hello.bytes_before))
        if hello.first_unreceived > stream.received:
            stream.received, stream.received_bytes = hello.first_unreceived, hello.bytes_before
        return stream

    def _welcome_message(self, hello: Hello, stream: Stream) -> Welcome:
        ack = self._ack(stream)
        return Welcome(
            greeting=hello.greeting,
            incarnation=self._incarnation,
            run=self._run,
            received=ack.received,
            settled=ack.settled,
            limit_samples=ack.limit_samples,
            limit_bytes=ack.limit_bytes,
            max_sample_bytes=self._max_sample_bytes,
            origin_version=self._origin_version,
            accounted=self._accounted_before + self._settled - self._dropped + len(self._queue) + len(self._leased),
            dropped=self._dropped,
            topics=[[name, retained.revision, retained.value] for name, retained in self._board.items()],
        )

    def _note_absence(self, event: Disconnected | Silent) -> None:
        self._candidates.pop(event.peer, None)
        session = self._sessions.get(event.peer)
        if session is None:
            return
        if isinstance(event, Silent):
            self._leave(session, LossReason.SILENT, event.silent_s)
        elif session.role is Role.CONSOLE:
            self._leave(session, LossReason.LEFT, 0.0)
        else:
            session.connected = False
            log.warning("rollouter disconnected", name=session.name)
            self._take_candidates()

    def _leave(self, session: _Session, reason: LossReason, silent_s: float) -> None:
        self._sessions.pop(session.peer, None)
        self._io.forget(session.peer)
        session.connected = False
        lost = LostPeer(name=session.name, reason=reason, silent_s=silent_s)
        log.info("client gone", name=session.name, role=session.role.value, reason=reason.value, silent_s=round(silent_s, 1))
        if session is self._rollouter:
            self._losses.add(lost)
            self._take_candidates()

    def _take_candidates(self) -> None:
        candidates, self._candidates = self._candidates, {}
        for peer, hello in candidates.items():
            self._consider(peer, hello)

    # ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ack(self, stream: Stream) -> Ack:
        held = sum(other.queued for other in self._streams.values() if other is not stream)
        held_bytes = sum(other.queued_bytes for other in self._streams.values() if other is not stream)
        credit = stream.limits(
            max_samples=self._bus.max_queued_samples,
            max_bytes=self._bus.max_queued_bytes,
            queued_elsewhere=held,
            queued_bytes_elsewhere=held_bytes,
        )
        return Ack(received=stream.received, settled=stream.settled, limit_samples=credit.samples, limit_bytes=credit.num_bytes)

    def _acknowledge_stream(self) -> None:
        self._ack_scheduled = False
        session = self._rollouter
        if session is not None and session.connected:
            self._io.send_control(session.peer, self._ack(self._streams[session.name, session.epoch]), key="ack")

    def _fail(self, failure: BusError) -> None:
        self._failure = self._failure or failure
        self._arrived.set()
        self._arrivals.pulse()
        self._board.close()
        self._losses.close()
