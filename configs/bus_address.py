"""What a bus address may look like. Pure.

Invariant: an address that is wrong is refused with the settings, before anything listens or connects.
"""

from __future__ import annotations

import ipaddress
import re

from configs.redis_address import FORMS, is_redis, problem_of_redis, redis_insecurity

MAX_PATH_BYTES = 107
"""sockaddr_un on Linux, without the closing zero."""
AUTO = "auto"

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})", re.ASCII)


def problem_of(address: str) -> str | None:
    """Why `address` cannot be a bus address, in words; None: it can."""
    if address == AUTO:
        return None
    if is_redis(address):
        return problem_of_redis(address)
    if address.startswith("ipc://"):
        return _problem_of_path(address.removeprefix("ipc://"))
    match = _TCP.fullmatch(address)
    if match is None:
        return f"expected auto, ipc:///PATH or tcp://HOST:PORT; or a Redis server: {FORMS}"
    if not 1 <= int(match["port"]) <= 65535:
        return f"port {match['port']}, expected 1 to 65535"
    if match["host"].startswith("[") and not _is_ipv6(match["host"].strip("[]")):
        return f"{match['host']}, expected an IPv6 address in the brackets"
    return None


def tcp_insecurity(address: str, *, has_keys: bool) -> str | None:
    """Why nobody should listen at, or connect to, this `tcp://` address without asking for it; None: it is well."""
    if not address.startswith("tcp://") or has_keys or is_loopback(tcp_host(address)):
        return None
    return (
        f"bus.address={address} can be reached from other hosts, and without keys whoever reaches it can read and send: "
        "make keys with `headrace keys new DIR` and set bus.keys_dir=DIR (or set bus.allow_insecure=true)"
    )


def problem_of_transport(transport: str, address: str, *, has_password: bool, allow_insecure: bool) -> str | None:
    """Why transport and address do not go together, or a Redis server's address is not safe; None: all is well."""
    if address == AUTO:
        return None
    if (transport == "redis") != is_redis(address):
        expected = FORMS if transport == "redis" else "ipc:///PATH or tcp://HOST:PORT"
        return f"bus.address={address} does not go with bus.transport={transport}: expected auto, {expected}"
    insecurity = redis_insecurity(address, has_password=has_password) if transport == "redis" else None
    return None if allow_insecure else insecurity


def tcp_host(address: str) -> str:
    """The host of a `tcp://` address, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without brackets, is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _problem_of_path(path: str) -> str | None:
    if not path.startswith("/") or path.endswith("/"):
        return "expected the absolute path of a socket after ipc://"
    size = len(path.encode())
    return f"{size} bytes, expected at most {MAX_PATH_BYTES} in a socket's path" if size > MAX_PATH_BYTES else None
