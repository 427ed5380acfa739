"""The `tcp` transport: buckets over ZeroMQ, spread over several connections of each receiver.

Invariant: at most two buckets' worth of memory is out at a time. A bucket of the settings travels as messages of about 1 MiB,
message i on connection i modulo their number, so they need no order of their own; the receiver's credit, which counts from the
beginning, lets the sender use a message's memory again. Payloads are sent from where they were written and read where they
arrived.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import structlog
import torch
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from configs.bus_address import is_loopback
from configs.schema import WeightSyncSettings
from weight_sync.buckets import MIN_BUCKET_BYTES
from weight_sync.channel import Bucket, BucketKind, StreamEnd
from weight_sync.errors import ProtocolError
from weight_sync.tcp_address import TOKEN_BYTES, NetAddress, advertised_host, bracketed
from weight_sync.tcp_link import Link
from weight_sync.tcp_messages import BucketHead, Credit, Done, FileNamed, Welcome
from weight_sync.tcp_sessions import Session, Sessions
from weight_sync.transport import Cut, Incoming, StageRequest, Terms

log = structlog.get_logger()

MESSAGE_BYTES = 1 << 20
NUM_BUCKETS = 2
_JOIN_S = 5.0
_MAX_FREE_RINGS = 4


class TcpListener:
    """Takes in transfers over TCP; a `Listener`.

    Args:
        encrypt: None: beyond loopback.
        make_sender: called as `TcpSender` is.
    """

    def __init__(
        self,
        settings: WeightSyncSettings,
        *,
        terms: Terms,
        encrypt: bool | None = None,
        make_sender: Callable[..., TcpSender] | None = None,
    ) -> None:
        self._make_sender = make_sender or TcpSender
        num_connections = settings.num_connections
        self._settings = settings
        self._terms = terms
        self._host = settings.listen_host.strip("[]")
        self._port = settings.listen_port
        self._advertised = advertised_host(self._host, settings.advertised_host)
        public, secret = zmq.curve_keypair() if encrypt or (encrypt is None and not is_loopback(self._host)) else (b"", b"")
        self._key, self._secret = (z85.decode(public), z85.decode(secret)) if public else (b"", b"")
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._num_connections = num_connections
        self._on_transfer: Callable[[Incoming], None] | None = None
        self._threads: set[threading.Thread] = set()
        self._rings: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._sessions = Sessions(
            token=self._token,
            handshake_timeout_s=settings.connect_timeout_s,
            num_io_threads=min(num_connections, 2),
            on_session=self._begin,
        )

    @property
    def address(self) -> str:
        return str(self._net_address())

    def _net_address(self) -> NetAddress:
        return NetAddress(
            scheme=self._terms.transport,
            host=self._advertised,
            port=self._port,
            token=self._token,
            key=self._key,
            num_connections=self._num_connections,
        )

    def start(self, on_transfer: Callable[[Incoming], None]) -> None:
        self._on_transfer = on_transfer
        try:
            self._port = self._sessions.bind(self._host, self._port, secret_key=self._secret)
            self._sessions.start()
        except BaseException:
            self._sessions.close()
            raise
        log.info(
            "weights listen",
            bound=f"{bracketed(self._host)}:{self._port}",
            advertised=self._net_address().shown,
            encrypted=bool(self._key),
        )

    def close(self) -> None:
        self._sessions.close()
        with self._lock:
            threads = tuple(self._threads)
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._rings.clear()

    def _begin(self, session: Session) -> None:
        thread = threading.Thread(target=self._serve, args=(session,), name="weights-tcp", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _serve(self, session: Session) -> None:
        assert self._on_transfer is not None
        try:
            self._on_transfer(TcpIncoming(session, self._settings, self._terms, self._rings, self._make_sender))
        finally:
            session.close()
            with self._lock:
                self._threads.discard(threading.current_thread())


class TcpIncoming:
    """One receiver's transfer at the server; an `Incoming`."""

    def __init__(
        self,
        session: Session,
        settings: WeightSyncSettings,
        terms: Terms,
        rings: list[torch.Tensor],
        make_sender: Callable[..., TcpSender],
    ) -> None:
        self._make_sender = make_sender
        self._session = session
        self._settings = settings
        self._terms = terms
        self._rings = rings
        self._deadline = time.monotonic() + settings.stage_timeout_s
        self._sender: TcpSender | None = None

    @property
    def requests(self) -> tuple[StageRequest, ...]:
        return (self._session.hello.request,)

    @property
    def peer(self) -> str:
        return self._session.peer

    def open(self) -> TcpSender:
        message_bytes = max(MIN_BUCKET_BYTES, min(MESSAGE_BYTES, self._settings.bucket_bytes))
        window = NUM_BUCKETS * self._settings.bucket_bytes // message_bytes
        try:
            ring = self._rings.pop()
        except IndexError:
            ring = torch.empty(window * message_bytes, dtype=torch.uint8)
        self._sender = self._make_sender(
            self._session,
            ring.view(window, message_bytes),
            deadline=self._deadline,
            wait_s=self._settings.bucket_timeout_s,
        )
        self._session.send(Welcome(terms=self._terms, window=window, bucket_bytes=message_bytes))
        return self._sender

    def refuse(self, reason: str) -> None:
        self._session.tell(reason)

    def cut(self, reason: str) -> None:
        self._session.cut(reason)

    def close(self) -> None:
        self._session.close()
        sender, self._sender = self._sender, None
        if sender is not None and sender.is_confirmed and len(self._rings) < _MAX_FREE_RINGS:
            self._rings.append(sender.ring.view(-1))  # libzmq holds nothing of it any more: all of it arrived


