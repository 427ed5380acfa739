"""The server's end of the network transports: one port, one thread, and a `Session` for each receiver that was let in.

Invariant: nobody without the listener's token, or its key where it is encrypted, gets a message in: they are sent away in the
handshake. A turn of the thread takes a bounded number of messages. The thread is the only one that touches the sockets;
a session is used by the one thread that serves it, and `Session.cut` by any. A receiver whose connection ends is noticed by an
event, not by a deadline: libzmq says that some connection ended, and a ping then finds those that cannot be reached.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import zmq
from zmq.utils import z85

from weight_sync.channel import StreamEnd
from weight_sync.errors import AddressTaken, PeerFailed, PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.tcp_address import bracketed
from weight_sync.tcp_gate import REFUSED, Gate, Quiet
from weight_sync.tcp_messages import (
    MAX_MESSAGE_BYTES,
    BucketHead,
    Credit,
    Done,
    Fail,
    FileNamed,
    Hello,
    Join,
    Message,
    Ping,
    Welcome,
    decode,
    encode,
)

log = structlog.get_logger()

MAX_TRANSFERS = 64
"""Receivers at a time, whatever the number of their connections."""
_MAX_TURN = 256
"""Messages that are taken in before the thread looks at everything else again."""
LINGER_MS = 500
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 15_000
_PROBES_AFTER_S = (0.0, 0.05, 0.5)
"""When to ask who can be reached after a connection ended: the event may overtake the end of its queue."""
_GREETING = encode(Ping())
_Outgoing = tuple[bytes, bytes, object | None]


def identity_of(transfer: str, stripe: int) -> bytes:
    """Routing id of one connection of a transfer."""
    return b"\1" + bytes.fromhex(transfer) + bytes([stripe])


@dataclass(slots=True, eq=False)
class _Joining:
    """A transfer whose connections are not all there yet."""

    due: float
    hello: Hello | None = None
    stripes: set[int] = field(default_factory=set)


class Session:
    """One receiver's connections, as the thread that serves it sees them."""

    def __init__(self, hello: Hello, post: Callable[[_Outgoing], None], forget: Callable[[Session], None]) -> None:
        self.hello = hello
        self.place = "handshake"
        """Where the transfer stands, for messages."""
        request = hello.request
        self.peer = f"receiver {request.receiver!r} (rank {request.rank}, staging {request.nonce})"
        self._post = post
        self._forget = forget
        self._identities = tuple(identity_of(hello.transfer, stripe) for stripe in range(hello.num_stripes))
        self._inbox: deque[Message] = deque()
        self._error: WeightSyncError | None = None
        self._changed = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    @property
    def identities(self) -> tuple[bytes, ...]:
        return self._identities

    @property
    def error(self) -> WeightSyncError | None:
        """Why nothing more can come of this session; None while it stands."""
        return self._error

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, from any thread, when the session ends with an error; at once if it has."""
        with self._changed:
            self._watchers.append(on_end)
            ended = self._error is not None
        if ended:
            on_end()

    def send(self, message: Message, *, stripe: int = 0, payload: object | None = None) -> None:
        """Hand over and return. `payload` is not copied: it must stay as it is until the receiver has released it.

        Raises the error with which the session has ended.
        """
        if self._error is not None:
            raise self._error
        self._post((self._identities[stripe], encode(message), payload))

    def receive(self, deadline: float) -> Message:
        """The next message; raises TransferTimeout at `deadline` (monotonic), PeerLost, PeerFailed."""
        with self._changed:
            started = time.monotonic()
            self._changed.wait_for(lambda: self._inbox or self._error, max(0.0, deadline - started))
            if self._inbox:
                return self._inbox.popleft()
            if self._error is not None:
                raise self._error
        raise TransferTimeout(f"{self.peer} was silent for {time.monotonic() - started:.1f} s, {self.place}")

    def cut(self, reason: str) -> None:
        """End the session from any thread; its waits fail with `reason`, and the receiver is told."""
        self.end(TransferTimeout(f"{self.peer} was cut off, {self.place}: {reason}"))
        self.tell(reason)

    def tell(self, reason: str) -> None:
        """Say on every connection, if they still stand, that the transfer fails."""
        data = encode(Fail(reason=reason))
        for identity in self._identities:
            self._post((identity, data, None))

    def close(self) -> None:
        """No further message of this receiver is heard, nor its end told."""
        self._forget(self)
        with self._changed:
            self._watchers.clear()

    # ── called by the thread of the sockets ──────────────────────────────────────────────────────────────────────────

    def take(self, message: Message) -> None:
        if isinstance(message, Fail):
            self.end(PeerFailed(f"{self.peer} stopped, {self.place}: {message.reason}"))
            return
        with self._changed:
            self._inbox.append(message)
            self._changed.notify_all()

    def lose(self) -> None:
        self.end(PeerLost(f"{self.peer} closed the connection, {self.place}"))

    def end(self, error: WeightSyncError) -> None:
        """The first error stays."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._changed.notify_all()
            watchers = tuple(self._watchers)
        for on_end in watchers:
            on_end()


