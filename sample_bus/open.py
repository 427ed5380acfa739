"""Opening an end of the bus: the one place that picks a transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from configs.schema import BusSettings
from sample_bus.address import guarded
from sample_bus.peers import Role
from sample_bus.protocols import Hub, Link
from sample_bus.quarantine import Quarantine
from sample_bus.zmq_hub import ZmqHub
from sample_bus.zmq_link import ZmqLink


@asynccontextmanager
async def open_hub(bus: BusSettings, *, address: str, run: str, incarnation: str, quarantine_dir: Path) -> AsyncIterator[Hub]:
    """The trainer's end, listening at `address` (`ipc://PATH` or `tcp://HOST:PORT`, port 0 picks one: see `Hub.address`).

    Closing says goodbye to all clients and removes the socket file. Raises AddressInUse.
    """
    match bus.transport:
        case "zmq":
            with guarded(address):
                hub = ZmqHub(bus, address=address, run=run, incarnation=incarnation, quarantine=Quarantine(quarantine_dir))
                hub.open()
                try:
                    yield hub
                finally:
                    await hub.close()


@asynccontextmanager
async def open_link(bus: BusSettings, *, address: str, name: str, role: Literal["rollouter", "console"]) -> AsyncIterator[Link]:
    """A client's end. Returns before the trainer is there; offers, requests and `wait_connected` wait for it."""
    match bus.transport:
        case "zmq":
            link = ZmqLink(bus, address=address, name=name, role=Role(role))
            link.open()
            try:
                yield link
            finally:
                await link.close()