class TcpSender:
    """The server's end of one transfer; a `SendChannel`."""

    def __init__(self, session: Session, ring: torch.Tensor, *, deadline: float, wait_s: float) -> None:
        self.ring = ring
        """uint8[window, message]."""
        self.is_confirmed = False
        self._session = session
        self._memory = ring.numpy()
        self._deadline = deadline
        self._wait_s = wait_s
        self._num_sent = 0
        self._num_released = 0

    @property
    def bucket_bytes(self) -> int:
        return self.ring.shape[1]

    def next_bucket(self) -> torch.Tensor:
        while self._num_sent - self._num_released >= len(self.ring):
            self._session.place = f"waiting for bucket {self._num_released} of {self._num_sent} sent to be taken"
            message = self._receive()
            if not isinstance(message, Credit):
                raise ProtocolError(f"{self._session.peer} sent {message}, expected Credit")
            self._take_credit(message)
        return self.ring[self._num_sent % len(self.ring)]

    def send_bucket(self, kind: BucketKind, sequence: int, *, payload_bytes: int, header: bytes) -> None:
        self._send(kind, sequence, self._memory[self._num_sent % len(self.ring), :payload_bytes], header)

    def send_view(self, kind: BucketKind, sequence: int, *, payload: torch.Tensor, header: bytes) -> None:
        """See `ViewChannel`."""
        self._send(kind, sequence, payload.numpy(), header)

    def _send(self, kind: BucketKind, sequence: int, payload: NDArray[np.uint8], header: bytes) -> None:
        self._session.place = f"sending bucket {self._num_sent}"
        self._session.send(
            BucketHead(kind=kind, sequence=sequence, header=header),
            stripe=self._num_sent % self._session.hello.num_stripes,
            payload=payload,
        )
        self._num_sent += 1

    def name_file(self, named: FileNamed) -> None:
        """Send the name of what has everything, in place of buckets."""
        self._session.place = "naming the file"
        self._session.send(named)

    def finish(self, end: StreamEnd) -> None:
        self._session.place = f"after the last bucket ({self._num_sent - 1})"
        self._session.send(end, stripe=self._num_sent % self._session.hello.num_stripes)
        while isinstance(message := self._receive(), Credit):
            self._take_credit(message)
        if not isinstance(message, Done) or message.manifest_digest != end.manifest_digest:
            raise ProtocolError(f"{self._session.peer} sent {message}, expected Done with digest {end.manifest_digest}")
        self.is_confirmed = True

    def _receive(self) -> object:
        return self._session.receive(min(self._deadline, time.monotonic() + self._wait_s))

    def _take_credit(self, credit: Credit) -> None:
        if not self._num_released < credit.num_released <= self._num_sent:
            raise ProtocolError(
                f"{self._session.peer} gave {credit.num_released} buckets back, expected more than {self._num_released} and "
                f"at most {self._num_sent}"
            )
        self._num_released = credit.num_released


class TcpReceiver:
    """The receiver's end of one transfer; a `Receiving`."""

    def __init__(self, link: Link, welcome: Welcome, policy_version: int) -> None:
        self._link = link
        self._window = welcome.window
        self._bucket_bytes = welcome.bucket_bytes
        self._policy_version = policy_version
        self._num_received = 0
        self._num_released = 0
        self._num_credited = 0
        self._frame: zmq.Frame | None = None

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def receive(self) -> Bucket | StreamEnd:
        assert self._frame is None, "the bucket before was not released"
        self._link.place = f"at bucket {self._num_received}"
        message, payload = self._link.receive(self._num_received % self._link.num_stripes)
        if isinstance(message, StreamEnd):
            return message
        if isinstance(message, FileNamed):
            return self._open_file(message)
        if not isinstance(message, BucketHead) or payload is None:
            raise ProtocolError(f"{self._link.peer} sent {type(message).__name__}, expected a bucket or the end")
        if len(payload) + len(message.header) > self._bucket_bytes:
            raise ProtocolError(f"{self._link.peer} sent {len(payload)} bytes, expected at most {self._bucket_bytes}")
        try:
            kind = BucketKind(message.kind)
        except ValueError as error:
            raise ProtocolError(f"bucket {message.sequence} has kind {message.kind}, which is unknown") from error
        self._frame = payload
        self._num_received += 1
        view = np.frombuffer(payload.buffer, dtype=np.uint8)
        return Bucket(kind=kind, sequence=message.sequence, payload=view, header=message.header)

    def _open_file(self, named: FileNamed) -> Bucket:
        raise ProtocolError(f"{self._link.peer} sent {type(named).__name__}, expected a bucket or the end")

    def release(self) -> None:
        assert self._frame is not None, "release without receive"
        self._frame = None
        self._num_released += 1
        if (self._num_released - self._num_credited) * 4 >= self._window:
            self._link.send(Credit(num_released=self._num_released))
            self._num_credited = self._num_released

    def confirm(self, manifest_digest: str) -> None:
        self._link.send(Done(manifest_digest=manifest_digest))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._frame = None
        self._link.end(error)
        self._link.end(error)


def open_link(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> tuple[Link, Welcome]:
    """Connect, ask, and be welcomed. Raises as `open_receiver` does."""
    link = Link(NetAddress.parse(address), timeout_s=timeout_s)
    try:
        if on_open is not None:
            on_open(link.cut)
        welcome = link.open(request)
        if not welcome.window or welcome.bucket_bytes > 1 << 30:
            raise ProtocolError(f"{link.peer} offers {welcome}, expected buckets")
    except BaseException as error:
        link.end(error)
        raise
    return link, welcome


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> TcpReceiver:
    """See `OpenReceiver`. Raises ValueError for an address that is none, ProtocolError when the terms differ."""
    link, welcome = open_link(address, request, timeout_s=timeout_s, on_open=on_open)
    return TcpReceiver(link, welcome, request.policy_version)
