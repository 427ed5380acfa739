"""The gate of a plain listener: libzmq asks it for each new connection, and only who shows the listener's token gets in.

Invariant: nobody without the token gets a message to the listener; a stranger costs a handshake. While the gate does not
answer, nobody gets in. What is encrypted needs no gate: without the server's key, which the same addresses carry, no handshake
ends well.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence

import structlog
import zmq

log = structlog.get_logger()

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"headrace-weights"
_USER = b"receiver"
_SAID_EVERY_S = 10.0
REFUSED = "its token is not this server's: the address is that of an earlier server"


def show_token(socket: zmq.Socket[bytes], token: bytes) -> None:
    """At the receiver, before it connects."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
    socket.setsockopt(zmq.PLAIN_PASSWORD, token.hex().encode())


class Gate:
    """Answers for one context (ZAP 1.0, PLAIN), in the thread that polls `socket`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: bytes) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self._password = token.hex().encode()
        self._quiet = Quiet()

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """From its `bind` on, `router` lets in only whom the gate does."""
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """One connection that waits."""
        frames = self.socket.recv_multipart()
        begin = frames.index(b"") + 1
        request = frames[begin:]
        is_invited = judge(request, self._password)
        verdict = [b"200", b"OK", _USER] if is_invited else [b"400", b"another token", b""]
        self.socket.send_multipart([*frames[:begin], b"1.0", request[1] if len(request) > 1 else b"", *verdict, b""])
        if not is_invited and self._quiet.is_over(time.monotonic()):
            host = request[3].decode("ascii", "replace")[:100] if len(request) > 3 else "unknown"
            log.warning(
                "weight transfer refused", reason="its token is not this server's", host=host, others=self._quiet.take()
            )

    def close(self) -> None:
        self.socket.close()


def judge(request: Sequence[bytes], password: bytes) -> bool:
    """Whether a connection may come in. `request`: of ZAP, from its version on. Pure."""
    if len(request) != 8 or request[0] != b"1.0" or request[2] != _DOMAIN or request[5] != b"PLAIN":
        return False
    return hmac.compare_digest(request[6], _USER) and hmac.compare_digest(request[7], password)


class Quiet:
    """Says of a stranger's trouble that it is worth a line at most once in `every_s`: it may come again and again. Pure."""

    def __init__(self, every_s: float = _SAID_EVERY_S) -> None:
        self._every_s = every_s
        self._said_at: float | None = None
        self._num_unsaid = 0

    def is_over(self, now: float) -> bool:
        if self._said_at is not None and now - self._said_at < self._every_s:
            self._num_unsaid += 1
            return False
        self._said_at = now
        return True

    def take(self) -> int:
        """How often nothing was said since the last line."""
        num_unsaid, self._num_unsaid = self._num_unsaid, 0
        return num_unsaid
