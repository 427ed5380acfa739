"""The `collective` transport: one broadcast per bucket from the sender to all receivers of a cohort, by gloo or NCCL.

Invariant: a transfer has a process group of its own, so a member that died or joined needs nothing but the next transfer.
Asking, confirming and giving up go over the same sessions as those of `tcp`, which notice a member that died; its loss ends the
group for all, by name. Two buckets are out at most. Nothing is encrypted.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync import tcp_messages
from weight_sync.channel import Bucket, BucketKind, StreamEnd
from weight_sync.collective_group import Broadcast, Group, Rendezvous, choose_backend, connect_store, own_device, route_to
from weight_sync.errors import PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.tcp_address import TOKEN_BYTES, NetAddress, advertised_host, bracketed
from weight_sync.tcp_link import Link
from weight_sync.tcp_messages import Done, Welcome
from weight_sync.tcp_sessions import Session, Sessions
from weight_sync.transport import Cut, Incoming, StageRequest, Terms, TransportName

log = structlog.get_logger()

NUM_LANES = 2
_JOIN_S = 5.0
_BLAME_S = 1.0
_PREFIX = struct.Struct("<4sBBIQQ")
_PREFIX_BYTES = 64
_MAGIC = b"HRC1"
_NOTHING = 0
"""Kind of a broadcast that carries no bucket: there were none."""


class _Lane:
    """Memory of one bucket: where it is filled or read, and where the backend wants it."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(_PREFIX_BYTES + bucket_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.wire = torch.empty_like(self.host, device=device) if on_gpu else self.host
        self.bytes = self.host.numpy()
        self.work: Broadcast | None = None

    def to_wire(self) -> None:
        if self.wire is not self.host:
            self.wire.copy_(self.host)

    def from_wire(self) -> None:
        if self.wire is not self.host:
            self.host.copy_(self.wire)


@dataclass(slots=True)
class _Cohort:
    """Receivers' workers that wait for one version."""

    due: float
    sessions: list[Session] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.sessions) >= max(session.hello.request.cohort for session in self.sessions)


