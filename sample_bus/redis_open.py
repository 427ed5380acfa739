"""What is asked of a Redis server before an end of the bus is opened on it.

Invariant: wrong credentials, a server that cannot keep the promise, and a second trainer of a run are one-line errors before
anything starts; a server that is not there yet is waited for by the trainer, within `bus.connect_timeout_s`.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time

import redis
import structlog

from configs.redis_address import parse, redis_insecurity
from configs.schema import BusSettings
from sample_bus import redis_durability
from sample_bus.errors import BusError, Insecure
from sample_bus.patience import NOTICE_S
from sample_bus.redis_control import RECONNECT_MAX_S
from sample_bus.redis_keys import keys_of
from sample_bus.redis_lock import RunLock
from sample_bus.redis_wire import GONE, Broker, Wire, broker_of

log = structlog.get_logger()


def broker_at(bus: BusSettings, address: str) -> Broker:
    """Raises BusError for what is no address or credential, Insecure."""
    try:
        parsed = parse(address)
    except ValueError as error:
        raise BusError(f"{address}: {error}") from None
    if not parsed.run:
        raise BusError(f"{address}: expected #RUN at its end, the name of the run")
    insecurity = redis_insecurity(address, has_password=bus.redis_password_file is not None)
    if insecurity is not None and not bus.allow_insecure:
        raise Insecure(insecurity)
    return broker_of(bus, parsed)


async def check_credentials(broker: Broker) -> None:
    """Raises Insecure if the server is there and refuses them."""
    await asyncio.to_thread(_check_credentials, broker)


def _check_credentials(broker: Broker) -> None:
    try:
        wire = Wire(broker, patience_s=broker.patience_s)
        try:
            wire.call("PING")
        finally:
            wire.close()
    except (redis.RedisError, OSError) as error:
        distrust = _distrust(broker, error)
        if distrust is not None:
            raise distrust from None
        log.debug("redis is not there yet", server=str(broker), error=str(error))


def _distrust(broker: Broker, error: Exception) -> Insecure | None:
    """What trying again does not help: the server does not trust us, or we do not trust it."""
    if isinstance(error, redis.AuthenticationError):
        return Insecure(f"{broker} does not take the credentials (bus.redis_username, bus.redis_password_file): {error}")
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return Insecure(f"{broker}: its certificate is not trusted (bus.redis_ca_file): {error}")
    return None


async def prepare_hub(bus: BusSettings, broker: Broker) -> RunLock:
    """Wait for the server, see that it keeps samples, and take the run's lock.

    Raises AddressInUse, NotDurable, Insecure (credentials), BusError.
    """
    lock = RunLock(keys_of(broker.address), server=broker.address.server, expires_s=bus.heartbeat_timeout_s)
    given_up = threading.Event()
    try:
        await asyncio.to_thread(_prepare, bus, broker, lock, given_up)
    except asyncio.CancelledError:
        given_up.set()
        raise
    return lock


def _prepare(bus: BusSettings, broker: Broker, lock: RunLock, given_up: threading.Event) -> None:
    started = time.monotonic()
    said_at = started
    while True:
        try:
            _try_to_prepare(bus, broker, lock, given_up)
            return
        except redis.ResponseError as error:
            raise BusError(f"{broker} cannot carry the bus: {error}") from None
        except GONE as error:
            distrust = _distrust(broker, error)
            if distrust is not None:
                raise distrust from None
            now = time.monotonic()
            if now - started > bus.connect_timeout_s or given_up.is_set():
                raise BusError(f"{broker} cannot be reached within {bus.connect_timeout_s:g} s: {error}") from None
            if now - said_at >= NOTICE_S or said_at == started:
                said_at = now
                log.info("waiting for redis", server=str(broker), error=str(error), deadline_s=bus.connect_timeout_s)
        given_up.wait(RECONNECT_MAX_S)


def _try_to_prepare(bus: BusSettings, broker: Broker, lock: RunLock, given_up: threading.Event) -> None:
    wire = Wire(broker, patience_s=broker.patience_s)
    try:
        redis_durability.check(wire, server=broker.address.server, allow_volatile=bus.redis_allow_volatile)
        lock.acquire(wire, given_up)
        if given_up.is_set():
            lock.release(wire)
    finally:
        wire.close()


def is_served(bus: BusSettings, address: str, *, run_id: str | None = None, timeout_s: float) -> bool:
    """Whether a trainer hosts the bus of that run there now, under that run id if one is given; False where that cannot be
    asked."""
    try:
        broker = broker_at(bus, address)
        wire = Wire(broker, patience_s=timeout_s)
        try:
            keys = keys_of(broker.address)
            return bool(wire.call("PUBSUB", "NUMSUB", keys.hub_channel if run_id is None else keys.run_channel(run_id))[1])
        finally:
            wire.close()
    except (BusError, redis.RedisError, OSError):
        return False
