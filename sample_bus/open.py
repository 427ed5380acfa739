"""Opening an end of the bus: the one place that picks a transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

from configs.schema import BusSettings
from sample_bus.address import check_secure, guarded
from sample_bus.carrier import Deliver, HubCarrier, LinkCarrier
from sample_bus.hub import BusHub
from sample_bus.link import BusLink, KnownNext
from sample_bus.peers import Role
from sample_bus.protocols import Hub, Link
from sample_bus.quarantine import Quarantine


@asynccontextmanager
async def open_hub(
    bus: BusSettings, *, address: str, run: str, run_id: str, incarnation: str, quarantine_dir: Path
) -> AsyncIterator[Hub]:
    """The trainer's end, listening at `address` (`ipc://PATH` or `tcp://HOST:PORT`, port 0 picks one: see `Hub.address`; or
    `redis://HOST:PORT/DB#RUN`; waits for a Redis server that is not there yet).

    `run_id` names the run over restarts: its records are kept under it. Closing says goodbye to all clients and removes the
    socket file. Raises AddressInUse, Insecure, NotDurable, BusError.
    """
    quarantine = Quarantine(quarantine_dir)
    with ExitStack() as held:
        open_carrier = await _hub_carrier(bus, address, run_id, held)
        hub = BusHub(bus, run=run, run_id=run_id, incarnation=incarnation, quarantine=quarantine, open_carrier=open_carrier)
        try:
            yield hub
        finally:
            await hub.close()


@asynccontextmanager
async def open_link(
    bus: BusSettings,
    *,
    address: str,
    name: str,
    role: Literal["rollouter", "console"],
    spool_dir: Path | None = None,
    known_next: KnownNext | None = None,
) -> AsyncIterator[Link]:
    """A client's end. Returns before the trainer is there; offers, requests and `wait_connected` wait for it.

    A rollouter keeps its records below `spool_dir` until they are committed (transport `zmq`); `known_next` says what it knows
    to have stored, whatever the copies say. Raises BusError, Insecure.
    """
    open_carrier = await _link_carrier(bus, address, name, spool_dir)
    link = BusLink(bus, address=address, name=name, role=Role(role), open_carrier=open_carrier, known_next=known_next)
    try:
        yield link
    finally:
        await link.close()


async def _hub_carrier(bus: BusSettings, address: str, run_id: str, held: ExitStack) -> Callable[[Deliver], HubCarrier]:
    """What opens the carrier, once the right to `address` is held."""
    match bus.transport:
        case "zmq":
            from sample_bus.zmq_carriers import ZmqHubCarrier

            check_secure(bus, address)
            held.enter_context(guarded(address))
            return lambda deliver: ZmqHubCarrier(bus, address=address, deliver=deliver)
        case "redis":
            from sample_bus.redis_carriers import RedisHubCarrier
            from sample_bus.redis_open import broker_at, prepare_hub

            broker = broker_at(bus, address)
            lock = await prepare_hub(bus, broker)
            return lambda deliver: RedisHubCarrier(broker, bus, lock, run_id=run_id, deliver=deliver)


async def _link_carrier(bus: BusSettings, address: str, name: str, spool_dir: Path | None) -> Callable[[Deliver], LinkCarrier]:
    match bus.transport:
        case "zmq":
            from sample_bus.zmq_carriers import ZmqLinkCarrier

            check_secure(bus, address)
            return lambda deliver: ZmqLinkCarrier(bus, address=address, name=name, spool_dir=spool_dir, deliver=deliver)
        case "redis":
            from sample_bus.redis_carriers import RedisLinkCarrier
            from sample_bus.redis_open import broker_at, check_credentials

            broker = broker_at(bus, address)
            await check_credentials(broker)
            return lambda deliver: RedisLinkCarrier(broker, bus, name=name, deliver=deliver)
