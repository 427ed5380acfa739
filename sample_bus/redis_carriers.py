"""The Redis carriers: records in the server's streams, control messages over its channels.

Each end has a control thread (never blocked by records) and a record thread. Invariant: as `carrier` says.
"""

from __future__ import annotations

from configs.schema import BusSettings
from sample_bus.carrier import Deliver, Frames
from sample_bus.events import SERVER
from sample_bus.frames import Ack, Control
from sample_bus.position import StreamPosition
from sample_bus.redis_hub_control import HubControl
from sample_bus.redis_keys import keys_of
from sample_bus.redis_link_control import LinkControl
from sample_bus.redis_lock import RunLock
from sample_bus.redis_reader import ReaderThread
from sample_bus.redis_store import StoreThread
from sample_bus.redis_wire import Broker


class RedisHubCarrier:
    def __init__(self, broker: Broker, bus: BusSettings, lock: RunLock, *, run_id: str, deliver: Deliver) -> None:
        """`lock` was acquired (`redis_open.prepare_hub`)."""
        keys = keys_of(broker.address)
        self._address = str(broker.address)
        self._control = HubControl(broker, bus, keys, lock, run_id=run_id, deliver=deliver)
        self._reader = ReaderThread(broker, bus, keys, run_id, deliver=deliver)

    @property
    def address(self) -> str:
        return self._address

    def start(self) -> None:
        self._control.start()
        self._reader.start()

    def send(self, peer: bytes, message: Control, *, key: str | None = None) -> None:
        self._control.send(peer, message, key=key)

    def track(self, peer: bytes) -> None:
        self._control.track(peer)

    def forget(self, peer: bytes) -> None:
        self._control.forget(peer)

    def probe(self, peer: bytes) -> None:
        self._control.probe(peer)

    def open_stream(self, producer: str, epoch: int, first: int) -> None:
        self._reader.open_stream(producer, epoch, first)

    def close_streams(self, producer: str) -> None:
        self._reader.close_streams(producer)

    def room(self, producer: str, ack: Ack) -> None:
        self._reader.room(producer, ack)

    def commit(self, stream: StreamPosition) -> None:
        self._reader.commit(stream)

    async def close(self, *, flush_s: float) -> None:
        try:
            await self._reader.close(flush_s=flush_s)
        finally:
            await self._control.close(flush_s=flush_s)


class RedisLinkCarrier:
    def __init__(self, broker: Broker, bus: BusSettings, *, name: str, deliver: Deliver) -> None:
        keys = keys_of(broker.address)
        self._store = StoreThread(broker, keys, name, deliver=deliver)
        self._control = LinkControl(broker, bus, keys, name=name, deliver=deliver, received=self._store.received)

    def start(self) -> None:
        self._control.start()

    def send(self, message: Control, *, key: str | None = None) -> None:
        self._control.send(SERVER, message, key=key)

    def track(self) -> None:
        self._control.track(SERVER)

    def open_stream(self, run_id: str, *, renew: bool = False) -> None:
        self._store.open_stream(run_id, renew=renew)

    def store(self, seq: int, frames: Frames) -> None:
        self._store.store(seq, frames)

    def deliver(self, first: int | None, limit: int) -> None:
        """The trainer reads from the server by itself, within the room that it has."""

    def bound(self, max_bytes: int) -> None:
        """The trainer's end refuses what it reads."""

    def hold(self) -> None:
        """The trainer reads what it is ready for."""

    def free(self, watermark: int) -> None:
        """The trainer's end deletes what is committed; a copy here is freed when it is received."""

    def read(self, first: int, last: int) -> None:
        self._store.read(first, last)

    async def close(self, *, flush_s: float) -> None:
        try:
            await self._control.close(flush_s=flush_s)  # first: its thread tells the other one what was received
        finally:
            await self._store.close(flush_s=flush_s)
