"""Picks the transport: a listener by its name, a receiver's end by the scheme of the address.

A transport's module is imported when it is picked, so that nobody needs the libraries of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from configs.schema import WeightSyncSettings
from weight_sync.tcp_address import without_secrets
from weight_sync.transport import Cut, Listener, Receiving, StageRequest, Terms, TransportName


def transport_of(address: str) -> TransportName:
    """Raises ValueError for an address of none."""
    scheme, colon, _ = address.partition(":")
    try:
        return TransportName(scheme if colon else "")
    except ValueError:
        raise ValueError(
            f"got weight-sync address {without_secrets(address)!r}, expected one that begins with "
            + ", ".join(f"{name.value}:" for name in TransportName)
        ) from None


def open_listener(settings: WeightSyncSettings, *, socket_dir: Path, terms: Terms) -> Listener:
    """The listener of `terms.transport`, not started yet. `socket_dir` is private to this user."""
    match TransportName(terms.transport):
        case TransportName.SHARED_MEMORY:
            from weight_sync import shared_memory

            return shared_memory.open_listener(socket_dir, settings, terms)
        case TransportName.FILE:
            from weight_sync import file_remote, file_transport

            if settings.directory is not None and file_remote.is_remote(settings):
                return file_remote.RemoteFileListener(settings, directory=settings.directory, terms=terms)
            return file_transport.open_listener(socket_dir, settings, terms)
        case TransportName.TCP:
            from weight_sync import tcp

            return tcp.TcpListener(settings, terms=terms)
        case TransportName.COLLECTIVE:
            from weight_sync import collective

            return collective.CollectiveListener(settings, terms=terms)
        case other:
            raise ValueError(f"weight_sync.transport={other.value} is not available")


def open_receiver(
    address: str, request: StageRequest, *, timeout_s: float, on_open: Callable[[Cut], None] | None = None
) -> Receiving:
    """Open the transfer at `address`; see `transport.OpenReceiver`. Raises ValueError for an address of no transport."""
    match transport_of(address):
        case TransportName.SHARED_MEMORY:
            from weight_sync import shared_memory

            return shared_memory.open_receiver(address, request, timeout_s=timeout_s, on_open=on_open)
        case TransportName.FILE:
            from weight_sync import file_remote, file_transport

            if address.startswith("file://"):
                return file_remote.open_receiver(address, request, timeout_s=timeout_s, on_open=on_open)
            return file_transport.open_receiver(address, request, timeout_s=timeout_s, on_open=on_open)
        case TransportName.TCP:
            from weight_sync import tcp

            return tcp.open_receiver(address, request, timeout_s=timeout_s, on_open=on_open)
        case TransportName.COLLECTIVE:
            from weight_sync import collective

            return collective.open_receiver(address, request, timeout_s=timeout_s, on_open=on_open)
        case other:
            raise ValueError(f"got weight-sync address {without_secrets(address)!r}: {other.value} is not available")
