"""A client's control thread over Redis. Its only peer is the trainer, which it finds by who is subscribed, or is told of.

Invariant: each connection of a client has a name of its own, so what was meant for an earlier one reaches nobody; letters of a
trainer that is not the present one are passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from configs.schema import BusSettings
from sample_bus.carrier import Deliver
from sample_bus.events import SERVER, Connected, Unreachable
from sample_bus.frames import Ack, Control, Opened
from sample_bus.redis_control import ControlThread
from sample_bus.redis_keys import RunKeys, letter
from sample_bus.redis_post import Channel, Post
from sample_bus.redis_wire import Broker


class LinkControl(ControlThread):
    def __init__(
        self,
        broker: Broker,
        bus: BusSettings,
        keys: RunKeys,
        *,
        name: str,
        deliver: Deliver,
        received: Callable[[int], None],
    ) -> None:
        """`received` is called in the thread: the trainer holds every record below that number."""
        super().__init__(broker, bus, keys, name=name, deliver=deliver)
        self._received = received
        self._process = secrets.token_hex(6)
        self._num_connections = 0
        self._me = b""
        self._hub: bytes | None = None
        self._is_present = False
        self._has_problem = False
        """It was said that the server cannot be reached."""

    def _channels(self) -> Sequence[Channel]:
        self._num_connections += 1
        self._me = f"{self._process}.{self._num_connections}".encode()
        return (self._keys.client_channel(self._me), self._keys.all_channel)

    def _came_up(self, post: Post) -> None:
        if post.num_subscribers(self._keys.hub_channel):
            self._is_present = True
            self._io.emit(Connected())
        elif self._has_problem:
            self._io.emit(Unreachable(problem=f"{self._broker} is there again, and no trainer of the run is"))
        self._has_problem = False

    def _went_down(self, problem: str) -> None:
        self._has_problem = True
        self._unheard(SERVER)
        self._io.emit(Unreachable(problem=problem))

    def _accepts(self, channel: bytes, sender: bytes) -> bytes | None:
        if channel == self._keys.all_channel.encode():
            self._hub = sender
            self._is_present = True
            self._io.emit(Connected())
            return None
        if not self._is_present:
            return None
        self._hub = self._hub or sender
        return SERVER if sender == self._hub else None

    def _letter(self, peer: bytes, frame: bytes) -> tuple[Channel, bytes]:
        return self._keys.hub_channel, letter(self._me, frame)

    def _unheard(self, peer: bytes) -> None:
        if self._is_present:
            self._is_present = False
            self._hub = None
            self._cut(SERVER)

    def _keep_up(self, post: Post) -> None:
        """Nothing: the heartbeats tell whether the trainer is subscribed."""

    def _leave(self, post: Post) -> None:
        """Nothing: a goodbye is a message like any other."""

    def _take_early(self, peer: bytes, message: Control) -> bool:
        if isinstance(message, Ack):
            self._received(message.received)
        elif isinstance(message, Opened):
            self._received(message.ack.received)
        return False
