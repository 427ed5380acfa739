"""Addresses of a Redis server that carries the bus: `redis://HOST:PORT/DB#RUN`. Pure.

Invariant: an address names a server, a database and a run, and never holds a secret.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

SCHEMES = ("redis://", "rediss://", "unix://")
DEFAULT = "redis://127.0.0.1:6379/0"
FORMS = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS) or unix:///PATH"
_DEFAULT_PORT = 6379
_MAX_DB = 1 << 16
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    host: str = ""
    """Empty for a socket's path."""
    port: int = 0
    path: str = ""
    db: int = 0
    tls: bool = False
    run: str = ""
    """Whose keys and channels; empty where the settings give only the server."""

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine and is reached without a network."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def server(self) -> str:
        """For messages: `HOST:PORT`, or the socket's path."""
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def with_run(self, run: str) -> RedisAddress:
        return replace(self, run=self.run or run)

    def __str__(self) -> str:
        if self.path:
            text = f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        else:
            text = f"{'rediss' if self.tls else 'redis'}://{self.server}/{self.db}"
        return f"{text}#{self.run}" if self.run else text


def is_redis(address: str) -> bool:
    return address.startswith(SCHEMES)


def parse(address: str) -> RedisAddress:
    """Raises ValueError, in words."""
    parts = urlsplit(address)
    if not is_redis(address):
        raise ValueError(f"expected {FORMS}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it holds a user or a password: give them as bus.redis_username and bus.redis_password_file")
    if parts.fragment and not _RUN.fullmatch(parts.fragment):
        raise ValueError(f"run {parts.fragment!r} after #, expected a run's name")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
            raise ValueError("expected the absolute path of a socket after unix://")
        return RedisAddress(path=parts.path, db=_db(parts.query.removeprefix("db=") or "0"), run=parts.fragment)
    if parts.query:
        raise ValueError(f"?{parts.query} is not understood, expected {FORMS}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{error}, expected {FORMS}") from None
    if not host or port == 0:
        raise ValueError(f"expected {FORMS}")
    return RedisAddress(
        host=host,
        port=_DEFAULT_PORT if port is None else port,
        db=_db(parts.path.removeprefix("/") or "0"),
        tls=parts.scheme == "rediss",
        run=parts.fragment,
    )


def problem_of_redis(address: str) -> str | None:
    """Why `address` cannot be a Redis server's, in words; None: it can."""
    try:
        parse(address)
    except ValueError as error:
        return str(error)
    return None


def redis_insecurity(address: str, *, has_password: bool) -> str | None:
    """Why samples should not travel over this address without asking for it; None: it is well."""
    parsed = parse(address)
    if parsed.is_local or (parsed.tls and has_password):
        return None
    lacks = [] if has_password else ["bus.redis_password_file (and bus.redis_username)"]
    lacks += [] if parsed.tls else ["rediss:// (TLS)"]
    return (
        f"bus.address={address} is beyond this host, and whoever reaches it can read and send samples: "
        f"use {' and '.join(lacks)} (or set bus.allow_insecure=true)"
    )


def _db(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= _MAX_DB:
        raise ValueError(f"database {text[:20]!r}, expected a number from 0")
    return int(text)
