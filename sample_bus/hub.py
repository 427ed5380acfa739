"""The trainer's end of the bus: takes records from its producers, answers requests, keeps the topics.

A thin shell: `inbox` accounts for records, `clients` decides who is who, `answers` carries out requests, a carrier moves the
frames. Invariant: as `Consumer` and `ControlServer` say, whatever the clients do and however often they reconnect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import structlog

from configs.schema import BusSettings
from sample_bus import events
from sample_bus.answers import Answers
from sample_bus.carrier import FLUSH_S, Deliver, HubCarrier
from sample_bus.clients import Client, Clients, Take, Turn, Wait
from sample_bus.errors import BusError, PeerLost
from sample_bus.feed import Feed
from sample_bus.frames import (
    MAX_TEXT,
    Ack,
    Bye,
    Control,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Refused,
    Rejected,
    Reply,
    Request,
    Reset,
    TopicValue,
    Welcome,
    Withheld,
)
from sample_bus.inbox import Inbox, Place, Verdict
from sample_bus.messages import Message
from sample_bus.patience import patient
from sample_bus.peers import LossReason, LostPeer, Role
from sample_bus.position import BusPosition
from sample_bus.protocols import ConsumerStatistics, Gone, Handler, Lease, Leased, LeasedClosure
from sample_bus.quarantine import Quarantine, RejectedMessage
from sample_bus.sample import SampleId
from sample_bus.topics import TopicBoard, encode_body

log = structlog.get_logger()
M = TypeVar("M", bound=Message)


class BusHub:
    def __init__(
        self,
        bus: BusSettings,
        *,
        run: str,
        run_id: str,
        incarnation: str,
        quarantine: Quarantine,
        open_carrier: Callable[[Deliver], HubCarrier],
    ) -> None:
        """Listens from now on. Raises what `open_carrier` raises."""
        self._bus = bus
        self._run = run
        self._run_id = run_id
        self._incarnation = incarnation
        self._origin_version = 0
        self._quarantine = quarantine
        self._max_sample_bytes = min(bus.max_sample_bytes, bus.max_queued_bytes)
        self._inbox = Inbox(max_samples=bus.max_queued_samples, max_bytes=bus.max_queued_bytes)
        self._arrived = asyncio.Event()
        self._ack_scheduled = False
        self._clients = Clients()
        self._arrivals: Feed[str] = Feed()
        self._losses: Feed[LostPeer] = Feed()
        self._gone: Feed[Gone] = Feed()
        self._rejected = _rejected_before(quarantine)
        """Of each stream, by sequence number. A producer is told again whenever it opens the stream, since the process
        that was told may not have lived to act on it."""
        self._board = TopicBoard()
        self._own_topics: set[str] = set()
        self._answers = Answers()
        self._failure: BusError | None = None
        self._problem = ""
        """Why no client can be reached."""
        self._carrier = open_carrier(self._deliver)
        self._carrier.start()
        log.info("bus listens", address=self.address, run_id=run_id, incarnation=incarnation)

    async def close(self) -> None:
        """Say goodbye to all clients and free the address. Waits that are under way end with BusError."""
        for client in self._clients.connected:
            self._carrier.send(client.peer, Bye(reason="the trainer closed the bus"))
        self._fail(BusError("the bus is closed"))
        try:
            await self._answers.close()
        finally:
            await self._carrier.close(flush_s=FLUSH_S)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def lease(self) -> Lease:
        while (leased := self._inbox.lease()) is None:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        return leased

    def acknowledge(self, ids: Sequence[SampleId], *, dropped: bool = False) -> None:
        self._inbox.acknowledge(ids, dropped=dropped)
        if ids:
            self._schedule_acks()

    def position(self) -> BusPosition:
        return self._inbox.position()

    def seek(self, position: BusPosition) -> None:
        self._inbox.seek(position)
        for client in self._clients.rollouters:
            client.epoch = None
            self._carrier.close_streams(client.name)
            self._ask_to_greet(client.peer)

    def commit(self, position: BusPosition) -> None:
        for stream in self._inbox.commit(position):
            self._carrier.commit(position.of(stream.producer, stream.epoch))
        self._schedule_acks()

    def gone(self) -> AsyncIterator[Gone]:
        return self._gone.follow()

    def consumer_statistics(self) -> ConsumerStatistics:
        return self._inbox.statistics()

    def set_origin(self, origin_version: int, accounted: int = 0) -> None:
        self._origin_version = origin_version
        self._inbox.count_from(accounted)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return self._carrier.address

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def rollouter(self) -> str | None:
        return next((client.name for client in self._clients.rollouters), None)

    async def wait_rollouter(self, timeout_s: float) -> str:
        async for waited_s in patient(self._arrivals, timeout_s):
            if self._failure is not None:
                raise self._failure
            if self.rollouter is not None:
                return self.rollouter
            if waited_s is not None:
                log.info("waiting for a rollouter", address=self.address, waited_s=waited_s, deadline_s=timeout_s)
        raise PeerLost(f"no rollouter came to {self.address} within {timeout_s:g} s")

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

    def expect(self, names: Iterable[str]) -> None:
        self._answers.expect(names)

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, batch: list[events.Event]) -> None:
        now = time.time()
        missing: list[tuple[Place, int]] = []
        for event in batch:
            match event:
                case events.ArrivedSample():
                    self._take(event, Leased(id=event.id, sample=event.sample, nbytes=event.nbytes, received_at=now))
                case events.ArrivedClosure():
                    self._take(event, LeasedClosure(id=event.id, closed=event.closed, nbytes=event.nbytes, received_at=now))
                case events.Malformed():
                    self._reject(event)
                case events.Missing():
                    if self._inbox.lose(event.place, event.seq):
                        missing.append((event.place, event.seq))
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
                case events.Unreachable():
                    self._problem = event.problem
                    log.warning("the bus cannot be reached", address=self.address, problem=event.problem)
                case events.Connected():
                    self._problem = ""
                case _:
                    pass
        if missing:
            self._tell_gone(missing)
        if missing or any(
            isinstance(event, events.ArrivedSample | events.ArrivedClosure | events.Malformed) for event in batch
        ):
            self._send_acks()

    def _tell_gone(self, missing: Sequence[tuple[Place, int]]) -> None:
        """Records that the broker has lost, run by run."""
        runs: list[Gone] = []
        for (producer, epoch), seq in missing:
            last = runs[-1] if runs else None
            if last is not None and (last.producer, last.epoch, last.last) == (producer, epoch, seq):
                runs[-1] = replace(last, last=seq + 1, num_records=last.num_records + 1)
            else:
                runs.append(Gone(producer=producer, epoch=epoch, first=seq, last=seq + 1, num_records=1))
        for gone in runs:
            log.error(
                "records are gone: the broker has lost them",
                broker=self.address,
                producer=gone.producer,
                first=gone.first,
                last=gone.last - 1,
                num_records=gone.num_records,
            )
            self._gone.add(gone)
        for place, seq in missing:
            self._tell_producer(place, Rejected(seq=seq, error=f"{self.address} has lost it", lost=True))

    def _tell_producer(self, place: Place, rejected: Rejected) -> None:
        """Now, and whenever it opens the stream again."""
        self._rejected.setdefault(place, {})[rejected.seq] = rejected
        producer = self._clients.named(place[0])
        if producer is not None and producer.connected and producer.epoch == place[1]:
            self._carrier.send(producer.peer, rejected)

    def _take(self, event: events.ArrivedSample | events.ArrivedClosure, lease: Lease) -> None:
        """Account for a record; one from a socket must be of the stream that its sender opened."""
        if event.peer != events.STREAM:
            client = self._clients.at(event.peer)
            if client is None or client.role is not Role.ROLLOUTER or client.epoch is None:
                self._ask_to_greet(event.peer)
                return
            expected = SampleId(client.name, client.epoch, event.seq)
            if event.id != expected:
                error = f"id: got {event.id}, expected {expected}"
                self._reject(events.Malformed(peer=event.peer, seq=event.seq, error=error, frames=event.frames))
                return
        verdict = self._inbox.take(lease)
        if verdict is Verdict.TAKEN:
            self._arrived.set()
        elif verdict is not Verdict.DUPLICATE:
            log.warning("record not taken", producer=event.id.producer, seq=event.seq, reason=verdict.value)
            if event.peer != events.STREAM:
                self._ask_to_greet(event.peer)

    def _reject(self, event: events.Malformed) -> None:
        """Count and keep what did not decode; if it has a place in a stream, the stream goes on after it and its producer is
        told."""
        client = self._clients.at(event.peer)
        place = event.place
        if place is None and client is not None and client.epoch is not None:
            place = (client.name, client.epoch)
        if place is not None and event.seq is not None:
            verdict = self._inbox.skip(place, event.seq, event.nbytes)
            if verdict is not Verdict.TAKEN:
                return
            self._tell_producer(place, Rejected(seq=event.seq, error=event.error[:MAX_TEXT], lost=False))
        else:
            self._inbox.count_rejected()
        source = place[0] if place is not None else client.name if client is not None else f"unknown client {event.peer.hex()}"
        sample_id = SampleId(*place, event.seq) if place is not None and event.seq is not None else None
        path = self._quarantine.keep([bytes(frame) for frame in event.frames], event.error, source, sample_id=sample_id)
        tell = log.debug if path is None else log.warning  # one line for each that is kept: a flood does not fill the log too
        tell("message rejected", source=source, seq=event.seq, error=event.error, kept=str(path))

    def _reject_withheld(self, client: Client, message: Withheld) -> None:
        """A record that was kept when the bus carried more; as one that does not decode, but that nobody has its bytes."""
        if client.role is not Role.ROLLOUTER or client.epoch is None:
            self._ask_to_greet(client.peer)
            return
        error = (
            f"{message.nbytes} bytes, the bus carries at most {self._max_sample_bytes} "
            "(bus.max_sample_bytes, bus.max_queued_bytes): it was offered when that was more"
        )
        self._reject(events.Malformed(peer=client.peer, seq=message.seq, error=error, frames=()))
        self._schedule_acks()

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
            self._answers.answer((client.name, client.process), message, lambda reply: self._reply(client.process, reply))
        elif isinstance(message, Withheld):
            self._reject_withheld(client, message)
        elif isinstance(message, Open):
            self._open_stream(client, message)
        elif isinstance(message, Bye):
            self._note_gone(peer, LossReason.LEFT, 0.0)
        elif not isinstance(message, Heartbeat):
            log.warning("message of an unexpected kind", source=client.name, kind=type(message).__name__)

    def _spread(self, topic: str, value: bytes, source: Client | None) -> None:
        message = TopicValue(name=topic, revision=self._board.set(topic, value), value=value)
        for client in self._clients.connected:
            if client is not source:
                self._carrier.send(client.peer, message, key=f"topic {topic}")

    def _reply(self, process: int, reply: Reply) -> None:
        for client in self._clients.connected:
            if client.process == process:
                self._carrier.send(client.peer, reply)

    # ── clients that come and go ─────────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, decisions: Sequence[Take | Turn | Wait]) -> None:
        for decision in decisions:
            match decision:
                case Take():
                    self._welcome(decision)
                case Turn():
                    log.warning("client refused", name=decision.hello.name, reason=decision.reason)
                    self._carrier.send(decision.peer, Refused(greeting=decision.hello.greeting, reason=decision.reason))
                case Wait():
                    self._carrier.probe(decision.probe)

    def _welcome(self, take: Take) -> None:
        client, hello = take.client, take.hello
        for peer in take.gone:
            self._carrier.forget(peer)
        self._carrier.track(client.peer)
        if take.replaced is not None:
            log.warning("rollouter replaced", name=client.name)
            self._lose(take.replaced, LossReason.REPLACED, 0.0)
        welcome = Welcome(
            greeting=hello.greeting,
            incarnation=self._incarnation,
            run=self._run,
            run_id=self._run_id,
            max_sample_bytes=self._max_sample_bytes,
            topics=[
                TopicValue(name=name, revision=retained.revision, value=retained.value)
                for name, retained in self._board.items()
            ],
        )
        self._carrier.send(client.peer, welcome)
        log.info("client connected", name=client.name, role=client.role.value)

    def _open_stream(self, client: Client, message: Open) -> None:
        """A producer said where its stream stands: go on from where it stands here."""
        if client.role is not Role.ROLLOUTER:
            log.warning("stream refused", source=client.name, role=client.role.value)
            return
        place = (client.name, message.epoch)
        gone = self._inbox.open_stream(place, committed=message.committed)
        if gone is not None:
            log.error(
                "records are gone: their producer has freed them and no checkpoint here covers them",
                producer=gone.producer,
                first=gone.first,
                last=gone.last,
                num_records=gone.num_records,
            )
            self._gone.add(gone)
        client.epoch, client.next_seq = message.epoch, message.next_seq
        ack = self._ack(place)
        self._carrier.send(
            client.peer,
            Opened(
                greeting=message.greeting,
                ack=ack,
                origin_version=self._origin_version,
                accounted=self._inbox.accounted(place, message.next_seq),
                dropped=self._inbox.dropped,
            ),
        )
        for rejected in self._rejected.get(place, {}).values():
            self._carrier.send(client.peer, rejected)
        self._carrier.open_stream(client.name, message.epoch, ack.received)
        self._carrier.room(client.name, ack)
        self._arrivals.add(client.name)

    def _note_disconnected(self, peer: bytes) -> None:
        client = self._clients.at(peer)
        if client is not None and client.role is Role.CONSOLE:
            self._note_gone(peer, LossReason.LEFT, 0.0)
            return
        if client is not None and client.connected:
            log.warning("rollouter disconnected", name=client.name)
        self._carry_out(self._clients.disconnected(peer))

    def _note_gone(self, peer: bytes, reason: LossReason, silent_s: float) -> None:
        client = self._clients.at(peer)
        self._carrier.forget(peer)
        if client is not None:
            log.info("client gone", name=client.name, role=client.role.value, reason=reason.value, silent_s=round(silent_s, 1))
            if client is self._clients.named(client.name):
                self._inbox.leave(client.name)
                self._schedule_acks()
                self._lose(client, reason, silent_s)
        self._carry_out(self._clients.left(peer))

    def _lose(self, client: Client, reason: LossReason, silent_s: float) -> None:
        self._losses.add(
            LostPeer(name=client.name, reason=reason, silent_s=silent_s, epoch=client.epoch or 0, problem=self._problem)
        )

    def _ask_to_greet(self, peer: bytes) -> None:
        self._carrier.send(peer, Reset(), key="reset")

    # ── credit ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ack(self, place: Place) -> Ack:
        standing = self._inbox.standing(place)
        return Ack(
            received=standing.received,
            settled=standing.settled,
            committed=standing.committed,
            limit_samples=standing.credit.samples,
            room_bytes=standing.credit.room_bytes,
        )

    def _schedule_acks(self) -> None:
        """Tell all producers once what this turn of the loop settles."""
        if not self._ack_scheduled:
            self._ack_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_acks)

    def _send_acks(self) -> None:
        self._ack_scheduled = False
        for client in self._clients.rollouters:
            if client.epoch is not None:
                ack = self._ack((client.name, client.epoch))
                self._carrier.send(client.peer, ack, key="ack")
                self._carrier.room(client.name, ack)

    def _fail(self, failure: BusError) -> None:
        self._failure = self._failure or failure
        self._arrived.set()
        self._arrivals.pulse()
        self._board.close()
        self._losses.close()
        self._gone.close()


def _rejected_before(quarantine: Quarantine) -> dict[Place, dict[int, Rejected]]:
    """What earlier processes of the trainer rejected, as far as it was kept."""
    rejected: dict[Place, dict[int, Rejected]] = {}
    for kept in quarantine.kept():
        if isinstance(kept, RejectedMessage) and kept.id is not None:
            told = Rejected(seq=kept.id.seq, error=kept.error[:MAX_TEXT], lost=False)
            rejected.setdefault((kept.id.producer, kept.id.epoch), {})[kept.id.seq] = told
    return rejected
