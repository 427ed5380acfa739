"""One connection to a Redis server: commands in, plain replies out. The only place that touches redis-py.

Invariant: a command is sent once. What became of it is unknown when the connection breaks: callers send again only what may be
repeated. Replies are those of RESP2: bytes, int, list, None; an error reply is a value, `redis.ResponseError`, unless `call`
raises it.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import structlog
from redis import connection as redis_connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from configs.redis_address import RedisAddress
from configs.schema import BusSettings
from sample_bus.errors import BusError, Insecure

log = structlog.get_logger()

READ_BYTES = 256 << 10
"""Taken from the socket at once."""
SHORTEST_PATIENCE_S = 1.0
LONGEST_PATIENCE_S = 5.0

GONE = (redis.ConnectionError, redis.TimeoutError, OSError)
"""What a call raises when the connection is unusable from then on. `redis.AuthenticationError` is one of them."""

Reply = Any
Command = Sequence[str | bytes | memoryview | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """How a Redis server is reached."""

    address: RedisAddress
    username: str | None
    password: str | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    patience_s: float
    """Deadline of a short command, after which the server counts as gone."""
    bulk_patience_s: float
    """The same for commands that carry records."""

    def __str__(self) -> str:
        return f"redis at {self.address.server}"


def broker_of(bus: BusSettings, address: RedisAddress) -> Broker:
    """Raises BusError when the password file cannot be read, Insecure when it is empty."""
    return Broker(
        address=address,
        username=bus.redis_username,
        password=_password(bus.redis_password_file),
        ca_file=bus.redis_ca_file,
        cert_file=bus.redis_cert_file,
        key_file=bus.redis_key_file,
        patience_s=min(LONGEST_PATIENCE_S, max(SHORTEST_PATIENCE_S, bus.heartbeat_timeout_s / 4)),
        bulk_patience_s=max(LONGEST_PATIENCE_S, bus.heartbeat_timeout_s),
    )


def _password(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        password = file.read_text().strip("\r\n")
        mode = stat.S_IMODE(file.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise BusError(f"bus.redis_password_file={file}: {reason}") from None
    if not password:
        raise Insecure(f"bus.redis_password_file={file}: it is empty")
    if mode & 0o077:
        log.warning("password file is open to other users", path=str(file), mode=oct(mode), expected="0o600")
    return password


class Wire:
    def __init__(self, broker: Broker, *, patience_s: float) -> None:
        """Connect and authenticate; at most `patience_s` for each wait. Raises what is in `GONE`, or redis.ResponseError."""
        self._is_encrypted = broker.address.tls
        self._connection = _connection(broker, patience_s)
        self._connection.connect()

    def fileno(self) -> int:
        """Readable when a reply or the end of the connection is there (and nothing is buffered: see `readable`)."""
        sock = self._connection._sock  # noqa: SLF001 - redis-py tells nobody what to poll
        if sock is None:
            raise redis.ConnectionError("the connection is closed")
        number: int = sock.fileno()
        return number

    def readable(self, timeout_s: float = 0.0) -> bool:
        """Whether a reply has begun to arrive."""
        if not self._connection.can_read(timeout_s):
            return False
        if not self._is_encrypted:
            return True
        # What TLS has to say for itself (session tickets) makes a socket readable, too: only what it decrypts to is a reply.
        parser = self._connection._parser  # noqa: SLF001
        return bool(parser._reader.has_data() or parser.read_from_socket(timeout=0, raise_on_timeout=False))  # noqa: SLF001

    def send(self, *commands: Command) -> None:
        packed = self._connection.pack_commands([_plain(command) for command in commands])
        self._connection.send_packed_command(packed, check_health=False)

    def receive(self) -> Reply:
        """The next reply; an error reply is returned."""
        try:
            return self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except redis.ConnectionError:
            raise
        except redis.ResponseError as error:
            return error

    def call(self, *command: str | bytes | memoryview | int) -> Reply:
        """One command's reply. Raises redis.ResponseError if it is an error."""
        self.send(command)
        reply = self.receive()
        if isinstance(reply, redis.ResponseError):
            raise reply
        return reply

    def calls(self, commands: Sequence[Command]) -> list[Reply]:
        """All commands in one round trip; error replies among the others."""
        if not commands:
            return []
        self.send(*commands)
        return [self.receive() for _ in commands]

    def close(self) -> None:
        self._connection.disconnect()

    def abort(self) -> None:
        """Break off what another thread waits for on this connection."""
        sock = self._connection._sock  # noqa: SLF001
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _connection(broker: Broker, patience_s: float) -> Any:
    address = broker.address
    common: dict[str, Any] = {
        "db": address.db,
        "username": broker.username if broker.password is not None else None,
        "password": broker.password,
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": patience_s,
        "socket_connect_timeout": min(patience_s, broker.patience_s),
        "socket_read_size": READ_BYTES,
    }
    kinds: Any = redis_connection  # typed in part
    if address.path:
        return kinds.UnixDomainSocketConnection(path=address.path, **common)
    common |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if not address.tls:
        return kinds.Connection(**common)
    return kinds.SSLConnection(
        ssl_ca_certs=_text(broker.ca_file), ssl_certfile=_text(broker.cert_file), ssl_keyfile=_text(broker.key_file), **common
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path)


def _plain(command: Command) -> list[str | bytes | int]:
    """The packer takes no views."""
    return [bytes(word) if isinstance(word, memoryview) else word for word in command]


def wait_readable(wires: Sequence[Wire], wake_fd: int, timeout_s: float) -> None:
    """Sleep until something arrives on one of the connections, `wake_fd` is written, or the time is over."""
    if any(wire.readable() for wire in wires):
        return
    poller = select.poll()
    for wire in wires:
        poller.register(wire.fileno(), select.POLLIN)
    poller.register(wake_fd, select.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000) + 1))
