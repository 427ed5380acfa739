"""A Unix socket that carries control packets: one a message, each wait under a deadline.

Invariant: every error names the peer and where the transfer stands; a reason that the peer gave before it closed is never
lost behind the broken connection.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from weight_sync.errors import PeerFailed, PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.packets import MAX_PACKET_BYTES, Fail, Packet, decode, encode

_MAX_PATH_BYTES = 107


def socket_path(address: str, scheme: str) -> str:
    """The path in `SCHEME:/PATH`; raises `ValueError` on any other address."""
    path = address.removeprefix(f"{scheme}:")
    if path == address or not Path(path).is_absolute() or len(path.encode()) > _MAX_PATH_BYTES:
        raise ValueError(
            f"got weight-sync address {address!r}, expected {scheme}:/PATH with a path of at most {_MAX_PATH_BYTES} bytes"
        )
    return path


class Connection:
    """Sends and receives packets under deadlines; every error names the phase, the peer and the bucket."""

    def __init__(self, sock: socket.socket, *, peer: str, deadline: float, wait_s: float) -> None:
        self.sock = sock
        self.peer = peer
        self._deadline = deadline
        self.wait_s = wait_s
        self.cut_reason: str | None = None
        self.place = "handshake"
        """Where the transfer stands, for messages."""

    def _arm(self) -> float:
        wait_s = min(self.wait_s, self._deadline - time.monotonic())
        self.sock.settimeout(max(wait_s, 0.001))
        return wait_s

    def connect(self, path: str) -> None:
        """Raises PeerLost when nobody listens at `path`."""
        self._arm()
        try:
            self.sock.connect(path)
        except OSError as error:
            raise PeerLost(f"{self.peer} does not answer: {error}") from error

    def send(self, packet: Packet, fd: int | None = None) -> None:
        wait_s = self._arm()
        data = encode(packet)
        try:
            if fd is None:
                self.sock.sendall(data)
            else:
                socket.send_fds(self.sock, [data], [fd])
        except TimeoutError:
            raise TransferTimeout(f"{self.peer} took no packet for {wait_s:.1f} s, {self.place}") from None
        except OSError as error:
            raise self._last_words() or self._lost(error) from error

    def send_whenever(self, packet: Packet) -> None:
        """Send after the transfer, beyond its deadline; the peer takes it at once or not at all."""
        self.sock.settimeout(self.wait_s)
        try:
            self.sock.sendall(encode(packet))
        except OSError as error:
            raise self._lost(error) from error

    def receive_whenever(self) -> Packet | None:
        """The next packet after the transfer, however late; None: the connection ended, or brought what is no packet."""
        self.sock.settimeout(None)
        try:
            data = self.sock.recv(MAX_PACKET_BYTES)
            return decode(data) if data else None
        except (OSError, ProtocolError):
            return None

    def receive(self) -> Packet:
        packet, fd = self.receive_with_fd()
        if fd is not None:
            os.close(fd)  # nobody asked for it
        return packet

    def receive_with_fd(self) -> tuple[Packet, int | None]:
        wait_s = self._arm()
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise TransferTimeout(f"{self.peer} was silent for {wait_s:.1f} s, {self.place}") from None
        except OSError as error:
            raise self._last_words() or self._lost(error) from error
        fd = fds[0] if fds else None
        try:
            if not data:
                raise self._lost(None)
            packet = decode(data)
            if isinstance(packet, Fail):
                raise PeerFailed(f"{self.peer} stopped, {self.place}: {packet.reason}")
        except WeightSyncError:
            if fd is not None:
                os.close(fd)
            raise
        return packet, fd

    def _last_words(self) -> WeightSyncError | None:
        """A reason that the peer sent before it closed, if there is one."""
        try:
            self.sock.settimeout(0.001)
            while data := self.sock.recv(MAX_PACKET_BYTES):
                packet = decode(data)
                if isinstance(packet, Fail):
                    return PeerFailed(f"{self.peer} stopped, {self.place}: {packet.reason}")
        except (OSError, ProtocolError):
            return None
        return None

    def _lost(self, error: OSError | None) -> WeightSyncError:
        if self.cut_reason is not None:
            return TransferTimeout(f"{self.peer} was cut off, {self.place}: {self.cut_reason}")
        detail = f" ({error})" if error is not None else ""
        return PeerLost(f"{self.peer} closed the connection, {self.place}{detail}")

    def cut(self, reason: str) -> None:
        """End the transfer from another thread; its waits fail with `reason`."""
        self.cut_reason = reason
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already, which is what was wanted

    def give_up(self, reason: str) -> None:
        """Tell the peer why, if it still listens."""
        try:
            self.sock.settimeout(0.1)
            self.sock.sendall(encode(Fail(reason=reason)))
        except OSError:
            pass  # it is gone; the error that brought us here says so