class Sessions:
    """Listens on one port. `on_session` is called from the thread of the sockets; it must hand over and return. If it raises
    RuntimeError, as a thread that cannot be started does, that receiver is refused."""

    def __init__(
        self, *, token: bytes, handshake_timeout_s: float, num_io_threads: int, on_session: Callable[[Session], None]
    ) -> None:
        self._token = token
        self._handshake_timeout_s = handshake_timeout_s
        self._on_session = on_session
        self._num_io_threads = num_io_threads
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._router: zmq.Socket[bytes]
        self._gate: Gate | None = None
        self._quiet = Quiet()
        self._joining: dict[str, _Joining] = {}
        self._sessions: dict[bytes, Session] = {}
        self._lock = threading.Lock()
        self._outbox: deque[_Outgoing] = deque()
        self._wake = -1
        self._closing = False
        self._closed = True
        self._probes: list[float] = []
        self._thread = threading.Thread(target=self._run, name="weights-net", daemon=True)

    def bind(self, host: str, port: int, *, secret_key: bytes) -> int:
        """Listen, encrypted if `secret_key` (32 bytes) is given, else behind a gate that asks for the token; returns the port.

        Raises AddressTaken.
        """
        self._context = zmq.Context(io_threads=self._num_io_threads)
        self._router = router = self._context.socket(zmq.ROUTER)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, LINGER_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HANDSHAKE_IVL, int(self._handshake_timeout_s * 1000)),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int(":" in host)),
        ):
            router.setsockopt(option, value)
        if secret_key:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(secret_key))
        else:
            self._gate = Gate(self._context, self._token)
            self._gate.guard(router)
        try:
            router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            raise AddressTaken(
                f"weights cannot listen at {bracketed(host)}:{port or 'any port'} (weight_sync.listen_host, "
                f"weight_sync.listen_port): {error}"
            ) from error
        bound = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return int(bound.rstrip(b"\0").rpartition(b":")[2])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Cut what is under way, send what is still to be said, close the port. Safe to call twice, and before `bind`."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            sessions = set(self._sessions.values())
        for session in sessions:
            session.cut("the weight server closes")
        self._closing = True
        if self._thread.ident is not None:
            self._ring()
            self._thread.join()
        self._router.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        os.close(self._wake)

    def post(self, outgoing: _Outgoing) -> None:
        self._outbox.append(outgoing)
        self._ring()

    def _ring(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)

    def _forget(self, session: Session) -> None:
        with self._lock:
            for identity in session.identities:
                self._sessions.pop(identity, None)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for source in (self._router, monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        gate = self._gate
        if gate is not None:
            poller.register(gate.socket, zmq.POLLIN)
        try:
            while not self._closing or self._outbox:
                ready = dict(poller.poll(self._pause_ms(time.monotonic())))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._outbox:
                    self._send(*self._outbox.popleft())
                if gate is not None and gate.socket in ready:
                    gate.answer()
                if self._router in ready:
                    self._receive_some()
                now = time.monotonic()
                if monitor in ready:
                    _drain(monitor)
                    self._probes = [now + after for after in _PROBES_AFTER_S]
                self._look_at_clock(now)
        finally:
            self._router.disable_monitor()
            monitor.close(0)

    def _pause_ms(self, now: float) -> int | None:
        due = [*self._probes, *(joining.due for joining in self._joining.values())]
        return int(max(0.0, min(due) - now) * 1000) + 1 if due else None

    def _look_at_clock(self, now: float) -> None:
        if self._probes and self._probes[0] <= now:
            self._probes = [due for due in self._probes if due > now]
            with self._lock:
                identities = list(self._sessions)
            for identity in identities:
                if not self._probes or identity[-1] == 0:  # the end of another stripe may overtake the last word on the first
                    self._send(identity, _GREETING, None)
        for transfer, joining in list(self._joining.items()):
            if joining.due <= now:
                del self._joining[transfer]
                log.warning("weight transfer given up", transfer=transfer, connections=len(joining.stripes))
                for stripe in joining.stripes:
                    self._refuse(identity_of(transfer, stripe), f"not all connections came in {self._handshake_timeout_s} s")

    def _send(self, identity: bytes, data: bytes, payload: object | None) -> None:
        try:
            if payload is None:
                self._router.send_multipart((identity, data), zmq.NOBLOCK)
            else:
                self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
                self._router.send(data, zmq.SNDMORE | zmq.NOBLOCK)
                self._router.send(payload, zmq.NOBLOCK, copy=False)  # type: ignore[call-overload]
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            with self._lock:
                session = self._sessions.get(identity)
            if session is not None:
                self._receive_some()  # its last words, which the end of the connection has overtaken
                session.lose()

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._send(identity, encode(Fail(reason=reason)), None)

    def _receive_some(self) -> None:
        for _ in range(_MAX_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                self._take(*frames)

    def _take(self, identity: bytes, data: bytes) -> None:
        with self._lock:
            session = self._sessions.get(identity)
        try:
            message = decode(data)
            match message:
                case Hello() | Join():
                    self._admit(identity, message)
                case Credit() | Done() | Fail() if session is not None:
                    session.take(message)
                case Ping() | Credit() | Done() | Fail():
                    pass  # of a session that has ended
                case Welcome() | BucketHead() | StreamEnd() | FileNamed():
                    raise ProtocolError(f"got {type(message).__name__}, which only a server sends")
        except ProtocolError as error:
            if self._quiet.is_over(time.monotonic()):
                log.warning("message is no receiver's", error=str(error), others=self._quiet.take())
            if session is not None:
                session.end(error)
            self._refuse(identity, str(error))

    def _admit(self, identity: bytes, message: Hello | Join) -> None:
        stripe = message.stripe if isinstance(message, Join) else 0
        if not hmac.compare_digest(message.token, self._token):
            log.warning("weight transfer refused", reason="its token is not this server's")
            self._refuse(identity, REFUSED)
            return
        if identity != identity_of(message.transfer, stripe) or identity in self._sessions:
            raise ProtocolError(
                f"got {type(message).__name__} of transfer {message.transfer} on another connection than its own"
            )
        if message.transfer not in self._joining and len(self._joining) + self._num_sessions() >= MAX_TRANSFERS:
            self._refuse(identity, f"{MAX_TRANSFERS} transfers are under way")
            return
        due = time.monotonic() + self._handshake_timeout_s
        joining = self._joining.setdefault(message.transfer, _Joining(due=due))
        joining.stripes.add(stripe)
        if isinstance(message, Hello):
            joining.hello = message
        hello = joining.hello
        if hello is None or len(joining.stripes) < hello.num_stripes:
            return
        del self._joining[message.transfer]
        session = Session(hello, self.post, self._forget)
        with self._lock:
            if not self._closing:
                self._sessions.update(dict.fromkeys(session.identities, session))
        try:
            self._on_session(session)
        except RuntimeError as error:
            log.warning("weight transfer refused", peer=session.peer, reason=str(error))
            session.tell(f"the weight server cannot serve it now: {error}")
            session.close()

    def _num_sessions(self) -> int:
        with self._lock:
            return len(set(self._sessions.values()))


def _drain(socket: zmq.Socket[bytes]) -> None:
    while True:
        try:
            socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