class CollectiveListener:
    """Takes in cohorts; a `Listener`. A cohort begins when it is complete, or without those who let the deadline pass."""

    def __init__(self, settings: WeightSyncSettings, *, terms: Terms) -> None:
        self._settings = settings
        self._terms = terms
        self._host = settings.listen_host.strip("[]")
        self._port = settings.listen_port
        self._advertised = advertised_host(self._host, settings.advertised_host)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._on_transfer: Callable[[Incoming], None] | None = None
        self._cohorts: dict[int, _Cohort] = {}
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._sessions = Sessions(
            token=self._token,
            handshake_timeout_s=settings.connect_timeout_s,
            num_io_threads=1,
            on_session=self._admit,
        )

    @property
    def address(self) -> str:
        return str(self._net_address())

    def _net_address(self) -> NetAddress:
        return NetAddress(scheme=TransportName.COLLECTIVE, host=self._advertised, port=self._port, token=self._token)

    def start(self, on_transfer: Callable[[Incoming], None]) -> None:
        self._on_transfer = on_transfer
        try:
            self._port = self._sessions.bind(self._host, self._port, secret_key=b"")
            self._sessions.start()
        except BaseException:
            self._sessions.close()
            raise
        log.info("weights listen", bound=f"{bracketed(self._host)}:{self._port}", advertised=self._net_address().shown)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            threads = tuple(self._threads)
        self._sessions.close()
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _admit(self, session: Session) -> None:
        version = session.hello.request.policy_version
        with self._changed:
            cohort = self._cohorts.get(version)
            if cohort is None:
                cohort = _Cohort(due=time.monotonic() + self._settings.connect_timeout_s)
                thread = threading.Thread(target=self._serve, args=(version, cohort), name="weights-collective", daemon=True)
                thread.start()  # waits for this lock, so it finds its cohort
                self._threads.add(thread)
                self._cohorts[version] = cohort
            cohort.sessions.append(session)
            self._changed.notify_all()
        session.watch(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _gather(self, version: int, cohort: _Cohort) -> list[Session]:
        """Those who came in time and are still there; nobody joins this cohort any more."""

        def is_ready() -> bool:
            for session in cohort.sessions:
                if session.error is not None:
                    session.close()
            cohort.sessions = [session for session in cohort.sessions if session.error is None]
            return self._is_closing or not cohort.sessions or cohort.is_complete

        with self._changed:
            self._changed.wait_for(is_ready, max(0.0, cohort.due - time.monotonic()))
            del self._cohorts[version]
            expected = max((session.hello.request.cohort for session in cohort.sessions), default=0)
            if len(cohort.sessions) < expected:
                log.warning("collective begins without some", policy_version=version, came=len(cohort.sessions), of=expected)
            return cohort.sessions

    def _serve(self, version: int, cohort: _Cohort) -> None:
        assert self._on_transfer is not None
        sessions: list[Session] = []
        try:
            sessions = self._gather(version, cohort)
            if sessions and not self._is_closing:
                self._on_transfer(CollectiveIncoming(sessions, self._settings, self._terms, self._host, self._advertised))
        finally:
            for session in sessions:
                session.close()
            with self._changed:
                self._threads.discard(threading.current_thread())


class CollectiveIncoming:
    """The transfer to a cohort; an `Incoming`."""

    def __init__(self, sessions: list[Session], settings: WeightSyncSettings, terms: Terms, host: str, advertised: str) -> None:
        self._sessions = sessions
        self._settings = settings
        self._terms = terms
        self._host = host
        self._advertised = advertised
        self._rendezvous: Rendezvous | None = None
        self._sender: CollectiveSender | None = None

    @property
    def requests(self) -> tuple[StageRequest, ...]:
        return tuple(session.hello.request for session in self._sessions)

    @property
    def peer(self) -> str:
        return ", ".join(session.peer for session in self._sessions)

    def open(self) -> CollectiveSender:
        """Form the group. Raises TransferTimeout with the phase, the address and the ranks that did not join."""
        settings, size = self._settings, 1 + len(self._sessions)
        backend = choose_backend(self._terms.backend, [own_device(), *(session.hello.device for session in self._sessions)])
        own_host = self._advertised if self._host in ("0.0.0.0", "::") else self._host
        self._rendezvous = rendezvous = Rendezvous(self._host, own_host, settings.connect_timeout_s)
        name = secrets.token_hex(8)
        try:
            for rank, session in enumerate(self._sessions, start=1):
                session.place = f"forming the group as rank {rank} of {size} at {bracketed(self._advertised)}:{rendezvous.port}"
                group = tcp_messages.Group(store_port=rendezvous.port, name=name, rank=rank, size=size, backend=backend)
                session.send(Welcome(terms=self._terms, window=0, bucket_bytes=settings.bucket_bytes, group=group))
                session.watch(rendezvous.break_off)
            try:
                joined = Group(
                    store=rendezvous.own,
                    own_host=own_host,
                    name=name,
                    rank=0,
                    size=size,
                    backend=backend,
                    form_s=settings.connect_timeout_s,
                    operation_s=settings.bucket_timeout_s,
                )
            except RuntimeError as error:
                raise self._not_formed(rendezvous.missing(size), str(error)[:300]) from None
        except BaseException:
            rendezvous.break_off()
            raise
        self._sender = CollectiveSender(self._sessions, joined, settings)
        return self._sender

    def _not_formed(self, missing: list[int], problem: str) -> WeightSyncError:
        lost = next((session.error for session in self._sessions if session.error is not None), None)
        if lost is not None:
            return lost
        names = "; ".join(f"{self._sessions[rank - 1].peer}, {self._sessions[rank - 1].place}" for rank in missing)
        return TransferTimeout(
            f"the process group did not form within {self._settings.connect_timeout_s} s, "
            f"never joined: {names or 'nobody is missing'} ({problem})"
        )

    def refuse(self, reason: str) -> None:
        for session in self._sessions:
            session.tell(reason)

    def cut(self, reason: str) -> None:
        for session in self._sessions:
            session.cut(reason)

    def close(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.break_off()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        for session in self._sessions:
            session.close()


class CollectiveSender:
    """Rank 0; a `SendChannel`. A bucket leaves when the next one is asked for, or the end: the last one says that it is."""

    def __init__(self, sessions: list[Session], group: Group, settings: WeightSyncSettings) -> None:
        self._sessions = sessions
        self._group = group
        self._wait_s = settings.bucket_timeout_s
        self._deadline = time.monotonic() + settings.stage_timeout_s
        self._bucket_bytes = settings.bucket_bytes
        self._lanes = tuple(_Lane(self._bucket_bytes, group.device) for _ in range(NUM_LANES))
        self._filled: tuple[int, int, int, int] | None = None
        """Kind, sequence, bytes of payload and header of the bucket that has not left."""
        self._num_sent = 0
        self._changed = threading.Condition()
        for session in sessions:
            session.watch(self._wake)

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    def next_bucket(self) -> torch.Tensor:
        self._flush(is_last=False)
        lane = self._lanes[self._num_sent % NUM_LANES]
        self._wait(lane, self._num_sent - NUM_LANES)
        return lane.host[_PREFIX_BYTES:]

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        lane = self._lanes[self._num_sent % NUM_LANES]
        start = _PREFIX_BYTES + payload_bytes
        lane.bytes[start : start + len(header)] = np.frombuffer(header, dtype=np.uint8)
        self._filled = (kind, sequence, payload_bytes, len(header))

    def finish(self, end: StreamEnd) -> None:
        if self._filled is None:
            self._filled = (_NOTHING, 0, 0, 0)
        self._flush(is_last=True)
        for lane in self._lanes:
            self._wait(lane, self._num_sent - 1)
        for session in self._sessions:
            session.place = f"after the last bucket ({self._num_sent - 1})"
            session.send(end)
        for session in self._sessions:
            message = session.receive(min(self._deadline, time.monotonic() + self._wait_s))
            if not isinstance(message, Done) or message.manifest_digest != end.manifest_digest:
                raise ProtocolError(f"{session.peer} sent {message}, expected Done with digest {end.manifest_digest}")

    def close(self) -> None:
        """Leave the group; whoever is still in it fails."""
        for lane in self._lanes:
            lane.work = None
        self._group.close()

    def _flush(self, *, is_last: bool) -> None:
        if self._filled is None:
            return
        self._raise_end()
        (kind, sequence, payload_bytes, header_bytes), self._filled = self._filled, None
        lane = self._lanes[self._num_sent % NUM_LANES]
        self._wait(lane, self._num_sent - NUM_LANES)
        prefix = _PREFIX.pack(_MAGIC, kind, is_last, sequence, payload_bytes, header_bytes)
        lane.bytes[: _PREFIX.size] = np.frombuffer(prefix, dtype=np.uint8)
        lane.to_wire()
        lane.work = self._group.broadcast(lane.wire, self._wake)
        self._num_sent += 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _ended(self) -> Session | None:
        return next((session for session in self._sessions if session.error is not None), None)

    def _wait(self, lane: _Lane, index: int) -> None:
        """Until the lane's broadcast is done; raises what ended a member's session, and TransferTimeout."""
        work = lane.work
        if work is None:
            return
        for session in self._sessions:
            session.place = f"in the broadcast of bucket {index}"
        due = min(self._deadline, time.monotonic() + self._wait_s)
        with self._changed:
            self._changed.wait_for(lambda: work.is_done or self._ended(), max(0.0, due - time.monotonic()))
        if not work.is_done:
            self._raise_end()
            names = ", ".join(session.peer for session in self._sessions)
            raise TransferTimeout(f"not all of {names} took bucket {index} within {self._wait_s} s")
        problem = work.problem()
        lane.work = None
        if problem:
            with self._changed:  # the session of the member that broke it ends an instant later
                self._changed.wait_for(lambda: self._ended() is not None, _BLAME_S)
            self._raise_end()
            raise PeerLost(f"the group broke in the broadcast of bucket {index}: {problem}")

    def _raise_end(self) -> None:
        ended = self._ended()
        if ended is not None and ended.error is not None:
            raise type(ended.error)(str(ended.error))


class CollectiveReceiver:
    """A member that receives; a `Receiving`."""

    def __init__(self, link: Link, group: Group, bucket_bytes: int, policy_version: int) -> None:
        self._link = link
        self._group = group
        self._policy_version = policy_version
        self._bucket_bytes = bucket_bytes
        self._lanes = tuple(_Lane(bucket_bytes, group.device) for _ in range(NUM_LANES))
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event_lock = threading.Lock()
        self._num_received = 0
        self._is_last = False
        self._post(self._lanes[0])

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def receive(self) -> Bucket | StreamEnd:
        while not self._is_last:
            bucket = self._receive_bucket()
            if bucket is not None:
                return bucket
        self._link.place = f"after the last bucket ({self._num_received - 1})"
        message, _ = self._link.receive()
        if not isinstance(message, StreamEnd):
            raise ProtocolError(f"{self._link.peer} sent {type(message).__name__}, expected the end")
        return message

    def _receive_bucket(self) -> Bucket | None:
        lane = self._lanes[self._num_received % NUM_LANES]
        self._wait(lane)
        lane.from_wire()
        magic, code, is_last, sequence, payload_bytes, header_bytes = _PREFIX.unpack_from(lane.bytes.data)
        if magic != _MAGIC or payload_bytes + header_bytes > self._bucket_bytes:
            raise ProtocolError(f"{self._link.peer} broadcast {magic!r} with {payload_bytes} bytes, expected a bucket")
        self._is_last = bool(is_last)
        self._num_received += 1
        if not self._is_last:
            self._post(self._lanes[self._num_received % NUM_LANES])  # arrives while this one is read
        if code == _NOTHING:
            return None
        try:
            kind = BucketKind(code)
        except ValueError as error:
            raise ProtocolError(f"bucket {sequence} has kind {code}, which is unknown") from error
        payload = lane.bytes[_PREFIX_BYTES : _PREFIX_BYTES + payload_bytes]
        header = lane.bytes[_PREFIX_BYTES + payload_bytes :][:header_bytes].tobytes()
        return Bucket(kind=kind, sequence=sequence, payload=payload, header=header)

    def release(self) -> None:
        pass  # its lane is used again only when the bucket after the next one is asked for

    def confirm(self, manifest_digest: str) -> None:
        self._link.send(Done(manifest_digest=manifest_digest))

    def _post(self, lane: _Lane) -> None:
        lane.work = self._group.broadcast(lane.wire, self._wake)

    def _wake(self) -> None:
        with self._event_lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def _wait(self, lane: _Lane) -> None:
        self._link.place = f"in the broadcast of bucket {self._num_received}"
        work = lane.work
        assert work is not None, "nothing is under way"
        while not work.is_done:
            self._link.wait_for(self._event)
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        problem = work.problem()
        lane.work = None
        if problem:
            self._link.raise_end(f"the group broke: {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._link.end(error)
        for lane in self._lanes:
            lane.work = None
        self._group.close()
        with self._event_lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> CollectiveReceiver:
    """See `OpenReceiver`. Raises ValueError for an address that is none, ProtocolError when the terms differ."""
    parsed = NetAddress.parse(address)
    link = Link(parsed, timeout_s=timeout_s)
    try:
        if on_open is not None:
            on_open(link.cut)
        welcome = link.open(request, device=own_device())
        if welcome.group is None or welcome.bucket_bytes > 1 << 30:
            raise ProtocolError(f"{link.peer} offers {welcome}, expected a group")
        link.place = f"forming the group as rank {welcome.group.rank} of {welcome.group.size}"
        left_s = max(0.1, link.deadline - time.monotonic())
        try:
            group = Group(
                store=connect_store(parsed.host, welcome.group.store_port, left_s),
                own_host=route_to(parsed.host, welcome.group.store_port),
                name=welcome.group.name,
                rank=welcome.group.rank,
                size=welcome.group.size,
                backend=welcome.group.backend,
                form_s=left_s,
                operation_s=left_s,
            )
        except (RuntimeError, OSError) as error:
            link.raise_end(f"the group did not form: {str(error)[:300]}")
    except BaseException as error:
        link.end(error)
        raise
    return CollectiveReceiver(link, group, welcome.bucket_bytes, request.policy_version)
