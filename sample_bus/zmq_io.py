"""The thread that owns an end's socket.

It sends what the event loop hands it, hands over what arrives (decoded, in batches), sends heartbeats and notices silence, so a
busy event loop never looks like a dead process. It sleeps until something happens: a message, a wake by the loop, a heartbeat.

Invariant: the event loop never touches the socket, the thread never touches the loop's state. Messages to one peer leave in the
order in which they were handed over; one with a `key` takes back an unsent one with the same key.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from configs.schema import BusSettings
from sample_bus import curve, wire
from sample_bus.address import needs_ipv6
from sample_bus.carrier import FLUSH_S
from sample_bus.closed_seat import ClosedSeat
from sample_bus.errors import WireError
from sample_bus.events import (
    SERVER,
    Arrived,
    ArrivedClosure,
    ArrivedSample,
    Connected,
    Crashed,
    Disconnected,
    Event,
    HeardAgain,
    Malformed,
    Silent,
    Unreachable,
)
from sample_bus.frames import MAX_CONTROL_BYTES, Control, Data, Heartbeat, decode_control, encode_control
from sample_bus.liveness import Liveness

log = structlog.get_logger()

HIGH_WATER_MARK = 1000
"""Messages that libzmq queues for one peer; more wait here."""
_BATCH = 256
_RETRY_S = 0.05
_CONNECT_AGAIN_S = 1.0
_END_S = 10.0

Frames = Sequence[bytes | memoryview]


def set_options(socket: zmq.Socket[bytes], bus: BusSettings, address: str) -> None:
    """Options that both ends share."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, max(bus.max_sample_bytes, MAX_CONTROL_BYTES) + 1024)
    if needs_ipv6(address):
        socket.setsockopt(zmq.IPV6, 1)
    if address.startswith("tcp://"):
        # A host that vanishes leaves a connection that never breaks by itself.
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(bus.heartbeat_timeout_s * 500))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(bus.heartbeat_timeout_s * 1000))


