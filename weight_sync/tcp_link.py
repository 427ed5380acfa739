"""The receiver's end of the network transports: the connections of one transfer to the server that its address names.

Invariant: a link is for one transfer and connects once; what the server said before it went is heard before its end is
reported. It is used by one thread; `cut` works from any. Every wait ends at the transfer's deadline.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Any, NoReturn, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from weight_sync.errors import PeerFailed, PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.tcp_address import NetAddress
from weight_sync.tcp_gate import REFUSED, show_token
from weight_sync.tcp_messages import Fail, Hello, Join, Message, Ping, Welcome, decode, encode
from weight_sync.tcp_sessions import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, identity_of
from weight_sync.transport import StageRequest, check_terms

_LAST_WORDS_MS = 100
_GOODBYE_MS = 300
_HANDSHAKE_MS = 10_000
_NEVER_MS = 1 << 30
"""To the next attempt to connect. With libzmq's own never (-1) a context whose handshake failed cannot be ended."""
_REFUSED_US = "refused the token"
_ENDS: dict[int, str] = {
    int(zmq.EVENT_DISCONNECTED): "closed the connection",
    int(zmq.EVENT_CLOSED): "does not answer",
    int(zmq.EVENT_CONNECT_RETRIED): "does not answer",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "is no weight server, or has other keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "is no weight server, or has other keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): _REFUSED_US,
}


