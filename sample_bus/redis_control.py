"""The thread of an end's control channel over Redis: heartbeats, silence, messages, and the connection to the server itself.

What differs between the ends is in `redis_link_control` and `redis_hub_control`. Invariant: as `zmq_io` for a socket: messages
to one peer leave in order; one with a `key` takes back an unsent one with the same key; what is unsent when the connection
breaks is gone, and its Disconnected is reported. A server that does not answer is a broken connection within its patience.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import redis
import structlog

from configs.schema import BusSettings
from sample_bus.carrier import Deliver
from sample_bus.errors import WireError
from sample_bus.events import Arrived, Disconnected, HeardAgain, Malformed, Silent
from sample_bus.frames import Control, Heartbeat, decode_control, encode_control
from sample_bus.liveness import Liveness
from sample_bus.redis_keys import RunKeys, read_letter
from sample_bus.redis_post import Channel, Post
from sample_bus.redis_thread import Backoff, IoThread
from sample_bus.redis_wire import GONE, Broker, wait_readable

log = structlog.get_logger()

RECONNECT_S = 0.05
RECONNECT_MAX_S = 1.0
_HEARTBEAT = encode_control(Heartbeat())


class ControlThread(ABC):
    def __init__(self, broker: Broker, bus: BusSettings, keys: RunKeys, *, name: str, deliver: Deliver) -> None:
        self._broker = broker
        self._keys = keys
        self._io = IoThread(name, deliver=deliver)
        self._interval_s = bus.heartbeat_interval_s
        now = time.monotonic()
        self._liveness = Liveness(
            timeout_s=bus.heartbeat_timeout_s, longest_tick_s=max(2 * self._interval_s, 3 * broker.patience_s), now=now
        )
        self._post: Post | None = None
        self._backoff = Backoff(first_s=RECONNECT_S, longest_s=RECONNECT_MAX_S)
        self._next_try = self._next_beat = now
        self._unsent: dict[tuple[bytes, str | int], bytes] = {}
        self._num_unkeyed = 0
        self._beating: set[bytes] = set()
        self._probed: set[bytes] = set()
        self._stopping = False
        self._is_up = self._has_been_up = False
        self._problem = ""

    # ── called in the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._io.start(self._serve)

    def send(self, peer: bytes, message: Control, *, key: str | None = None) -> None:
        frame = encode_control(message)
        self._io.command(lambda: self._enqueue(peer, frame, key))

    def track(self, peer: bytes) -> None:
        """From now on send heartbeats to the peer and report its silence."""
        self._io.command(lambda: self._track(peer))

    def forget(self, peer: bytes) -> None:
        """Stop that, and drop what is unsent."""
        self._io.command(lambda: self._forget(peer))

    def probe(self, peer: bytes) -> None:
        """Send a heartbeat now and report HeardAgain when the peer is next heard."""
        self._io.command(lambda: self._probe(peer))

    async def close(self, *, flush_s: float) -> None:
        """Send what was handed over and end the thread."""
        self._io.command(self._stop)
        await self._io.end(flush_s=flush_s, abort=self._abort)

    def _abort(self) -> None:
        post = self._post
        if post is not None:
            post.abort()

    # ── what the ends do themselves ──────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _channels(self) -> Sequence[Channel]:
        """What to subscribe to on a new connection."""

    @abstractmethod
    def _came_up(self, post: Post) -> None:
        """The server is there, or there again."""

    @abstractmethod
    def _went_down(self, problem: str) -> None:
        """The server is gone, and with it everything unsent; or it cannot be reached, said once for each reason."""

    @abstractmethod
    def _accepts(self, channel: bytes, sender: bytes) -> bytes | None:
        """The peer whose letter this is; None: it is dealt with."""

    @abstractmethod
    def _letter(self, peer: bytes, frame: bytes) -> tuple[Channel, bytes]:
        """Where to publish a frame for the peer, and as what."""

    @abstractmethod
    def _unheard(self, peer: bytes) -> None:
        """Nobody received what was published for the peer."""

    @abstractmethod
    def _keep_up(self, post: Post) -> None:
        """Once each heartbeat interval, while the server is there."""

    @abstractmethod
    def _take_early(self, peer: bytes, message: Control) -> bool:
        """Whether the message is dealt with here."""

    @abstractmethod
    def _leave(self, post: Post) -> None:
        """The thread ends in good order."""

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._sleep()
                now = time.monotonic()
                self._liveness.tick(now)
                self._io.run_commands()
                self._exchange(now)
                for peer, silent_s in self._liveness.expired(now):
                    self._io.emit(Silent(peer=peer, silent_s=silent_s))
                self._io.hand_over()
        finally:
            self._disconnect()

    def _sleep(self) -> None:
        until = self._next_beat if self._post is not None else min(self._next_beat, self._next_try)
        wires = [] if self._post is None else [self._post.subscribed]
        try:
            wait_readable(wires, self._io.wake_fd, until - time.monotonic())
        except GONE as error:
            self._lose(error)

    def _exchange(self, now: float) -> None:
        try:
            if self._post is None and now >= self._next_try and not (self._stopping and self._has_been_up):
                self._connect()  # once also when it is to end already: what was taken at the server must be given back
            post = self._post
            if post is not None:
                for channel, data in post.receive():
                    self._read(channel, data, now)
            if now >= self._next_beat:
                self._next_beat = now + self._interval_s
                for peer in self._beating:
                    self._enqueue(peer, _HEARTBEAT, "heartbeat")
                if post is not None:
                    post.check_alive(now)
                    self._keep_up(post)
            self._flush()
            if post is not None and self._stopping:
                self._leave(post)
        except (*GONE, redis.ResponseError) as error:
            self._lose(error)

    def _connect(self) -> None:
        post = Post(self._broker, self._channels())
        self._post = post
        self._came_up(post)
        self._is_up = self._has_been_up = True
        self._backoff.worked()
        self._problem = ""

    def _lose(self, error: Exception) -> None:
        """The server is gone, does not take us, or does not answer: try again later."""
        was_up, self._is_up = self._is_up, False
        self._disconnect()
        self._next_try = time.monotonic() + self._backoff.failed()
        self._unsent.clear()
        state = "is gone" if self._has_been_up else "cannot be used"
        problem = f"{self._broker} {state}: {error or type(error).__name__}"
        if was_up or problem != self._problem:
            self._problem = problem
            log.warning(
                "redis is gone" if self._has_been_up else "redis cannot be used", server=str(self._broker), error=str(error)
            )
            self._went_down(problem)

    def _disconnect(self) -> None:
        if self._post is not None:
            self._post.close()
            self._post = None

    def _read(self, channel: bytes, data: bytes, now: float) -> None:
        sender, frame = b"", data
        try:
            sender, frame = read_letter(data)
            peer = self._accepts(channel, sender)
            if peer is None:
                return
            if self._liveness.heard(peer, now) or peer in self._probed:
                self._probed.discard(peer)
                self._io.emit(HeardAgain(peer=peer))
            message = decode_control(frame)
            if self._take_early(peer, message):
                return
            if not isinstance(message, Heartbeat) or peer not in self._beating:
                self._io.emit(Arrived(peer=peer, message=message))
        except WireError as error:
            self._io.emit(Malformed(peer=sender, seq=None, error=str(error), frames=(memoryview(frame),)))

    # sending

    def _enqueue(self, peer: bytes, frame: bytes, key: str | None) -> None:
        self._num_unkeyed += 1
        place = (peer, self._num_unkeyed if key is None else key)
        self._unsent.pop(place, None)
        self._unsent[place] = frame

    def _flush(self) -> None:
        if self._post is None:
            self._unsent.clear()
        if not self._unsent or self._post is None:
            return
        peers = [peer for peer, _ in self._unsent]
        letters = [self._letter(peer, frame) for (peer, _), frame in self._unsent.items()]
        receivers = self._post.publish(letters)
        self._unsent.clear()
        for peer in dict.fromkeys(peer for peer, number in zip(peers, receivers, strict=True) if number == 0):
            self._unheard(peer)

    def _cut(self, peer: bytes) -> None:
        """The peer has no connection any more."""
        self._beating.discard(peer)
        self._io.emit(Disconnected(peer=peer))

    # peers

    def _track(self, peer: bytes) -> None:
        self._beating.add(peer)
        self._liveness.track(peer, time.monotonic())

    def _forget(self, peer: bytes) -> None:
        self._beating.discard(peer)
        self._probed.discard(peer)
        self._liveness.forget(peer)
        for place in [place for place in self._unsent if place[0] == peer]:
            del self._unsent[place]

    def _probe(self, peer: bytes) -> None:
        self._probed.add(peer)
        self._enqueue(peer, _HEARTBEAT, "heartbeat")

    def _stop(self) -> None:
        self._stopping = True
