"""Whether the trainer can listen for weights where the settings say, asked of this host before anything is loaded."""

from __future__ import annotations

import os
import socket

from configs.bus_address import MAX_PATH_BYTES, is_loopback
from configs.errors import ConfigError
from configs.schema import WeightSyncSettings


def check_weight_listener(weights: WeightSyncSettings) -> None:
    """Raise ConfigError naming the setting if it cannot. A port that is taken shows when it is bound."""
    host = weights.listen_host.strip("[]")
    is_on_network = weights.transport in ("tcp", "collective")
    if weights.transport == "file" and weights.directory is not None:
        is_on_network = not is_loopback(host)
        socket_path = weights.directory.absolute() / "control"
        num_bytes = len(os.fsencode(socket_path))
        if not is_on_network and num_bytes > MAX_PATH_BYTES:
            raise ConfigError(
                f"weight_sync.directory={weights.directory}: its socket {socket_path} has {num_bytes} bytes, expected at most "
                f"{MAX_PATH_BYTES}: give a shorter path"
            )
    if is_on_network:
        problem = _problem_of_host(host)
        if problem is not None:
            raise ConfigError(
                f"weight_sync.listen_host={weights.listen_host}: {problem}, expected an address of this host, 0.0.0.0 or ::"
            )


def _problem_of_host(host: str) -> str | None:
    if host in (name for _, name in socket.if_nameindex()):
        return None
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return f"is no address or name that can be resolved ({getattr(error, 'strerror', None) or error})"
    problem = ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as error:
            problem = f"this host cannot listen there ({error.strerror})"
        else:
            return None
    return problem
