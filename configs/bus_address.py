"""What a bus address may look like. Pure.

Invariant: an address that is wrong is refused with the settings, before anything listens or connects.
"""

from __future__ import annotations

import ipaddress
import re

MAX_PATH_BYTES = 107
"""sockaddr_un on Linux, without the closing zero."""
AUTO = "auto"

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>\d{1,5})", re.ASCII)


def problem_of(address: str) -> str | None:
    """Why `address` cannot be a bus address, in words; None: it can."""
    if address == AUTO:
        return None
    if address.startswith("ipc://"):
        return _problem_of_path(address.removeprefix("ipc://"))
    match = _TCP.fullmatch(address)
    if match is None:
        return "expected auto, ipc:///PATH or tcp://HOST:PORT"
    if not 1 <= int(match["port"]) <= 65535:
        return f"port {match['port']}, expected 1 to 65535"
    if not is_loopback(match["host"].strip("[]")):
        return "the bus is not authenticated, so it listens on loopback only (127.0.0.1, [::1], localhost)"
    return None


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without brackets, is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _problem_of_path(path: str) -> str | None:
    if not path.startswith("/") or path.endswith("/"):
        return "expected the absolute path of a socket after ipc://"
    size = len(path.encode())
    return f"{size} bytes, expected at most {MAX_PATH_BYTES} in a socket's path" if size > MAX_PATH_BYTES else None