class Link:
    """Connections to a weight server, one transfer long. A context manager; left with an exception, it says why."""

    def __init__(self, address: NetAddress, *, timeout_s: float, wait_s: float | None = None) -> None:
        self.peer = f"the weight server at {address.shown}"
        self.place = "handshake"
        """Where the transfer stands, for messages."""
        self.wait_s = timeout_s if wait_s is None else wait_s
        """For one message."""
        self.deadline = time.monotonic() + timeout_s
        self._address = address
        self._transfer = secrets.token_hex(16)
        self._lost = ""
        self._cut_reason: str | None = None
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._stripes: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []

    @property
    def num_stripes(self) -> int:
        return self._address.num_connections

    def open(self, request: StageRequest, *, device: str = "") -> Welcome:
        """Connect and ask; the server's answer, whose terms go with the request's.

        Raises PeerLost, PeerFailed (refused), TransferTimeout, ProtocolError (terms differ).
        """
        address = self._address
        try:
            self._context.set(zmq.IO_THREADS, min(self.num_stripes, 2))
            for stripe in range(self.num_stripes):
                self._connect(stripe)
            hello = Hello(
                token=address.token, transfer=self._transfer, num_stripes=self.num_stripes, request=request, device=device
            )
            self.send(hello)
            for stripe in range(1, self.num_stripes):
                self.send(Join(token=address.token, transfer=self._transfer, stripe=stripe), stripe=stripe)
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.peer} cannot be reached: {error}") from error
        message, _ = self.receive()
        if not isinstance(message, Welcome):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, expected Welcome")
        check_terms(request.terms, message.terms, self.peer)
        return message

    def _connect(self, stripe: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        self._stripes.append(socket)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.RECONNECT_IVL, _NEVER_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, int(":" in self._address.host)),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, identity_of(self._transfer, stripe))
        if self._address.key:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self._address.key))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        else:
            show_token(socket, self._address.token)
        monitor = socket.get_monitor_socket(sum(_ENDS))
        self._monitors.append(monitor)
        self._poller.register(monitor, zmq.POLLIN)
        socket.connect(self._address.endpoint)

    def send(self, message: Message, *, stripe: int = 0) -> None:
        """Raises PeerFailed or PeerLost when the server has ended the transfer."""
        try:
            self._stripes[stripe].send(encode(message), zmq.NOBLOCK)
        except zmq.Again:  # there is no limit but that nobody is connected
            self.raise_end("there is nobody to send to")

    def receive(self, stripe: int = 0) -> tuple[Message, zmq.Frame | None]:
        """The next message on a connection, and the payload behind it.

        Raises TransferTimeout, PeerLost, PeerFailed, ProtocolError.
        """
        started = time.monotonic()
        due = min(self.deadline, started + self.wait_s)
        while True:
            frames = self._next(stripe, due, started)
            message = decode(frames[0].buffer)
            if isinstance(message, Ping):
                continue
            if isinstance(message, Fail):
                raise PeerFailed(f"{self.peer} stopped, {self.place}: {message.reason}")
            return message, frames[1] if len(frames) == 2 else None

    def _next(self, stripe: int, due: float, started: float) -> list[zmq.Frame]:
        socket = self._stripes[stripe]
        while True:
            if self._cut_reason is not None:
                raise TransferTimeout(f"{self.peer}: cut off, {self.place}: {self._cut_reason}")
            try:
                return socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                pass
            if self._lost:
                if socket.poll(_LAST_WORDS_MS):
                    continue
                if self._lost == _REFUSED_US:
                    raise PeerFailed(f"{self.peer} stopped, {self.place}: {REFUSED}")
                raise PeerLost(f"{self.peer} {self._lost}, {self.place}")
            left_s = due - time.monotonic()
            if left_s <= 0:
                raise TransferTimeout(f"{self.peer} was silent for {time.monotonic() - started:.1f} s, {self.place}")
            self._wait(socket, left_s)

    def _wait(self, socket: zmq.Socket[bytes], seconds: float) -> None:
        self._poller.register(socket, zmq.POLLIN)
        try:
            ready = dict(self._poller.poll(int(seconds * 1000) + 1))
        finally:
            self._poller.unregister(socket)
        self._note(ready)

    def _note(self, ready: dict[Any, int]) -> None:
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for monitor in self._monitors:
            if monitor in ready:
                event = recv_monitor_message(monitor)
                self._lost = self._lost or _ENDS.get(int(event["event"]), "")

    def wait_for(self, descriptor: int) -> None:
        """Wait until `descriptor` can be read. Raises like `receive` when the server ends the transfer, or `cut` does.

        A message that is none of its failure stays.
        """
        self._poller.register(descriptor, zmq.POLLIN)
        try:
            while True:
                left_s = self.deadline - time.monotonic()
                if left_s <= 0:
                    raise TransferTimeout(f"{self.peer} was silent until the deadline of the transfer, {self.place}")
                ready = dict(self._poller.poll(int(left_s * 1000) + 1))
                self._note(ready)
                if self._cut_reason is not None:
                    raise TransferTimeout(f"{self.peer}: cut off, {self.place}: {self._cut_reason}")
                if descriptor in ready:
                    return
                if self._lost:
                    self.raise_end("it said nothing")
        finally:
            self._poller.unregister(descriptor)

    def raise_end(self, problem: str) -> NoReturn:
        """Raise what the server said before it ended the transfer, or else PeerLost with `problem`."""
        self.deadline = min(self.deadline, time.monotonic() + _LAST_WORDS_MS / 1000)
        try:
            while True:
                self.receive()
        except (TransferTimeout, PeerLost):
            if self._cut_reason is not None:
                raise
            raise PeerLost(f"{self.peer} {self._lost or 'is gone'}, {self.place}: {problem}") from None

    def cut(self, reason: str) -> None:
        """End the transfer from any thread; its waits fail with `reason`."""
        with self._lock:
            self._cut_reason = reason
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def __enter__(self) -> Self:
        return self

    def end(self, error: BaseException | None) -> None:
        """Close the connections; tells the server of an error that it does not know. Safe to call twice."""
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake < 0:
            return
        if error is not None and not isinstance(error, PeerLost | PeerFailed) and self._stripes and not self._lost:
            own = isinstance(error, WeightSyncError)
            fail = Fail(reason=str(error) if own else f"{type(error).__name__}: {error}")
            try:
                self._stripes[0].send(encode(fail), zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # it is gone; the error that brought us here says so
        for socket in self._stripes:
            socket.disable_monitor()
            socket.close(0 if self._lost else _GOODBYE_MS)
        for monitor in self._monitors:
            monitor.close(0)
        self._context.term()
        os.close(wake)
