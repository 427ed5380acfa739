"""A client's end of the bus over ZeroMQ: a rollouter's (offers samples, publishes its state) or a console's (watches and asks).

A thin shell: `outbox` accounts for samples, `asked` for requests, `trainer_watch` for the trainer's presence, `zmq_io` owns the
socket. Invariant: `offer` returns only when the trainer's end holds the sample. Connections may break and trainers restart: the
link greets again by itself, sends what was not received, and says through `resumptions` when another trainer took it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import structlog
import zmq

from configs.schema import BusSettings
from sample_bus import events, frames, wire
from sample_bus.asked import Asked
from sample_bus.credit import Credit
from sample_bus.errors import BusError, Ended, Refused, SampleTooLarge
from sample_bus.events import SERVER
from sample_bus.feed import Feed
from sample_bus.messages import EndOfRun, Message
from sample_bus.outbox import Offer, Outbox, Parts
from sample_bus.peers import LostPeer, PeerState, Role
from sample_bus.protocols import ProducerStatistics, Resumption
from sample_bus.sample import Sample, SampleId
from sample_bus.topics import TopicBoard, encode_body
from sample_bus.trainer_watch import TrainerWatch
from sample_bus.zmq_io import FLUSH_S, SocketThread, set_options

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
END_TOPIC = "end"


class ZmqLink:
    def __init__(self, bus: BusSettings, *, address: str, name: str, role: Role) -> None:
        self._bus = bus
        self._address = address
        self._name = name
        self._role = role
        self._epoch = time.time_ns()
        self._watch = TrainerWatch(bus, address, self._end_waits)
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._asked = Asked()
        self._outbox = Outbox(name, self._epoch, self._send_sample)
        self._resumptions: Feed[Resumption] = Feed()
        self._greeting = 0
        self._awaits_welcome = False
        self._settled = 0
        self._max_sample_bytes = bus.max_sample_bytes
        self._io: SocketThread

    def open(self) -> None:
        """Start to connect; returns at once. Raises BusError for what is no address."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        set_options(socket, self._bus, self._address)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        thread = SocketThread(context, socket, self._bus, name=self._name, deliver=self._deliver)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            thread.discard()
            raise BusError(f"{self._address}: not an address of a bus: {error}") from error
        self._io = thread
        self._io.start()
        self._watch.expect()

    async def close(self) -> None:
        """Say goodbye. Offers and requests that wait end with BusError."""
        if self._watch.state is PeerState.CONNECTED:
            self._io.send_control(SERVER, frames.Bye(reason=f"{self._name} closed the bus"))
        self._fail(BusError("the bus is closed"))
        await self._io.close(flush_s=FLUSH_S)

    # ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def offer(self, sample: Sample) -> SampleId:
        """As `Producer.offer`. The sample's arrays must not change until it returns.

        When it is cancelled or raises PeerLost the trainer may hold the sample or not; a sample that still waited for credit is
        withdrawn for certain.
        """
        if self._role is not Role.ROLLOUTER:
            raise BusError(f"{self._name} is a {self._role}: only a rollouter offers samples")
        self._watch.check()
        if END_TOPIC in self._board:
            raise self._ended()
        sample.validate()
        parts = wire.prepare(sample, self._name)
        nbytes = wire.PREFIX_BYTES + wire.num_bytes(parts)
        if nbytes > self._max_sample_bytes:
            raise SampleTooLarge(
                f"sample of rollout {sample.rollout_id}: {nbytes} bytes ({sample.num_tokens} tokens), "
                f"the bus carries at most {self._max_sample_bytes} (bus.max_sample_bytes, bus.max_queued_bytes)"
            )
        offer = Offer(parts, nbytes, asyncio.get_running_loop().create_future())
        self._outbox.add(offer)
        try:
            return await offer.done
        except asyncio.CancelledError:
            self._outbox.withdraw(offer)
            raise

    def producer_statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            offered=self._outbox.first_unreceived,
            acknowledged=self._settled,
            unsettled=self._outbox.next_seq - self._settled,
            bytes_sent=self._outbox.num_bytes,
            waiting=self._outbox.num_waiting,
        )

    # ── the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def peer_state(self) -> PeerState:
        return self._watch.state

    @property
    def resumption(self) -> Resumption | None:
        return self._resumptions.newest

    def resumptions(self) -> AsyncIterator[Resumption]:
        return self._resumptions.follow(from_newest=True)

    async def wait_connected(self, timeout_s: float) -> None:
        await self._watch.wait_connected(timeout_s)

    async def wait_lost(self) -> LostPeer:
        return await self._watch.wait_lost()

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, topic: str, kind: type[M]) -> M | None:
        return self._board.get(topic, kind)

    def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        return self._board.watch(topic, kind)

    async def publish(self, topic: str, value: Message) -> None:
        """As `Control.publish`; while the trainer is away the newest value is kept for it."""
        if self._role is not Role.ROLLOUTER:
            raise BusError(f"{self._name} is a {self._role}: only the daemons publish topics")
        self._own_topics.add(topic)
        self._board.set(topic, encode_body(value))
        if self._watch.state is PeerState.CONNECTED:
            self._send_topic(topic)

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        self._watch.check()
        return await self._asked.ask(
            name,
            body,
            reply,
            timeout_s=timeout_s or self._bus.request_timeout_s,
            send=self._send_request if self._watch.state is PeerState.CONNECTED else None,
            state=lambda: self._watch.state.value,
        )

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, batch: list[events.Event]) -> None:
        for event in batch:
            match event:
                case events.Arrived():
                    self._take(event.message)
                case events.Connected():
                    self._greet()
                case events.Disconnected():
                    self._pause(PeerState.DISCONNECTED)
                case events.Silent():
                    self._outbox.pause()
                    self._watch.silent(event.silent_s)
                case events.HeardAgain():
                    self._greet_again()
                case events.Malformed():
                    log.warning("message from the trainer rejected", error=event.error)
                case events.Crashed():
                    self._fail(BusError(f"the bus failed: {event.error}"))
                case events.ArrivedSample():
                    log.warning("a sample came from the trainer", seq=event.seq)

    def _take(self, message: frames.Control) -> None:
        match message:
            case frames.Ack():
                self._settled = max(self._settled, message.settled)
                self._outbox.advance(message.received, _credit(message))
            case frames.TopicValue():
                if message.name not in self._own_topics and message.revision > self._board.revision(message.name):
                    self._take_topic(message)
            case frames.Reply():
                self._asked.take(message)
            case frames.Welcome():
                if message.greeting == self._greeting:
                    self._begin(message)
            case frames.Reset():
                self._greet_again()
            case frames.Refused():
                if message.greeting == self._greeting:
                    error = Refused(f"the trainer at {self._address} refuses {self._name!r}: {message.reason}")
                    self._fail(error, PeerState.REFUSED)
            case frames.Bye():
                self._pause(PeerState.LEFT)
            case frames.Heartbeat():
                pass
            case _:
                log.warning("message of an unexpected kind from the trainer", kind=type(message).__name__)

    def _pause(self, state: PeerState) -> None:
        self._awaits_welcome = False
        self._outbox.pause()
        self._watch.away(state)

    def _greet(self) -> None:
        """Say who we are and where our stream stands; nothing is sent until the trainer welcomes us."""
        self._greeting += 1
        self._awaits_welcome = True
        self._outbox.pause()
        hello = frames.Hello(
            protocol=frames.PROTOCOL,
            greeting=self._greeting,
            name=self._name,
            role=self._role.value,
            epoch=self._epoch,
            first_unreceived=self._outbox.first_unreceived,
            bytes_before=self._outbox.bytes_before_unreceived,
        )
        self._io.send_control(SERVER, hello, key="hello")

    def _greet_again(self) -> None:
        """The trainer does not know us, or not any more; unless our greeting is on its way already."""
        if not self._awaits_welcome:
            self._greet()

    def _begin(self, welcome: frames.Welcome) -> None:
        """A trainer took this client: the first, the same one after a broken connection, or another one."""
        before = self._resumptions.newest
        anew = before is None or before.incarnation != welcome.incarnation
        self._awaits_welcome = False
        self._io.track(SERVER)
        self._max_sample_bytes = min(self._bus.max_sample_bytes, welcome.max_sample_bytes)
        if anew:
            self._board.clear(keep=frozenset(self._own_topics))
            self._asked.restarted()
            self._settled = welcome.ack.settled
        for topic in welcome.topics:
            if topic.name not in self._own_topics and topic.revision > self._board.revision(topic.name):
                self._take_topic(topic)
        self._watch.connected()
        for name in self._own_topics:
            self._send_topic(name)
        if anew:
            log.info("trainer connected", run=welcome.run, incarnation=welcome.incarnation, accounted=welcome.accounted)
            self._resumptions.add(
                Resumption(
                    origin_version=welcome.origin_version,
                    accounted=welcome.accounted,
                    incarnation=welcome.incarnation,
                    dropped=welcome.dropped,
                )
            )
        self._outbox.resume(welcome.ack.received, _credit(welcome.ack))
        self._asked.send_again(self._send_request)

    def _take_topic(self, topic: frames.TopicValue) -> None:
        self._board.set(topic.name, topic.value, topic.revision)
        if topic.name == END_TOPIC:
            self._outbox.fail(self._ended())

    def _ended(self) -> Ended:
        end = self._board.get(END_TOPIC, EndOfRun)
        return Ended(f"the run is over: {end.reason} {end.message}".rstrip() if end else "the run is over")

    def _end_waits(self, error: BusError) -> None:
        self._outbox.fail(error)
        self._asked.fail(str(error))

    def _fail(self, failure: BusError, state: PeerState | None = None) -> None:
        self._watch.fail(failure, state)
        self._board.close()
        self._resumptions.close()

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_sample(self, seq: int, parts: Parts) -> None:
        self._io.send(SERVER, [frames.encode_control(frames.Data(seq=seq)), *parts])

    def _send_topic(self, name: str) -> None:
        topic = self._board.retained(name)
        message = frames.TopicValue(name=name, revision=topic.revision, value=topic.value)
        self._io.send_control(SERVER, message, key=f"topic {name}")

    def _send_request(self, request: frames.Request) -> None:
        self._io.send_control(SERVER, request)


def _credit(ack: frames.Ack) -> Credit:
    return Credit(samples=ack.limit_samples, num_bytes=ack.limit_bytes)
