"""A client's end of the bus: a rollouter's (offers records, publishes its state) or a console's (watches and asks).

A thin shell: `outbox` accounts for records, `asked` for requests, `trainer_watch` for the trainer's presence, a carrier moves
the frames. Invariant: `offer` returns only when the record survives the death of any one process. Connections may break and
trainers restart: the link greets again by itself, delivers what was not received, and says through `resumptions` when another
trainer took it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import structlog

from configs.schema import BusSettings
from sample_bus import events, frames, wire
from sample_bus.asked import Asked
from sample_bus.carrier import FLUSH_S, Deliver, LinkCarrier
from sample_bus.closed_seat import ClosedSeat
from sample_bus.credit import Credit
from sample_bus.errors import BusError, Ended, Refused, RunChanged, SampleTooLarge
from sample_bus.feed import Feed
from sample_bus.messages import EndOfRun, Message
from sample_bus.outbox import Offer, Outbox, Parts
from sample_bus.peers import LostPeer, PeerState, Role
from sample_bus.protocols import ProducerStatistics, Rejection, Resumption
from sample_bus.read_back import ReadsBack
from sample_bus.sample import Sample, SampleId
from sample_bus.store_watch import StoreWatch
from sample_bus.topics import TopicBoard, encode_body
from sample_bus.trainer_watch import TrainerWatch

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
END_TOPIC = "end"
KnownNext = Callable[[str, int], int]
"""(run id, epoch): number behind the last record of that stream that its producer knows to have stored. If the copies end
before it, a power cut took their end: the stream begins a new epoch, so that no number means two records."""


class BusLink:
    def __init__(
        self,
        bus: BusSettings,
        *,
        address: str,
        name: str,
        role: Role,
        open_carrier: Callable[[Deliver], LinkCarrier],
        known_next: KnownNext | None = None,
    ) -> None:
        """Starts to connect; returns at once. Raises what `open_carrier` raises."""
        self._known_next = known_next
        self._bus = bus
        self._address = address
        self._name = name
        self._role = role
        self._process = time.time_ns()
        self._watch = TrainerWatch(bus, address, self._end_waits)
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._asked = Asked()
        self._carrier = open_carrier(self._deliver)
        self._outbox = Outbox(name, self._carrier)
        self._store = StoreWatch(name)
        self._reads = ReadsBack(self._carrier)
        self._rejections: Feed[Rejection] = Feed()
        self._resumptions: Feed[Resumption] = Feed()
        self._greeting = 0
        self._awaits_welcome = False
        self._welcome: frames.Welcome | None = None
        self._stream_of = ""
        """The run whose stream is open."""
        self._told_next_seq = 0
        """What the trainer was told of the stream's end: what it accounts for reaches up to there."""
        self._settled = 0
        self._max_sample_bytes = bus.max_sample_bytes
        self._carrier.start()
        self._watch.expect()

    async def close(self) -> None:
        """Say goodbye. Offers and requests that wait end with BusError."""
        if self._watch.state is PeerState.CONNECTED:
            self._carrier.send(frames.Bye(reason=f"{self._name} closed the bus"))
        self._fail(BusError("the bus is closed"))
        self._store.close()
        await self._carrier.close(flush_s=FLUSH_S)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def offer(self, sample: Sample) -> SampleId:
        """As `Producer.offer`. The sample's arrays must not change until it returns.

        When it is cancelled or raises PeerLost the record may be in the stream or not; one that still waited for credit is
        withdrawn for certain.
        """
        self._may_offer()
        sample.validate()
        parts = wire.prepare(sample, self._name)
        return await self._put(parts, f"sample of rollout {sample.rollout_id}", f" ({sample.num_tokens} tokens)")

    async def close_seat(self, closed: ClosedSeat) -> SampleId:
        """As `Producer.close_seat`."""
        self._may_offer()
        closed.validate()
        return await self._put(wire.prepare_closed(closed, self._name), f"closed seat of rollout {closed.rollout_id}")

    async def stored(self, first: int = 0) -> AsyncIterator[tuple[SampleId, Sample | ClosedSeat]]:
        """As `Producer.stored`. Raises BusError while no stream is open, WireError for a copy that does not decode."""
        if not self._outbox.epoch:
            raise BusError(f"{self._name}: no stream is open: wait for a resumption first")
        last = self._outbox.num_stored
        async for frames_of_one in self._reads.read(max(first, self._outbox.committed), last):
            yield wire.decode(frames_of_one, max_bytes=wire.num_bytes(frames_of_one))

    def rejections(self) -> AsyncIterator[Rejection]:
        return self._rejections.follow()

    def producer_statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            offered=self._outbox.num_stored,
            acknowledged=self._settled,
            unsettled=max(0, self._outbox.next_seq - self._settled),
            bytes_sent=self._outbox.num_bytes,
            waiting=self._outbox.num_waiting,
            committed=self._outbox.committed,
            kept_bytes=self._outbox.kept_bytes,
            problem=self._store.problem,
        )

    def _may_offer(self) -> None:
        if self._role is not Role.ROLLOUTER:
            raise BusError(f"{self._name} is a {self._role}: only a rollouter offers samples")
        self._watch.check()
        if END_TOPIC in self._board:
            raise self._ended()

    async def _put(self, parts: Parts, what: str, size: str = "") -> SampleId:
        nbytes = wire.PREFIX_BYTES + wire.num_bytes(parts)
        if nbytes > self._max_sample_bytes:
            raise self._too_large(nbytes, f"{what}: ", size)
        offer = Offer(parts, nbytes, asyncio.get_running_loop().create_future())
        self._outbox.add(offer)
        try:
            return await offer.done
        except asyncio.CancelledError:
            self._outbox.withdraw(offer)
            raise

    def _too_large(self, nbytes: int, what: str = "", size: str = "") -> SampleTooLarge:
        return SampleTooLarge(
            f"{what}{nbytes} bytes{size}, the bus carries at most {self._max_sample_bytes} "
            "(bus.max_sample_bytes, bus.max_queued_bytes)"
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
                case events.Unreachable():
                    self._watch.unreachable(event.problem)
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
                case events.StreamOpened():
                    self._take_stream(event)
                case events.StreamFailed():
                    self._fail(BusError(f"{self._name}: its stream cannot be opened: {event.error}"))
                case events.Stored():
                    self._outbox.stored(event.upto)
                case events.StoreBlocked():
                    self._store.blocked(event.error)
                case events.StoreUnblocked():
                    self._store.unblocked()
                case events.ReadBack():
                    self._reads.take(event)
                case events.ArrivedSample() | events.ArrivedClosure():
                    log.warning("a record came from the trainer", seq=event.seq)

    def _take(self, message: frames.Control) -> None:
        match message:
            case frames.Ack():
                self._settled = max(self._settled, message.settled)
                self._outbox.advance(message.received, message.committed, _credit(message))
            case frames.Rejected():
                self._reject(message)
            case frames.TopicValue() if self._awaits_welcome and self._welcome is not None:
                self._welcome.topics.append(message)  # newer than what the welcome brought, and taken with it
            case frames.TopicValue():
                if message.name not in self._own_topics and message.revision > self._board.revision(message.name):
                    self._take_topic(message)
            case frames.Reply():
                self._asked.take(message)
            case frames.Welcome():
                if message.greeting == self._greeting:
                    self._take_welcome(message)
            case frames.Opened():
                if message.greeting == self._greeting and self._welcome is not None:
                    self._take_opened(message, self._welcome)
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
        """Say who we are; nothing is delivered until the trainer has welcomed us and taken the stream up."""
        self._greeting += 1
        self._awaits_welcome = True
        self._welcome = None
        self._outbox.pause()
        hello = frames.Hello(
            protocol=frames.PROTOCOL,
            greeting=self._greeting,
            name=self._name,
            role=self._role.value,
            process=self._process,
        )
        self._carrier.send(hello, key="hello")

    def _greet_again(self) -> None:
        """The trainer does not know us, or not any more; unless our greeting is on its way already."""
        if not self._awaits_welcome:
            self._greet()

    def _take_welcome(self, welcome: frames.Welcome) -> None:
        """A trainer takes this client: the first, the same one after a broken connection, or another one."""
        self._welcome = welcome
        self._carrier.track()
        self._max_sample_bytes = min(self._bus.max_sample_bytes, welcome.max_sample_bytes)
        if self._role is not Role.ROLLOUTER:
            self._begin(welcome, Resumption(origin_version=0, accounted=0, incarnation=welcome.incarnation))
        elif self._stream_of == welcome.run_id:
            self._send_open()
        else:
            if self._stream_of:
                log.warning("the trainer began another run", before=self._stream_of, now=welcome.run_id)
                self._outbox.fail_all(RunChanged(f"the trainer at {self._address} began another run ({welcome.run_id})"))
            self._stream_of = welcome.run_id
            self._settled = 0
            self._carrier.open_stream(welcome.run_id)

    def _take_stream(self, opened: events.StreamOpened) -> None:
        """The stream as it is kept here: the trainer must say where it believes it stands."""
        if opened.run_id != self._stream_of:
            return
        self._outbox.open(opened.epoch, opened.committed, opened.sizes)
        known = 0 if self._known_next is None else self._known_next(opened.run_id, opened.epoch)
        if known > self._outbox.next_seq:
            log.error("records lost: their copies are gone", name=self._name, known=known, kept=self._outbox.next_seq)
            self._carrier.open_stream(opened.run_id, renew=True)
            return
        log.info(
            "stream opened",
            name=self._name,
            run_id=opened.run_id,
            epoch=opened.epoch,
            kept=len(opened.sizes),
            next_seq=self._outbox.next_seq,
        )
        self._send_open()

    def _send_open(self) -> None:
        if self._outbox.epoch:
            self._told_next_seq = self._outbox.next_seq
            message = frames.Open(
                greeting=self._greeting,
                epoch=self._outbox.epoch,
                committed=self._outbox.committed,
                next_seq=self._told_next_seq,
            )
            self._carrier.send(message, key="open")

    def _take_opened(self, opened: frames.Opened, welcome: frames.Welcome) -> None:
        if opened.ack.received > self._outbox.next_seq:
            log.error(
                "records lost: the trainer knows more than the spool holds",
                name=self._name,
                trainer=opened.ack.received,
                spool=self._outbox.next_seq,
            )
            self._outbox.fail_all(RunChanged(f"{self._name}: its copies of records are older than the trainer's"))
            self._carrier.open_stream(welcome.run_id, renew=True)
            return
        self._settled = opened.ack.settled
        resumption = Resumption(
            origin_version=opened.origin_version,
            accounted=opened.accounted,
            incarnation=welcome.incarnation,
            dropped=opened.dropped,
            run_id=welcome.run_id,
            epoch=self._outbox.epoch,
            next_seq=self._told_next_seq,
        )
        self._begin(welcome, resumption)
        self._carrier.bound(welcome.max_sample_bytes)
        self._outbox.bound(welcome.max_sample_bytes, self._too_large)
        self._outbox.resume(opened.ack.received, opened.ack.committed, _credit(opened.ack))

    def _begin(self, welcome: frames.Welcome, resumption: Resumption) -> None:
        """Speak with that trainer from now on."""
        before = self._resumptions.newest
        anew = before is None or before.incarnation != welcome.incarnation or before.epoch != resumption.epoch
        self._awaits_welcome = False
        if before is None or before.incarnation != welcome.incarnation:
            self._board.clear(keep=frozenset(self._own_topics))
            self._asked.restarted()
        for topic in welcome.topics:
            if topic.name not in self._own_topics and topic.revision > self._board.revision(topic.name):
                self._take_topic(topic)
        self._watch.connected()
        for name in self._own_topics:
            self._send_topic(name)
        if anew:
            log.info("trainer connected", run=welcome.run, incarnation=welcome.incarnation, accounted=resumption.accounted)
            self._resumptions.add(resumption)
        self._asked.send_again(self._send_request)

    def _reject(self, rejected: frames.Rejected) -> None:
        log.error("record rejected by the trainer", name=self._name, seq=rejected.seq, error=rejected.error, lost=rejected.lost)
        sample_id = SampleId(self._name, self._outbox.epoch, rejected.seq)
        self._rejections.add(Rejection(id=sample_id, error=rejected.error, lost=rejected.lost))

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
        self._rejections.close()
        self._reads.fail(failure)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_topic(self, name: str) -> None:
        topic = self._board.retained(name)
        message = frames.TopicValue(name=name, revision=topic.revision, value=topic.value)
        self._carrier.send(message, key=f"topic {name}")

    def _send_request(self, request: frames.Request) -> None:
        self._carrier.send(request)


def _credit(ack: frames.Ack) -> Credit:
    return Credit(samples=ack.limit_samples, room_bytes=ack.room_bytes)