class SocketThread:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        bus: BusSettings,
        *,
        name: str,
        deliver: Callable[[list[Event]], None],
        address: str = "",
        keys: curve.ClientKeys | None = None,
    ) -> None:
        """Takes over `context` and `socket` (ROUTER or DEALER); `deliver` is called in the running event loop. A client's
        `address` is what it connects to, `keys` those that were applied to it."""
        self._context = context
        self._socket = socket
        self._routed = socket.type == zmq.ROUTER
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._interval_s = bus.heartbeat_interval_s
        self._max_sample_bytes = bus.max_sample_bytes
        self._heartbeat = [encode_control(Heartbeat())]
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._liveness = Liveness(
            timeout_s=bus.heartbeat_timeout_s, longest_tick_s=2 * bus.heartbeat_interval_s, now=time.monotonic()
        )
        self._connected = self._routed
        self._beating: set[bytes] = set()
        self._probed: set[bytes] = set()
        self._backlog: dict[bytes, dict[str | int, Frames]] = {}
        self._num_unkeyed = 0
        self._events: list[Event] = []
        self._stop_at: float | None = None
        self._address = address
        self._keys = keys
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._at_end: list[Callable[[], None]] = []
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | curve.CLIENT_EVENTS
        self._monitor = None if self._routed else socket.get_monitor_socket(watched)
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"bus-{name}", daemon=True)

    # ── called in the event loop ─────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._thread.start()

    def discard(self) -> None:
        """Close what was taken over, for a thread that was not started."""
        self._release()
        os.close(self._wake_fd)

    def send(self, peer: bytes, frames: Frames, *, key: str | None = None) -> None:
        self.command(lambda: self.enqueue(peer, frames, key))

    def send_control(self, peer: bytes, message: Control, *, key: str | None = None) -> None:
        self.send(peer, [encode_control(message)], key=key)

    def track(self, peer: bytes) -> None:
        """From now on send heartbeats to the peer and report its silence."""
        self.command(lambda: self._track(peer))

    def forget(self, peer: bytes) -> None:
        """Stop that, and drop what is unsent."""
        self.command(lambda: self._forget(peer))

    def probe(self, peer: bytes) -> None:
        """Send a heartbeat now and report HeardAgain when the peer is next heard."""
        self.command(lambda: self._probe(peer))

    async def close(self, *, flush_s: float) -> None:
        """Send what was handed over, within `flush_s`, and end the thread. The socket is closed afterwards."""
        self.command(lambda: self._stop(flush_s))
        async with asyncio.timeout(flush_s + _END_S):
            await self._ended.wait()
        self._thread.join()

    def command(self, command: Callable[[], None]) -> None:
        """Have `command` carried out in the thread, after those that were given before."""
        if self._ended.is_set():
            return
        self._commands.append(command)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)

    def _finish(self) -> None:
        os.close(self._wake_fd)
        self._ended.set()

    # ── called in the thread, by commands ────────────────────────────────────────────────────────────────────────────

    def emit(self, event: Event) -> None:
        """Tell the loop, with the next batch."""
        self._events.append(event)

    def enqueue(self, peer: bytes, frames: Frames, key: str | None = None) -> None:
        """Send, now or when the peer's queue has room."""
        self._num_unkeyed += 1
        place = self._num_unkeyed if key is None else key
        backlog = self._backlog.setdefault(peer, {})
        backlog.pop(place, None)
        backlog[place] = frames
        if len(backlog) == 1:
            self._flush(peer)

    def at_end(self, command: Callable[[], None]) -> None:
        """Have `command` carried out once the commands that are there now have been."""
        self._at_end.append(command)

    def after(self, delay_s: float, command: Callable[[], None]) -> None:
        """Have `command` carried out in the thread later."""
        self._timers.append((time.monotonic() + delay_s, command))

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - reported to the loop, which fails every wait with it
            self._events.append(Crashed(error=f"{type(error).__name__}: {error}"))
        finally:
            self._release()
            self._hand_over()
            self._call_loop(self._finish)

    def _release(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=int(FLUSH_S * 1000))
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)
        next_beat = time.monotonic()
        while True:
            waits_to_send = bool(self._backlog) and not self._routed
            poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if waits_to_send else zmq.POLLIN)
            ready = dict(poller.poll(self._timeout_ms(next_beat)))
            now = time.monotonic()
            self._liveness.tick(now)
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._woken = False
            while self._commands:
                self._commands.popleft()()
            while self._at_end:
                self._at_end.pop()()
            if self._monitor is not None and self._monitor in ready:
                self._note_connection(self._monitor)
            if ready.get(self._socket, 0) & zmq.POLLIN:
                self._receive(now)
            for peer in list(self._backlog):
                self._flush(peer)
            self._run_timers(now)
            if now >= next_beat:
                next_beat = now + self._interval_s
                self._beat()
            for peer, silent_s in self._liveness.expired(now):
                self._events.append(Silent(peer=peer, silent_s=silent_s))
            self._hand_over()
            if self._stop_at is not None and (not self._backlog or now >= self._stop_at):
                return

    def _timeout_ms(self, next_beat: float) -> int:
        now = time.monotonic()
        until = next_beat if self._stop_at is None else min(next_beat, self._stop_at)
        if self._backlog and self._routed:  # a ROUTER does not tell when one peer's queue has room again
            until = min(until, now + _RETRY_S)
        until = min([until, *(when for when, _ in self._timers)])
        return max(0, int((until - now) * 1000) + 1)

    def _run_timers(self, now: float) -> None:
        due = [command for when, command in self._timers if when <= now]
        if due:
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for command in due:
                command()

    # receiving

    def _receive(self, now: float) -> None:
        for _ in range(_BATCH):
            try:
                frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            peer = bytes(frames.pop(0)) if self._routed else SERVER
            if self._liveness.heard(peer, now) or peer in self._probed:
                self._probed.discard(peer)
                self._events.append(HeardAgain(peer=peer))
            self._take(peer, tuple(frames))

    def _take(self, peer: bytes, frames: tuple[memoryview, ...]) -> None:
        seq: int | None = None
        try:
            if not frames:
                raise WireError("message without frames")
            message = decode_control(frames[0], len(frames) - 1)
            if isinstance(message, Data):
                seq = message.seq
                sample_id, record = wire.decode(frames[1:], max_bytes=self._max_sample_bytes)
                nbytes = wire.num_bytes(frames[1:])
                if isinstance(record, ClosedSeat):
                    self._events.append(
                        ArrivedClosure(peer=peer, seq=seq, nbytes=nbytes, id=sample_id, closed=record, frames=frames)
                    )
                else:
                    self._events.append(
                        ArrivedSample(peer=peer, seq=seq, nbytes=nbytes, id=sample_id, sample=record, frames=frames)
                    )
            elif not isinstance(message, Heartbeat) or peer not in self._beating:
                self._events.append(Arrived(peer=peer, message=message))
        except WireError as error:
            self._events.append(Malformed(peer=peer, seq=seq, error=str(error), frames=frames))

    def _note_connection(self, monitor: zmq.Socket[bytes]) -> None:
        while monitor.poll(0):
            message = recv_monitor_message(monitor)
            problem = curve.handshake_problem(message["event"], message["value"], self._keys)
            if problem is not None:
                self._events.append(Unreachable(problem=problem))
                if message["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # libzmq gives up after the others
                    self.after(_CONNECT_AGAIN_S, lambda: curve.connect_again(self._socket, self._address))
            elif message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._events.append(Connected())
            else:
                self._connected = False
                self._backlog.clear()
                self._events.append(Disconnected(peer=SERVER))

    # sending

    def _flush(self, peer: bytes) -> None:
        """Send what waits for the peer until its queue is full or its connection is found gone."""
        backlog = self._backlog[peer]
        while backlog:
            place = next(iter(backlog))
            if not self._try_send(peer, backlog[place]):
                return
            backlog.pop(place, None)
        self._backlog.pop(peer, None)

    def _try_send(self, peer: bytes, frames: Frames) -> bool:
        """False if the peer's queue is full. A message to a peer that is gone counts as sent: its Disconnected is reported."""
        if not self._connected:
            return True
        try:
            self._socket.send_multipart([peer, *frames] if self._routed else frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if peer in self._backlog:
                self._backlog[peer].clear()
            self._beating.discard(peer)
            self._events.append(Disconnected(peer=peer))
        return True

    # peers

    def _beat(self) -> None:
        for peer in list(self._beating):
            if peer not in self._backlog:
                self._try_send(peer, self._heartbeat)

    def _track(self, peer: bytes) -> None:
        self._beating.add(peer)
        self._liveness.track(peer, time.monotonic())

    def _probe(self, peer: bytes) -> None:
        self._probed.add(peer)
        if peer not in self._backlog:
            self._try_send(peer, self._heartbeat)

    def _forget(self, peer: bytes) -> None:
        self._beating.discard(peer)
        self._probed.discard(peer)
        self._liveness.forget(peer)
        self._backlog.pop(peer, None)

    # the loop

    def _stop(self, flush_s: float) -> None:
        self._stop_at = time.monotonic() + flush_s

    def _hand_over(self) -> None:
        if self._events:
            batch, self._events = self._events, []
            self._call_loop(lambda: self._deliver(batch))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop was closed without closing the bus: nobody is left to tell
            self._stop_at = self._stop_at or time.monotonic()
