"""The door of a bus over TCP: answers libzmq's question who may come in (ZAP), and says who was not let in.

Invariant: while the door does not answer, or has ended, nobody new gets in.
"""

from __future__ import annotations

import os
import socket as sockets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

log = structlog.get_logger()

DOMAIN = b"headrace"
GONE = "it closed the connection in the handshake: it has no keys, or only looked whether anyone listens"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MONITOR_ADDRESS = "inproc://headrace.door"
_EVENTS: int = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def open_door(
    socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], name_of: Callable[[bytes], str | None]
) -> None:
    """Ask `name_of` for each client's public key (Z85) from now on; `socket` must not be bound yet. Takes its monitor.

    The door's thread ends when `context` is terminated.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    # A shadow, so that no `context.destroy()` closes the thread's sockets under it.
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
    zap = own.socket(zmq.ROUTER)
    zap.setsockopt(zmq.LINGER, 0)
    zap.bind(_ZAP_ADDRESS)
    socket.monitor(_MONITOR_ADDRESS, _EVENTS)
    monitor = own.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(_MONITOR_ADDRESS)
    door = _Door(zap, monitor, name_of)
    threading.Thread(target=door.run, name="bus-door", daemon=True).start()


def short(public: bytes) -> str:
    """The beginning of a public key, for people."""
    return public[:10].decode("ascii", "replace") + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer to one client at the door."""

    status: bytes
    """As ZAP numbers them: 200 come in, 400 no, 500 we cannot tell."""
    text: bytes
    name: str
    """Of the client; empty if it is refused."""
    host: str
    public: bytes
    """Z85; empty if it showed none."""


def judge(request: Sequence[bytes], name_of: Callable[[bytes], str | None]) -> Verdict:
    """Whether a client may come in. `request`: a ZAP request from its version on. Pure but for `name_of`."""
    if len(request) < 6 or request[0] != b"1.0":
        return Verdict(status=b"500", text=b"not a request of ZAP 1.0", name="", host="", public=b"")
    _, _, domain, host, _, mechanism, *credentials = request
    where = host.decode("ascii", "replace")[:100]
    if domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
        return Verdict(status=b"400", text=b"no CURVE key", name="", host=where, public=b"")
    public: bytes = z85.encode(credentials[0])
    name = name_of(public)
    if name is None:
        return Verdict(status=b"400", text=b"key not listed", name="", host=where, public=public)
    return Verdict(status=b"200", text=b"OK", name=name, host=where, public=public)


class Notices:
    """Says of the same refusal at most once in `every_s` that it is worth a line: clients try again and again. Pure."""

    def __init__(self, *, every_s: float = 10.0, max_kept: int = 1000) -> None:
        self._every_s = every_s
        self._max_kept = max_kept
        self._said_at: dict[tuple[str, str], float] = {}

    def worth_a_line(self, host: str, problem: str, now: float) -> bool:
        said_at = self._said_at.get((host, problem))
        if said_at is not None and now - said_at < self._every_s:
            return False
        if len(self._said_at) >= self._max_kept:
            self._said_at.clear()
        self._said_at[host, problem] = now
        return True


class _Door:
    def __init__(self, zap: zmq.Socket[bytes], monitor: zmq.Socket[bytes], name_of: Callable[[bytes], str | None]) -> None:
        self._zap = zap
        self._monitor = monitor
        self._name_of = name_of
        self._notices = Notices()
        self._hosts: dict[int, str] = {}
        self._problem = ""

    def run(self) -> None:
        try:
            self._serve()
        except zmq.ContextTerminated:
            pass
        except Exception as error:  # noqa: BLE001 - a door that fails stays shut; it must be seen
            log.error("the door of the bus failed, nobody new can connect", error=f"{type(error).__name__}: {error}")
        finally:
            self._zap.close()
            self._monitor.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._zap in ready:
                self._answer(self._zap.recv_multipart())
            if self._monitor in ready:
                event = recv_monitor_message(self._monitor)
                self._note(event["event"], event["value"])

    def _answer(self, frames: list[bytes]) -> None:
        begin = frames.index(b"") + 1
        request = frames[begin:]
        verdict = judge(request, self._name_of)
        reply = [b"1.0", request[1] if len(request) > 1 else b"", verdict.status, verdict.text, verdict.name.encode(), b""]
        self._zap.send_multipart([*frames[:begin], *reply])
        if verdict.status != b"200":
            self._log(verdict.host, verdict.text.decode(), key=short(verdict.public))
        else:
            log.info("client let in", client=verdict.name, host=verdict.host, key=short(verdict.public))

    def _note(self, event: int, value: int) -> None:
        """Events of one connection: accepted, then either succeeded or failed and disconnected; `value` is its descriptor."""
        if event == zmq.EVENT_ACCEPTED:
            self._hosts[value] = _peer_of(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self._problem = "it has no keys"
            elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self._problem = "it expects a trainer with another key"
            else:
                self._problem = f"it does not speak this protocol (error {value:#x})"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._problem = GONE
        elif event == zmq.EVENT_DISCONNECTED:
            host, problem, self._problem = self._hosts.pop(value, ""), self._problem, ""
            if problem:
                self._log(host, problem)

    def _log(self, host: str, problem: str, **facts: str) -> None:
        if not self._notices.worth_a_line(host, problem + "".join(facts.values()), time.monotonic()):
            return
        if problem == GONE:
            log.info("client left at the door", host=host or "unknown", problem=problem)
        else:
            log.warning("client refused", host=host or "unknown", problem=problem, **facts)


def _peer_of(descriptor: int) -> str:
    """Host at the other end of a connection that libzmq may have closed already; empty if it cannot be told."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return ""
    try:
        with sockets.socket(fileno=copy) as connection:
            copy = -1
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""
    finally:
        if copy >= 0:
            os.close(copy)
