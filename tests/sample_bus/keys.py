"""Keys for tests, and bare ZeroMQ ends that use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from console.key_files import new_client, new_keys
from sample_bus import curve

HANG_MS = 30_000
Context = zmq.Context[zmq.Socket[bytes]]


def made_keys(directory: Path, *, clients: tuple[str, ...] = ()) -> Path:
    """The trainer's key directory, with those of more clients in `for-NAME` below it."""
    new_keys(directory)
    for name in clients:
        new_client(directory, name)
    return directory


class Server:
    """A ROUTER behind a door."""

    def __init__(self, keys: curve.ServerKeys | None, address: str = "tcp://127.0.0.1:*") -> None:
        self.context: Context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        if keys is not None:
            curve.apply_server(self.socket, self.context, keys)
        self.socket.bind(address)
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def next(self) -> bytes:
        """Last frame of the next message."""
        assert self.socket.poll(HANG_MS), "nothing came"
        return self.socket.recv_multipart()[-1]

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


class Client:
    """A DEALER that notes why it is not let in."""

    def __init__(self, keys: curve.ClientKeys | None, address: str) -> None:
        self.address = address
        self.keys = keys
        self.context: Context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if keys is not None:
            curve.apply_client(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(
            curve.CLIENT_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(address)

    def outcome(self) -> str:
        """Empty when the next handshake succeeds, else why it failed."""
        deadline = time.monotonic() + HANG_MS / 1000
        while self.monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return ""
            problem = curve.handshake_problem(event["event"], event["value"], self.keys)
            if problem is not None:
                return problem
        raise AssertionError("no handshake ended")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()


@contextmanager
def serving(keys: curve.ServerKeys | None) -> Iterator[Server]:
    server = Server(keys)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def calling(keys: curve.ClientKeys | None, address: str) -> Iterator[Client]:
    client = Client(keys, address)
    try:
        yield client
    finally:
        client.close()


def door_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bus-door"]
