"""A client's end of the bus over ZeroMQ: a rollouter's (offers samples, publishes its state) or a console's (watches and asks).

Invariant: `offer` returns only when the trainer's end holds the sample. Connections may break and trainers restart: the link
greets again by itself, sends what was not received, and says through `resumptions` when it is another trainer that took it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import structlog
import zmq

from configs.schema import BusSettings
from sample_bus import wire
from sample_bus.asked import Asked
from sample_bus.credit import Credit
from sample_bus.errors import BusError, Ended, PeerLost, SampleTooLarge
from sample_bus.errors import Refused as RefusedError
from sample_bus.feed import Feed
from sample_bus.frames import (
    PROTOCOL,
    Ack,
    Bye,
    Control,
    Data,
    Heartbeat,
    Hello,
    Refused,
    Reply,
    Reset,
    TopicValue,
    Welcome,
    encode_control,
)
from sample_bus.messages import EndOfRun, Message
from sample_bus.outbox import Offer, Outbox, Parts
from sample_bus.peers import LossReason, LostPeer, PeerState, Role
from sample_bus.protocols import ProducerStatistics, Resumption
from sample_bus.sample import Sample, SampleId
from sample_bus.topics import TopicBoard, encode_body
from sample_bus.zmq_io import (
    HIGH_WATER_MARK,
    SERVER,
    Arrived,
    Connected,
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
END_TOPIC = "end"


class ZmqLink:
    def __init__(self, bus: BusSettings, *, address: str, name: str, role: Role) -> None:
        self._bus = bus
        self._address = address
        self._name = name
        self._role = role
        self._epoch = time.time_ns()
        self._state = PeerState.CONNECTING
        self._states: Feed[PeerState] = Feed()
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._asked = Asked()
        self._outbox = Outbox(name, self._epoch, self._send_sample)
        self._resumptions: Feed[Resumption] = Feed()
        self._greeting = 0
        self._greeted = True
        self._settled = 0
        self._max_sample_bytes = bus.max_sample_bytes
        self._lost: LostPeer | None = None
        self._failure: BusError | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._io: SocketThread

    def open(self) -> None:
        """Start to connect; returns at once."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._io = SocketThread(
            context,
            socket,
            name=self._name,
            deliver=self._take,
            heartbeat_interval_s=self._bus.heartbeat_interval_s,
            heartbeat_timeout_s=self._bus.heartbeat_timeout_s,
            max_sample_bytes=self._bus.max_sample_bytes,
        )
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            raise BusError(f"{self._address}: not an address of a bus: {error}") from error
        self._io.start()
        self._expect_trainer()

    async def close(self) -> None:
        """Say goodbye. Offers and requests that wait end with BusError."""
        if self._state is PeerState.CONNECTED:
            self._io.send_control(SERVER, Bye(reason=f"{self._name} closed the bus"))
        self._fail(BusError("the bus is closed"))
        await self._io.close(flush_s=1.0)

    # ── samples ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def offer(self, sample: Sample) -> SampleId:
        """As `Producer.offer`. The sample's arrays must not change until it returns.

        When it is cancelled or raises PeerLost the trainer may hold the sample or not; a sample that still waited for credit is
        withdrawn for certain.
        """
        if self._role is not Role.ROLLOUTER:
            raise BusError(f"{self._name} is a {self._role}: only a rollouter offers samples")
        self._check_usable()
        sample.validate()
        parts = wire.prepare(sample, self._name)
        nbytes = wire.PREFIX_BYTES + wire.num_bytes(parts)
        if nbytes > self._max_sample_bytes:
            raise SampleTooLarge(
                f"sample of rollout {sample.rollout_id}: {nbytes} bytes ({sample.num_tokens} tokens), "
                f"the bus carries at most {self._max_sample_bytes} (bus.max_sample_bytes, bus.max_queued_bytes)"
            )
        offer = Offer(parts, asyncio.get_running_loop().create_future())
        self._outbox.add(offer)
        try:
            return await offer.done
        except asyncio.CancelledError:
            self._outbox.withdraw(offer)
            raise

    def producer_statistics(self) -> ProducerStatistics:
        received = self._outbox.first_unreceived
        return ProducerStatistics(
            offered=received,
            acknowledged=self._settled,
            unsettled=self._outbox.next_seq - self._settled,
            bytes_sent=self._outbox.num_bytes,
            waiting=self._outbox.num_waiting,
        )

    # ── the trainer ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def peer_state(self) -> PeerState:
        return self._state

    @property
    def resumption(self) -> Resumption | None:
        return self._resumptions.newest

    def resumptions(self) -> AsyncIterator[Resumption]:
        return self._resumptions.follow(from_newest=True)

    async def wait_connected(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while self._state is not PeerState.CONNECTED:
            if self._failure is not None:
                raise self._failure
            waited = loop.time() - started
            if waited >= timeout_s:
                raise PeerLost(f"no trainer answered at {self._address} within {timeout_s:g} s ({self._state})")
            try:
                async with asyncio.timeout(min(NOTICE_S, timeout_s - waited)):
                    await self._states.wait_next()
            except TimeoutError:
                waited_s = round(loop.time() - started, 1)
                log.info(
                    "waiting for the trainer",
                    address=self._address,
                    state=self._state.value,
                    waited_s=waited_s,
                    deadline_s=timeout_s,
                )

    async def wait_lost(self) -> LostPeer:
        while self._lost is None:
            if self._failure is not None:
                raise self._failure
            await self._states.wait_next()
        return self._lost

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, topic: str, kind: type[M]) -> M | None:
        return self._board.get(topic, kind)

    def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        return self._board.watch(topic, kind)

    async def publish(self, topic: str, value: Message) -> None:
        if self._role is not Role.ROLLOUTER:
            raise BusError(f"{self._name} is a {self._role}: only the daemons publish topics")
        if self._failure is not None:
            raise self._failure
        self._own_topics.add(topic)
        self._board.set(topic, encode_body(value))
        if self._state is PeerState.CONNECTED:
            self._send_topic(topic)

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        if self._failure is not None:
            raise self._failure
        return await self._asked.ask(
            name,
            body,
            reply,
            timeout_s=timeout_s or self._bus.request_timeout_s,
            send=self._send_request if self._state is PeerState.CONNECTED else None,
            state=lambda: self._state.value,
        )

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Arrived():
                    self._take_control(event.message)
                case Connected():
                    self._greet()
                case Disconnected():
                    self._note_disconnected(PeerState.DISCONNECTED)
                case Silent():
                    self._note_lost(event.silent_s)
                case HeardAgain():
                    self._lost = None
                    if not self._greeted:
                        self._greet()
                case Malformed():
                    log.warning("message from the trainer rejected", error=event.error)
                case Crashed():
                    self._fail(BusError(f"the bus failed: {event.error}"))

    def _take_control(self, message: Control) -> None:
        match message:
            case Ack():
                self._settled = max(self._settled, message.settled)
                self._outbox.advance(message.received, Credit(samples=message.limit_samples, num_bytes=message.limit_bytes))
            case TopicValue():
                if message.revision > self._board.revision(message.name):
                    self._take_topic(message.name, message.value, message.revision)
            case Reply():
                self._asked.take(message)
            case Welcome():
                if message.greeting == self._greeting:
                    self._begin(message)
            case Reset():
                self._greet()
            case Refused():
                if message.greeting == self._greeting:
                    self._set_state(PeerState.REFUSED)
                    self._fail(RefusedError(f"the trainer at {self._address} refuses {self._name!r}: {message.reason}"))
            case Bye():
                log.info("trainer left", reason=message.reason)
                self._note_disconnected(PeerState.LEFT)
            case Heartbeat():
                pass
            case _:
                log.warning("message of an unexpected kind from the trainer", kind=type(message).__name__)

    def _greet(self) -> None:
        self._greeting += 1
        self._greeted = True
        self._outbox.pause()
        hello = Hello(
            protocol=PROTOCOL,
            greeting=self._greeting,
            name=self._name,
            role=self._role.value,
            epoch=self._epoch,
            first_unreceived=self._outbox.first_unreceived,
            bytes_before=self._outbox.bytes_before_unreceived,
        )
        self._io.send_control(SERVER, hello, key="hello")

    def _begin(self, welcome: Welcome) -> None:
        """A trainer took this client: the first, the same after a broken connection, or another one."""
        before = self._resumptions.newest
        anew = before is None or before.incarnation != welcome.incarnation
        self._io.track(SERVER)
        self._max_sample_bytes = min(self._bus.max_sample_bytes, welcome.max_sample_bytes)
        if anew:
            self._board.clear(keep=frozenset(self._own_topics))
            self._asked.restarted()
            self._settled = welcome.settled
        for name, revision, value in welcome.topics:
            if name not in self._own_topics and (anew or revision > self._board.revision(name)):
                self._take_topic(name, value, revision)
        self._set_state(PeerState.CONNECTED)
        for topic in self._own_topics:
            self._send_topic(topic)
        if anew:
            self._resumptions.add(
                Resumption(
                    origin_version=welcome.origin_version,
                    accounted=welcome.accounted,
                    incarnation=welcome.incarnation,
                    dropped=welcome.dropped,
                )
            )
            log.info("trainer connected", run=welcome.run, incarnation=welcome.incarnation, accounted=welcome.accounted)
        self._outbox.resume(welcome.received, Credit(samples=welcome.limit_samples, num_bytes=welcome.limit_bytes))
        self._asked.send_again(self._send_request)

    def _take_topic(self, name: str, value: bytes, revision: int) -> None:
        self._board.set(name, value, revision)
        if name == END_TOPIC:
            self._outbox.fail(self._ended())

    def _ended(self) -> Ended:
        end = self._board.get(END_TOPIC, EndOfRun)
        return Ended(f"the run is over: {end.reason} {end.message}".rstrip() if end else "the run is over")

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _set_state(self, state: PeerState) -> None:
        self._state = state
        if state is PeerState.CONNECTED:
            self._lost = None
            if self._give_up is not None:
                self._give_up.cancel()
                self._give_up = None
        self._states.pulse()

    def _note_disconnected(self, state: PeerState) -> None:
        self._greeted = False
        self._outbox.pause()
        if self._state is PeerState.CONNECTED or state is PeerState.LEFT:
            log.warning("trainer disconnected", address=self._address, state=state.value)
            self._set_state(state)
            self._expect_trainer()

    def _note_lost(self, silent_s: float) -> None:
        self._greeted = False
        self._outbox.pause()
        self._lost = LostPeer(name="trainer", reason=LossReason.SILENT, silent_s=silent_s)
        log.warning("trainer lost", address=self._address, silent_s=round(silent_s, 1), on_lost=self._bus.on_lost)
        self._set_state(PeerState.LOST)
        if self._bus.on_lost == "fail":
            self._end_waits(PeerLost(f"the trainer at {self._address} has been silent for {silent_s:.1f} s"))
        self._expect_trainer()

    def _expect_trainer(self) -> None:
        """From now on the trainer has `connect_timeout_s` to appear, or offers fail."""
        if self._give_up is None:
            self._give_up = asyncio.get_running_loop().call_later(self._bus.connect_timeout_s, self._despair)

    def _despair(self) -> None:
        self._give_up = None
        self._lost = self._lost or LostPeer(name="trainer", reason=LossReason.SILENT, silent_s=self._bus.connect_timeout_s)
        self._set_state(PeerState.LOST)
        self._end_waits(
            PeerLost(f"no trainer at {self._address} for {self._bus.connect_timeout_s:g} s (bus.connect_timeout_s)")
        )

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if END_TOPIC in self._board:
            raise self._ended()
        if self._state is PeerState.LOST and (self._bus.on_lost == "fail" or self._give_up is None):
            raise PeerLost(f"the trainer at {self._address} is lost")

    def _end_waits(self, error: BusError) -> None:
        self._outbox.fail(error)
        self._asked.fail(str(error))

    def _fail(self, failure: BusError) -> None:
        self._failure = self._failure or failure
        if self._give_up is not None:
            self._give_up.cancel()
        self._outbox.fail(self._failure)
        self._asked.fail(str(self._failure))
        self._states.pulse()
        self._board.close()
        self._resumptions.close()

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_sample(self, seq: int, frames: Parts) -> None:
        self._io.send(SERVER, [encode_control(Data(seq=seq)), *frames])

    def _send_topic(self, topic: str) -> None:
        retained = self._board.retained(topic)
        self._io.send_control(
            SERVER, TopicValue(name=topic, revision=retained.revision, value=retained.value), key=f"topic {topic}"
        )

    def _send_request(self, request: Control) -> None:
        self._io.send_control(SERVER, request)
