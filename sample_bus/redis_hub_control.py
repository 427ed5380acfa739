"""The trainer's control thread over Redis: speaks with every client's connection, says when it is there, keeps the run's lock.

Invariant: a client whose letters may have been lost is asked to greet anew as soon as it is heard: nobody waits for what will
never come. A trainer that finds the lock in other hands ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from configs.schema import BusSettings
from sample_bus.carrier import Deliver
from sample_bus.events import Connected, Unreachable
from sample_bus.frames import Control, Heartbeat, Hello, Reset, encode_control
from sample_bus.redis_control import ControlThread
from sample_bus.redis_keys import RunKeys, letter
from sample_bus.redis_lock import RunLock
from sample_bus.redis_post import Channel, Post
from sample_bus.redis_wire import Broker

_RESET = encode_control(Reset())


class HubControl(ControlThread):
    def __init__(
        self, broker: Broker, bus: BusSettings, keys: RunKeys, lock: RunLock, *, run_id: str, deliver: Deliver
    ) -> None:
        super().__init__(broker, bus, keys, name="hub", deliver=deliver)
        self._lock = lock
        self._run_id = run_id
        self._me = secrets.token_hex(6).encode()
        self._severed: set[bytes] = set()

    def _channels(self) -> Sequence[Channel]:
        return (self._keys.hub_channel, self._keys.run_channel(self._run_id))

    def _came_up(self, post: Post) -> None:
        self._lock.renew(post.publishing)
        post.publish([(self._keys.all_channel, letter(self._me, _RESET))])
        self._io.emit(Connected())

    def _went_down(self, problem: str) -> None:
        self._io.emit(Unreachable(problem=problem))
        for peer in list(self._beating):
            self._unheard(peer)

    def _accepts(self, channel: bytes, sender: bytes) -> bytes | None:
        return sender

    def _letter(self, peer: bytes, frame: bytes) -> tuple[Channel, bytes]:
        return self._keys.client_channel(peer), letter(self._me, frame)

    def _unheard(self, peer: bytes) -> None:
        if peer in self._beating:
            self._severed.add(peer)
        self._cut(peer)

    def _keep_up(self, post: Post) -> None:
        self._lock.renew(post.publishing)

    def _take_early(self, peer: bytes, message: Control) -> bool:
        if peer in self._severed:
            if isinstance(message, Heartbeat):
                self._enqueue(peer, _RESET, "reset")
                return True
            if isinstance(message, Hello):
                self._severed.discard(peer)
        return False

    def _track(self, peer: bytes) -> None:
        self._severed.discard(peer)
        super()._track(peer)

    def _forget(self, peer: bytes) -> None:
        self._severed.discard(peer)
        super()._forget(peer)

    def _leave(self, post: Post) -> None:
        self._lock.release(post.publishing)
