"""One trainer for each run on a Redis server: a key that its holder renews and that expires when the holder is gone.

Invariant: of two live trainers of one run the second is refused. The place of one that was killed on this machine is taken at
once; of one on another machine once its key has expired.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import redis
import structlog

from sample_bus.errors import AddressInUse, WireError
from sample_bus.packing import pack, unpack
from sample_bus.redis_keys import RunKeys
from sample_bus.redis_wire import Wire

log = structlog.get_logger()

_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process on some machine."""

    token: str
    host: str
    space: str
    """Names the machine's boot and the space of process numbers; processes of another space cannot be looked at."""
    pid: int
    started: int
    """Clock ticks since boot: tells the process from a later one with the same number."""

    def packed(self) -> bytes:
        return pack([self.token, self.host, self.space, self.pid, self.started])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def read_holder(data: bytes) -> Holder | None:
    """None for what is no holder."""
    try:
        values = unpack(data, "lock")
    except WireError:
        return None
    match values:
        case [str(token), str(host), str(space), int(pid), int(started)]:
            return Holder(token=token, host=host, space=space, pid=pid, started=started)
    return None


def this_process() -> Holder:
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        space=f"{boot} {namespace}",
        pid=pid,
        started=_started(pid) or 0,
    )


def has_ended(holder: Holder, me: Holder) -> bool:
    """Whether the process is known to have ended; False also where that cannot be known."""
    return holder.space == me.space and _started(holder.pid) != holder.started


def _started(pid: int) -> int | None:
    """When that process started; None: there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class RunLock:
    def __init__(self, keys: RunKeys, *, server: str, expires_s: float) -> None:
        self._keys = keys
        self._server = server
        self._expires_ms = max(1, int(expires_s * 1000))
        self._me = this_process()
        self._value = self._me.packed()

    def acquire(self, wire: Wire, given_up: threading.Event) -> None:
        """Take the lock; waits, at most until it expires or `given_up`, for a holder that is gone but cannot be looked at.

        Raises AddressInUse, what is in `redis_wire.GONE`, redis.ResponseError.
        """
        give_up_at = time.monotonic() + 2 * self._expires_ms / 1000
        last_ms = self._expires_ms + 1
        while not self._set_new(wire) and not given_up.is_set():
            value, left_ms = wire.calls([("GET", self._keys.lock), ("PTTL", self._keys.lock)])
            if value is None:
                continue
            holder = read_holder(value)
            if holder is not None and has_ended(holder, self._me):
                self._delete(wire, value)
                continue
            is_subscribed = bool(wire.call("PUBSUB", "NUMSUB", self._keys.hub_channel)[1])
            if is_subscribed or left_ms < 0 or left_ms > last_ms or time.monotonic() > give_up_at:
                raise self._taken(holder)
            log.info("waiting for an earlier trainer's lock to expire", holder=str(holder), left_s=round(left_ms / 1000, 1))
            last_ms = left_ms
            given_up.wait(_LOOK_AGAIN_S)

    def renew(self, wire: Wire) -> None:
        """Put off its expiry; take it again if the server lost it. Raises AddressInUse if another has it; GONE."""
        (value,) = wire.calls([("GET", self._keys.lock)])
        if isinstance(value, redis.ResponseError):
            return
        if value is not None and value != self._value:
            raise self._taken(read_holder(value))
        try:
            if value is None:
                self._set_new(wire)
            else:
                wire.call("PEXPIRE", self._keys.lock, self._expires_ms)
        except redis.ResponseError as error:  # out of memory, read-only: nobody else can take it either
            log.debug("lock not renewed", error=str(error))

    def release(self, wire: Wire) -> None:
        """Give it up, if it is ours."""
        self._delete(wire, self._value)

    def _set_new(self, wire: Wire) -> bool:
        return wire.call("SET", self._keys.lock, self._value, "NX", "PX", self._expires_ms) is not None

    def _delete(self, wire: Wire, value: bytes) -> None:
        """Delete the lock if it still is `value`."""
        wire.call("WATCH", self._keys.lock)
        if wire.call("GET", self._keys.lock) == value:
            wire.calls([("MULTI",), ("DEL", self._keys.lock), ("EXEC",)])
        else:
            wire.call("UNWATCH")

    def _taken(self, holder: Holder | None) -> AddressInUse:
        return AddressInUse(
            f"a trainer of run {self._keys.run!r} uses redis at {self._server} already ({holder or 'an unknown process'}): "
            "stop it, or give this run another name"
        )
