"""The ZeroMQ carriers: the trainer's ROUTER, and a client's DEALER with its spool."""

from __future__ import annotations

from pathlib import Path

import structlog
import zmq

from configs.schema import BusSettings
from sample_bus import curve
from sample_bus.carrier import Deliver, Frames
from sample_bus.errors import AddressInUse, BusError
from sample_bus.events import SERVER
from sample_bus.frames import Ack, Control
from sample_bus.outflow import Outflow
from sample_bus.position import StreamPosition
from sample_bus.zmq_io import SocketThread, set_options

log = structlog.get_logger()

RECONNECT_MS = 100
RECONNECT_MAX_MS = 2000


class ZmqHubCarrier:
    def __init__(self, bus: BusSettings, *, address: str, deliver: Deliver) -> None:
        """Bind. Raises AddressInUse, Insecure."""
        keys = _server_keys(bus, address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            set_options(socket, bus, address)
            if keys is not None:
                curve.apply_server(socket, context, keys)
            socket.bind(address)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise AddressInUse(f"{address}: cannot listen there: {error}") from error
        except BaseException:
            context.destroy(linger=0)
            raise
        self._address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._thread = SocketThread(context, socket, bus, name="hub", deliver=deliver)

    @property
    def address(self) -> str:
        return self._address

    def start(self) -> None:
        self._thread.start()

    def send(self, peer: bytes, message: Control, *, key: str | None = None) -> None:
        self._thread.send_control(peer, message, key=key)

    def track(self, peer: bytes) -> None:
        self._thread.track(peer)

    def forget(self, peer: bytes) -> None:
        self._thread.forget(peer)

    def probe(self, peer: bytes) -> None:
        self._thread.probe(peer)

    def open_stream(self, producer: str, epoch: int, first: int) -> None:
        """The producer sends by itself."""

    def close_streams(self, producer: str) -> None:
        """The producer was told to greet anew; what it sends until then has no open stream."""

    def room(self, producer: str, ack: Ack) -> None:
        """The producer has credit of its own."""

    def commit(self, stream: StreamPosition) -> None:
        """The ACK tells the producer."""

    async def close(self, *, flush_s: float) -> None:
        await self._thread.close(flush_s=flush_s)


class ZmqLinkCarrier:
    def __init__(self, bus: BusSettings, *, address: str, name: str, spool_dir: Path | None, deliver: Deliver) -> None:
        """Begin to connect. Raises BusError for what is no address, Insecure."""
        keys = _client_keys(bus, address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        set_options(socket, bus, address)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if keys is not None:
            curve.apply_client(socket, keys)
        self._thread = SocketThread(context, socket, bus, name=name, deliver=deliver, address=address, keys=keys)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._thread.discard()
            raise BusError(f"{address}: not an address of a bus: {error}") from error
        self._outflow = Outflow(self._thread, spool_dir, name, sync=bus.spool_sync)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Control, *, key: str | None = None) -> None:
        self._thread.send_control(SERVER, message, key=key)

    def track(self) -> None:
        self._thread.track(SERVER)

    def open_stream(self, run_id: str, *, renew: bool = False) -> None:
        self._thread.command(lambda: self._outflow.open_stream(run_id, renew=renew))

    def store(self, seq: int, frames: Frames) -> None:
        self._thread.command(lambda: self._outflow.store(seq, frames))

    def deliver(self, first: int | None, limit: int) -> None:
        self._thread.command(lambda: self._outflow.deliver(first, limit))

    def bound(self, max_bytes: int) -> None:
        self._thread.command(lambda: self._outflow.bound(max_bytes))

    def hold(self) -> None:
        self._thread.command(self._outflow.hold)

    def free(self, watermark: int) -> None:
        self._thread.command(lambda: self._outflow.free(watermark))

    def read(self, first: int, last: int) -> None:
        self._thread.command(lambda: self._outflow.read(first, last))

    async def close(self, *, flush_s: float) -> None:
        self._thread.command(self._outflow.close)
        await self._thread.close(flush_s=flush_s)


def _server_keys(bus: BusSettings, address: str) -> curve.ServerKeys | None:
    return curve.load_server(bus.keys_dir) if bus.keys_dir is not None and address.startswith("tcp://") else None


def _client_keys(bus: BusSettings, address: str) -> curve.ClientKeys | None:
    return curve.load_client(bus.keys_dir) if bus.keys_dir is not None and address.startswith("tcp://") else None
