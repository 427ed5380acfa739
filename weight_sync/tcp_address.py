"""Addresses of weight servers on a network: `SCHEME://HOST:PORT?token=HEX&key=HEX`.

Invariant: what a receiver is given can be reached from its host and carries what proves that it was invited: a token of this
one listener and, beyond loopback, the public key by which the server is known. An address is therefore as secret as the bus
that carries it; `without_secrets` is what may be logged.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from configs.bus_address import is_loopback
from weight_sync.errors import WeightSyncError

TOKEN_BYTES = 16
KEY_BYTES = 32
MAX_CONNECTIONS = 16
_ADDRESS = re.compile(
    r"(?P<scheme>tcp|collective|file)://(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[\w.-]+):(?P<port>\d{1,5})\?(?P<query>[\w=&]+)",
    re.ASCII,
)
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class NetAddress:
    """Where a weight server listens, and what it takes to be let in."""

    scheme: str
    host: str
    """A name or an IP address without brackets."""
    port: int
    token: bytes = field(repr=False)
    """16 bytes, made anew by each listener."""
    key: bytes = b""
    """CURVE public key of the server, 32 bytes; empty: the connection is plain."""
    num_connections: int = 1
    """Over which the buckets of one transfer are spread."""

    @classmethod
    def parse(cls, address: str) -> NetAddress:
        """Raises ValueError, which shows nothing secret."""
        match = _ADDRESS.fullmatch(address)
        try:
            if match is None or not 1 <= int(match["port"]) <= 65535:
                raise ValueError("its form is another")
            query = parse_qs(match["query"], strict_parsing=True)
            token, key = bytes.fromhex(query.pop("token", [""])[0]), bytes.fromhex(query.pop("key", [""])[0])
            num_connections = int(query.pop("connections", ["1"])[0])
            if len(token) != TOKEN_BYTES or len(key) not in (0, KEY_BYTES) or query:
                raise ValueError("token or key has a wrong length, or there is something else")
            if not 1 <= num_connections <= MAX_CONNECTIONS:
                raise ValueError(f"{num_connections} connections, expected 1 to {MAX_CONNECTIONS}")
        except ValueError as error:
            raise ValueError(
                f"got weight-sync address {without_secrets(address)!r}, expected SCHEME://HOST:PORT?token=32 HEX DIGITS, "
                f"with connections=N and key=64 HEX DIGITS as the server gave them: {error}"
            ) from None
        return cls(
            scheme=match["scheme"],
            host=match["host"].strip("[]"),
            port=int(match["port"]),
            token=token,
            key=key,
            num_connections=num_connections,
        )

    def __str__(self) -> str:
        """With its secrets, for the receivers."""
        key = f"&key={self.key.hex()}" if self.key else ""
        connections = f"&connections={self.num_connections}" if self.num_connections != 1 else ""
        return f"{self.shown}?token={self.token.hex()}{key}{connections}"

    @property
    def shown(self) -> str:
        """For messages and logs."""
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"

    @property
    def endpoint(self) -> str:
        """What ZeroMQ connects to."""
        return f"tcp://{bracketed(self.host)}:{self.port}"


def without_secrets(address: str) -> str:
    """The address up to its token; any other text as it is."""
    return address.partition("?")[0]


def bracketed(host: str) -> str:
    """A host as it stands before `:PORT`."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def advertised_host(bind_host: str, advertised: str | None, *, route: Callable[[bool], str | None] | None = None) -> str:
    """The host that receivers are told for a server which listens at `bind_host`.

    A wildcard is nobody's address: without `advertised` it becomes the address from which this host reaches others.

    Args:
        advertised: what the operator set, such as the name in a private network; None: choose.
        route: the outgoing address for IPv6 or not, None if there is none; a parameter for tests.

    Raises:
        WeightSyncError: no address can be told that leads here from another host.
    """
    chosen = advertised if advertised is not None else bind_host
    chosen = chosen.strip("[]")
    if chosen not in _WILDCARDS:
        if advertised is not None and not is_loopback(bind_host.strip("[]")) and is_loopback(chosen):
            raise WeightSyncError(f"weights listen at {bind_host} but {advertised} is advertised, which leads nowhere else")
        return chosen
    if advertised is not None:
        raise WeightSyncError(f"got {advertised!r} as the advertised host of the weights, expected one that others can reach")
    found = (route or _route)(chosen == "::")
    if found is None or is_loopback(found):
        raise WeightSyncError(
            f"weights listen at {bind_host} and this host has no address for others (found {found}): name the host to "
            "advertise (weight_sync.advertised_host)"
        )
    return found


def _route(ipv6: bool) -> str | None:
    """The address from which the kernel would send to other hosts. Nothing is sent."""
    for family, target in ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "192.0.2.1"))[0 if ipv6 else 1 :]:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None
