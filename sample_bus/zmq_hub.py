"""The trainer's end of the bus over ZeroMQ: takes samples from one rollouter, answers requests, keeps the topics.

A thin shell: `inbox` accounts for samples, `clients` decides who is who, `answers` carries out requests, `zmq_io` owns the
socket. Invariant: as `Consumer` and `ControlServer` say, whatever the clients do and however often they reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import structlog
import zmq

from configs.schema import BusSettings
from sample_bus import events
from sample_bus.answers import Answers
from sample_bus.clients import Client, Clients, Take, Turn, Wait
from sample_bus.errors import AddressInUse, BusError, PeerLost
from sample_bus.feed import Feed
from sample_bus.frames import Ack, Bye, Control, Heartbeat, Hello, Refused, Reply, Request, Reset, TopicValue, Welcome
from sample_bus.inbox import Inbox, Verdict
from sample_bus.messages import Message
from sample_bus.patience import patient
from sample_bus.peers import LossReason, LostPeer, Role
from sample_bus.protocols import ConsumerStatistics, Handler, Leased
from sample_bus.quarantine import Quarantine
from sample_bus.sample import SampleId
from sample_bus.topics import TopicBoard, encode_body
from sample_bus.zmq_io import FLUSH_S, SocketThread, set_options

log = structlog.get_logger()
M = TypeVar("M", bound=Message)


class ZmqHub:
    def __init__(self, bus: BusSettings, *, address: str, run: str, incarnation: str, quarantine: Quarantine) -> None:
        self._bus = bus
        self._address = address
        self._run = run
        self._incarnation = incarnation
        self._origin_version = 0
        self._quarantine = quarantine
        self._inbox = Inbox(max_samples=bus.max_queued_samples, max_bytes=bus.max_queued_bytes)
        self._arrived = asyncio.Event()
        self._ack_scheduled = False
        self._clients = Clients()
        self._arrivals: Feed[str] = Feed()
        self._losses: Feed[LostPeer] = Feed()
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._answers = Answers()
        self._failure: BusError | None = None
        self._io: SocketThread

    def open(self) -> None:
        """Bind and start. Raises AddressInUse."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        set_options(socket, self._bus, self._address)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            context.term()
            raise AddressInUse(f"{self._address}: cannot listen there: {error}") from error
        self._address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._io = SocketThread(context, socket, self._bus, name="hub", deliver=self._deliver)
        self._io.start()
        log.info("bus listens", address=self._address, incarnation=self._incarnation)

    async def close(self) -> None:
        """Say goodbye to all clients and free the address. Waits that are under way end with BusError."""
        for client in self._clients.connected:
            self._io.send_control(client.peer, Bye(reason="the trainer closed the bus"))
        self._fail(BusError("the bus is closed"))
        try:
            await self._answers.close()
        finally:
            await self._io.close(flush_s=FLUSH_S)

    # ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def lease(self) -> Leased:
        while (leased := self._inbox.lease()) is None:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        self._inbox.acknowledge(ids, dropped=dropped)
        if ids and not self._ack_scheduled:
            self._ack_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_ack)

    def consumer_statistics(self) -> ConsumerStatistics:
        return self._inbox.statistics()

    def set_origin(self, origin_version: int, accounted: int = 0) -> None:
        self._origin_version = origin_version
        self._inbox.count_from(accounted)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return self._address

    @property
    def rollouter(self) -> str | None:
        client = self._clients.rollouter
        return client.name if client is not None and client.connected else None

    async def wait_rollouter(self, timeout_s: float) -> str:
        async for waited_s in patient(self._arrivals, timeout_s):
            if self._failure is not None:
                raise self._failure
            if self.rollouter is not None:
                return self.rollouter
            if waited_s is not None:
                log.info("waiting for a rollouter", address=self._address, waited_s=waited_s, deadline_s=timeout_s)
        raise PeerLost(f"no rollouter came to {self._address} within {timeout_s:g} s")

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

    def _deliver(self, batch: list[events.Event]) -> None:
        for event in batch:
            match event:
                case events.ArrivedSample():
                    self._take_sample(event)
                case events.Malformed():
                    self._reject(event)
                case events.Arrived():
                    self._take_control(event.peer, event.message)
                case events.Disconnected():
                    self._note_disconnected(event.peer)
                case events.Silent():
                    self._note_gone(event.peer, LossReason.SILENT, event.silent_s)
                case events.HeardAgain():
                    self._carry_out(self._clients.heard(event.peer))
                case events.Crashed():
                    self._fail(BusError(f"the bus failed: {event.error}"))
                case events.Connected():
                    pass
        if any(isinstance(event, events.ArrivedSample | events.Malformed) for event in batch):
            self._send_ack()

    def _take_sample(self, event: events.ArrivedSample) -> None:
        client = self._clients.at(event.peer)
        if client is None or client.role is not Role.ROLLOUTER:
            self._ask_to_greet(event.peer)
            return
        expected = SampleId(client.name, client.epoch, event.seq)
        if event.id != expected:
            error = f"id: got {event.id}, expected {expected}"
            self._reject(events.Malformed(peer=event.peer, seq=event.seq, error=error, frames=event.frames))
            return
        verdict = self._inbox.take(Leased(id=event.id, sample=event.sample, nbytes=event.nbytes))
        if verdict is Verdict.TAKEN:
            self._arrived.set()
        elif verdict is not Verdict.DUPLICATE:
            log.warning("sample not taken", source=client.name, seq=event.seq, reason=verdict.value)
            self._ask_to_greet(event.peer)

    def _reject(self, event: events.Malformed) -> None:
        """Count and keep what did not decode; if it has a place in a stream, the stream goes on after it."""
        client = self._clients.at(event.peer)
        if client is not None and client.role is Role.ROLLOUTER and event.seq is not None:
            verdict = self._inbox.skip((client.name, client.epoch), event.seq, event.nbytes)
            if verdict is not Verdict.TAKEN:
                return
        else:
            self._inbox.count_rejected()
        source = client.name if client is not None else f"unknown client {event.peer.hex()}"
        path = self._quarantine.keep([bytes(frame) for frame in event.frames], event.error, source)
        tell = log.debug if path is None else log.warning  # one line for each that is kept: a flood does not fill the log too
        tell("message rejected", source=source, seq=event.seq, error=event.error, kept=str(path))

    def _take_control(self, peer: bytes, message: Control) -> None:
        client = self._clients.at(peer)
        if isinstance(message, Hello):
            self._carry_out([self._clients.hello(peer, message)])
        elif client is None:
            if not self._clients.is_candidate(peer) and not isinstance(message, Bye):
                self._ask_to_greet(peer)
        elif isinstance(message, TopicValue):
            if client.role is Role.ROLLOUTER and message.name not in self._own_topics:
                self._spread(message.name, message.value, source=client)
            else:
                log.warning("topic refused", source=client.name, topic=message.name)
        elif isinstance(message, Request):
            self._answers.answer((client.name, client.epoch), message, lambda reply: self._reply(client.epoch, reply))
        elif isinstance(message, Bye):
            self._note_gone(peer, LossReason.LEFT, 0.0)
        elif not isinstance(message, Heartbeat):
            log.warning("message of an unexpected kind", source=client.name, kind=type(message).__name__)

    def _spread(self, topic: str, value: bytes, source: Client | None) -> None:
        message = TopicValue(name=topic, revision=self._board.set(topic, value), value=value)
        for client in self._clients.connected:
            if client is not source:
                self._io.send_control(client.peer, message, key=f"topic {topic}")

    def _reply(self, epoch: int, reply: Reply) -> None:
        for client in self._clients.connected:
            if client.epoch == epoch:
                self._io.send_control(client.peer, reply)

    # ── clients that come and go ─────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, decisions: Sequence[Take | Turn | Wait]) -> None:
        for decision in decisions:
            match decision:
                case Take():
                    self._welcome(decision)
                case Turn():
                    log.warning("client refused", name=decision.hello.name, reason=decision.reason)
                    self._io.send_control(decision.peer, Refused(greeting=decision.hello.greeting, reason=decision.reason))
                case Wait():
                    self._io.probe(decision.probe)

    def _welcome(self, take: Take) -> None:
        client, hello = take.client, take.hello
        for peer in take.gone:
            self._io.forget(peer)
        self._io.track(client.peer)
        if client.role is Role.ROLLOUTER:
            self._inbox.open_stream(
                (client.name, client.epoch), first_unreceived=hello.first_unreceived, bytes_before=hello.bytes_before
            )
        if take.replaced is not None:
            log.warning("rollouter replaced", before=take.replaced.name, now=client.name)
            self._losses.add(
                LostPeer(name=take.replaced.name, reason=LossReason.REPLACED, silent_s=0.0, epoch=take.replaced.epoch)
            )
        self._io.send_control(client.peer, self._welcome_message(client, hello.greeting))
        log.info("client connected", name=client.name, role=client.role.value)
        if client.role is Role.ROLLOUTER:
            self._arrivals.add(client.name)

    def _welcome_message(self, client: Client, greeting: int) -> Welcome:
        nothing = Ack(received=0, settled=0, limit_samples=0, limit_bytes=0)
        return Welcome(
            greeting=greeting,
            incarnation=self._incarnation,
            run=self._run,
            ack=self._ack(client) if client.role is Role.ROLLOUTER else nothing,
            max_sample_bytes=min(self._bus.max_sample_bytes, self._bus.max_queued_bytes),
            origin_version=self._origin_version,
            accounted=self._inbox.accounted,
            dropped=self._inbox.dropped,
            topics=[
                TopicValue(name=name, revision=retained.revision, value=retained.value)
                for name, retained in self._board.items()
            ],
        )

    def _note_disconnected(self, peer: bytes) -> None:
        client = self._clients.at(peer)
        if client is not None and client.role is Role.CONSOLE:
            self._note_gone(peer, LossReason.LEFT, 0.0)
            return
        if client is not None:
            log.warning("rollouter disconnected", name=client.name)
        self._carry_out(self._clients.disconnected(peer))

    def _note_gone(self, peer: bytes, reason: LossReason, silent_s: float) -> None:
        client = self._clients.at(peer)
        self._io.forget(peer)
        if client is not None:
            log.info("client gone", name=client.name, role=client.role.value, reason=reason.value, silent_s=round(silent_s, 1))
            if client is self._clients.rollouter:
                self._losses.add(LostPeer(name=client.name, reason=reason, silent_s=silent_s, epoch=client.epoch))
        self._carry_out(self._clients.left(peer))

    def _ask_to_greet(self, peer: bytes) -> None:
        self._io.send_control(peer, Reset(), key="reset")

    # ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ack(self, client: Client) -> Ack:
        position = self._inbox.position((client.name, client.epoch))
        return Ack(
            received=position.received,
            settled=position.settled,
            limit_samples=position.credit.samples,
            limit_bytes=position.credit.num_bytes,
        )

    def _send_ack(self) -> None:
        self._ack_scheduled = False
        client = self._clients.rollouter
        if client is not None and client.connected:
            self._io.send_control(client.peer, self._ack(client), key="ack")

    def _fail(self, failure: BusError) -> None:
        self._failure = self._failure or failure
        self._arrived.set()
        self._arrivals.pulse()
        self._board.close()
        self._losses.close()
