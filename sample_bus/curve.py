"""Who may speak on a bus over TCP: CURVE keys of the trainer and of each client, and the door that checks them.

    DIR/server.key         the trainer's key pair; only where the trainer runs
    DIR/server.pub         its public key: what clients check the trainer by
    DIR/client.key         this host's key pair as a client
    DIR/clients/NAME.pub   clients that may connect; a file that is added or removed counts from the next connection on

Invariant: with keys, nobody without a listed key gets a byte through, in either direction, and nothing is readable on the way.
If the door's thread ends, nobody new gets in. A secret key that others may read is refused.

libzmq does not connect again after `HANDSHAKE_FAILED_AUTH` or `…_PROTOCOL`: a client that wants to must call `connect_again`.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq

from sample_bus.door import open_door, short
from sample_bus.errors import Insecure
from sample_bus.key_file import read_public, read_secret

log = structlog.get_logger()

SERVER_KEY = "server.key"
SERVER_PUBLIC = "server.pub"
CLIENT_KEY = "client.key"
CLIENTS = "clients"
CLIENT_EVENTS: int = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""What a client's socket monitor must ask for besides its own; `handshake_problem` puts it into words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    public: bytes
    """Z85, as all keys here."""
    secret: bytes = field(repr=False)
    directory: Path

    def name_of(self, public: bytes) -> str | None:
        """Name of the listed client with that key; None: it is not listed."""
        for path in sorted((self.directory / CLIENTS).glob("*.pub")):
            try:
                if read_public(path) == public:
                    return path.stem
            except Insecure as error:
                log.warning("key file passed over", error=str(error))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    public: bytes
    secret: bytes = field(repr=False)
    server_public: bytes
    directory: Path


def load_server(directory: Path) -> ServerKeys:
    """The trainer's keys. Raises Insecure naming the file and the remedy, also if no client could connect."""
    public, secret = read_secret(directory / SERVER_KEY)
    listed = sorted((directory / CLIENTS).glob("*.pub"))
    for path in listed:
        read_public(path)
    if not listed:
        raise Insecure(
            f"{directory / CLIENTS}: lists no client, so nobody could connect; `headrace keys new {directory} --client NAME`"
        )
    return ServerKeys(public=public, secret=secret, directory=directory)


def load_client(directory: Path) -> ClientKeys:
    """A client's keys. Raises Insecure naming the file and the remedy."""
    public, secret = read_secret(directory / CLIENT_KEY)
    return ClientKeys(public=public, secret=secret, server_public=read_public(directory / SERVER_PUBLIC), directory=directory)


def apply_server(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
    """Close `socket`, before it binds, to all but the clients that `keys` lists; whoever is refused is logged.

    Takes the socket's monitor. The thread that this starts ends when `context` is terminated.
    """
    _check_libzmq()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    open_door(socket, context, keys.name_of)


def apply_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Let `socket` prove who it is, and speak with the owner of `keys.server_public` only; call it before `connect`."""
    _check_libzmq()
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def connect_again(socket: zmq.Socket[bytes], address: str) -> None:
    """Begin a new connection after a failed handshake. To be called from the socket's thread, not faster than once a second."""
    try:
        socket.disconnect(address)
    except zmq.ZMQError as error:
        if error.errno not in (errno.ENOENT, errno.EINVAL):
            raise
    socket.connect(address)


def handshake_problem(event: int, value: int, keys: ClientKeys | None) -> str | None:
    """Why the trainer and this client did not get to speak, from an event of the client's monitor; None: another event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        of = f" ({short(keys.public)} of {keys.directory / CLIENT_KEY})" if keys is not None else ""
        return f"the trainer does not list this client's key{of} among its bus.keys_dir/{CLIENTS}"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if keys is None:
            return "it asks for keys and this end has none (bus.keys_dir)"
        return f"it asks for no keys and this end does (bus.keys_dir={keys.directory}): set it at both ends"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"what answers is no trainer of this version, or its keys do not fit (protocol error {value:#x})"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if keys is None:
            return (
                "it closed the connection in the handshake: it asks for keys (bus.keys_dir), is no trainer, or is just ending"
            )
        return (
            f"it closed the connection in the handshake: {keys.directory / SERVER_PUBLIC} ({short(keys.server_public)}) is not "
            "its key, or it asks for no keys"
        )
    return None


def _check_libzmq() -> None:
    if not zmq.has("curve"):
        raise Insecure("this libzmq has no CURVE: install a pyzmq that has it, or use ipc://")
