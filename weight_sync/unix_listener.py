"""A Unix socket on which transfers are asked for: accepts, lets in this user's processes only, reads what each asks for.

Invariant: each connection has one thread, from its first packet to its last; after `close` there is no thread and no socket.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from configs.schema import WeightSyncSettings
from weight_sync.channel import SendChannel
from weight_sync.connection import Connection, socket_path
from weight_sync.errors import AddressTaken, ProtocolError, WeightSyncError
from weight_sync.packets import Hello, Welcome
from weight_sync.transport import Cut, Incoming, StageRequest, Terms, check_terms

log = structlog.get_logger()

_MAX_CONNECTIONS = 256
_CUT_GRACE_S = 5.0
_ACCEPT_PAUSE_S = 0.2
"""After an accept that failed, such as for want of file descriptors."""


class UnixChannel(SendChannel, Protocol):
    def close(self) -> None:
        """Give back what the channel took for itself; the connection is its owner's to close."""
        ...


MakeChannel = Callable[[Connection], UnixChannel]


@dataclass(slots=True, eq=False)
class UnixIncoming:
    """A transfer that a process of this host asks for; an `Incoming`."""

    connection: Connection
    request: StageRequest
    terms: Terms
    make_channel: MakeChannel
    channel: UnixChannel | None = None

    @property
    def requests(self) -> tuple[StageRequest, ...]:
        return (self.request,)

    @property
    def peer(self) -> str:
        return self.connection.peer

    def open(self) -> UnixChannel:
        self.connection.send(Welcome(terms=self.terms))
        self.channel = self.make_channel(self.connection)
        return self.channel

    def refuse(self, reason: str) -> None:
        self.connection.give_up(reason)

    def cut(self, reason: str) -> None:
        self.connection.cut(reason)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.connection.sock.close()


class UnixListener:
    """A `Listener` on `path`; `make_channel` gives a welcomed connection its channel."""

    def __init__(
        self,
        path: Path,
        settings: WeightSyncSettings,
        *,
        terms: Terms,
        make_channel: MakeChannel,
        on_start: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_start` is called once the address is ours and before anybody is let in, `on_close` when nobody is left."""
        self.address = f"{terms.transport}:{path}"
        self._path = Path(socket_path(self.address, terms.transport))
        self._settings = settings
        self._terms = terms
        self._make_channel = make_channel
        self._on_start = on_start
        self._on_close = on_close
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self._inode = 0
        """Of the socket's file, so that nobody else's is removed."""
        self._acceptor: threading.Thread | None = None

    def start(self, on_transfer: Callable[[Incoming], None]) -> None:
        self._socket = _listen(self._path)
        self._inode = self._path.stat().st_ino
        acceptor = threading.Thread(target=self._accept, args=(self._socket, on_transfer), name="weights-accept", daemon=True)
        try:
            self._on_start()
            acceptor.start()
        except BaseException:
            self.close()
            raise
        self._acceptor = acceptor

    def close(self) -> None:
        """Cut what is under way and wait for the threads. Safe to call twice."""
        listening, self._socket = self._socket, None
        if listening is None:
            return
        with self._lock:
            self._closing.set()
            open_now = dict(self._connections)
        listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        for connection in open_now:
            connection.cut("the weight server closes")
        deadline = time.monotonic() + _CUT_GRACE_S
        for thread in (self._acceptor, *open_now.values()):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        listening.close()
        with suppress(FileNotFoundError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self._on_close()

    def _accept(self, listening: socket.socket, on_transfer: Callable[[Incoming], None]) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                log.warning("connection not accepted", error=str(error))
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            self._begin(sock, on_transfer)

    def _begin(self, sock: socket.socket, on_transfer: Callable[[Incoming], None]) -> None:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        connection = Connection(
            sock,
            peer=f"process {pid}",
            deadline=time.monotonic() + self._settings.stage_timeout_s,
            wait_s=self._settings.connect_timeout_s,
        )
        with self._lock:
            refusal = "the weight server closes"
            if uid not in (os.getuid(), 0):
                refusal = f"user {uid} may not read weights of user {os.getuid()}"
            elif len(self._connections) >= _MAX_CONNECTIONS:
                refusal = f"{_MAX_CONNECTIONS} transfers are under way"
            elif not self._closing.is_set():
                thread = threading.Thread(
                    target=self._serve, args=(connection, pid, on_transfer), name=f"weights-{pid}", daemon=True
                )
                try:
                    thread.start()  # it ends under this lock, so not before it is noted
                except RuntimeError as error:
                    refusal = f"the weight server cannot serve it now: {error}"
                else:
                    self._connections[connection] = thread
                    return
        log.warning("weight transfer refused", pid=pid, reason=refusal)
        connection.give_up(refusal)
        sock.close()

    def _serve(self, connection: Connection, pid: int, on_transfer: Callable[[Incoming], None]) -> None:
        """One connection, from its first packet to its last."""
        try:
            with connection.sock:
                try:
                    incoming = self._incoming(connection)
                except WeightSyncError as error:
                    log.warning("connection is no receiver's", pid=pid, error=str(error))
                    connection.give_up(str(error))
                    return
                on_transfer(incoming)
        finally:
            with self._lock:
                del self._connections[connection]

    def _incoming(self, connection: Connection) -> UnixIncoming:
        packet = connection.receive()
        if not isinstance(packet, Hello):
            raise ProtocolError(f"{connection.peer} sent {type(packet).__name__}, expected Hello")
        request = packet.request
        connection.peer = f"engine {request.receiver!r} (staging {request.nonce})"
        connection.wait_s = self._settings.bucket_timeout_s
        return UnixIncoming(connection, request, self._terms, self._make_channel)


def _listen(path: Path) -> socket.socket:
    """A listening socket at `path`; takes the place of one that a dead process left behind.

    Raises:
        AddressTaken: a live process answers there, or it is no socket and not ours to remove.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        try:
            listening.bind(str(path))
        except OSError as error:
            if _answers(path):
                raise AddressTaken(f"another weight server answers on {path}") from error
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise AddressTaken(f"{path} is there and is no socket: weights cannot listen at it") from error
                path.unlink()
            listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(_MAX_CONNECTIONS)
    except BaseException:
        listening.close()
        raise
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def open_connection(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> tuple[Connection, Terms]:
    """Connect, ask, and be welcomed: the connection and the server's terms.

    Raises:
        PeerLost: nobody serves on `address`, or it went away.
        PeerFailed: the server refused; the message says why.
        ProtocolError: the two sides' terms differ.
    """
    path = socket_path(address, request.terms.transport)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = f"the weight server at {address}"
    connection = Connection(sock, peer=peer, deadline=time.monotonic() + timeout_s, wait_s=timeout_s)
    try:
        if on_open is not None:
            on_open(connection.cut)
        connection.connect(path)
        connection.send(Hello(request=request))
        packet = connection.receive()
        if not isinstance(packet, Welcome):
            raise ProtocolError(f"{peer} sent {type(packet).__name__}, expected Welcome")
        check_terms(request.terms, packet.terms, peer)
    except BaseException as error:
        if isinstance(error, ProtocolError):
            connection.give_up(str(error))
        sock.close()
        raise
    return connection, packet.terms
