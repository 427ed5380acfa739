"""Whether a Redis server can carry the bus, and keep samples over its own death. Pure, but for `survey`.

Invariant: nothing starts on a server that would lose or evict samples, unless `bus.redis_allow_volatile` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import redis
import structlog

from sample_bus.errors import BusError, NotDurable
from sample_bus.redis_wire import Wire

log = structlog.get_logger()

OLDEST_VERSION = (6, 2)
_WHERE = "(redis-cli, and in redis.conf)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a server says of itself."""

    version: str
    is_cluster: bool
    keeps_log: bool
    """appendonly"""
    max_memory: int
    """Bytes; 0: no limit."""
    eviction: str
    """maxmemory-policy"""


def survey(wire: Wire) -> Survey:
    """Raises NotDurable when it may not be asked."""
    facts: dict[str, str] = {}
    for section in ("server", "persistence", "memory"):
        try:
            text = wire.call("INFO", section)
        except redis.ResponseError as error:
            raise NotDurable(
                f"cannot be asked whether it keeps samples over its own death ({error}): "
                "allow INFO to the trainer's user (ACL SETUSER … +info), or set bus.redis_allow_volatile=true"
            ) from None
        for line in text.decode("utf-8", "replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                facts[name] = value.strip()
    return read_survey(facts)


def read_survey(facts: dict[str, str]) -> Survey:
    """The lines of INFO by name."""
    return Survey(
        version=facts.get("redis_version", "0"),
        is_cluster=facts.get("redis_mode") == "cluster",
        keeps_log=facts.get("aof_enabled") == "1",
        max_memory=int(facts.get("maxmemory", "0")),
        eviction=facts.get("maxmemory_policy", "noeviction"),
    )


def unusable(found: Survey) -> str | None:
    """Why this server cannot carry the bus at all."""
    parts = found.version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        return f"it is version {found.version}, expected {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} or later"
    if found.is_cluster:
        return "it is a cluster, expected a single server (a primary, with or without replicas)"
    return None


def volatile(found: Survey) -> list[str]:
    """What would lose samples, each with its remedy."""
    problems = []
    if not found.keeps_log:
        problems.append(f"appendonly is no, so its samples die with it: CONFIG SET appendonly yes {_WHERE}")
    if found.max_memory and found.eviction.startswith("allkeys"):
        problems.append(
            f"maxmemory-policy is {found.eviction}, so it deletes samples when memory is short: "
            f"CONFIG SET maxmemory-policy noeviction {_WHERE}"
        )
    return problems


def check(wire: Wire, *, server: str, allow_volatile: bool) -> None:
    """Raises BusError for a server of the wrong kind, NotDurable for one that would lose samples unless that is allowed."""
    try:
        found = survey(wire)
    except NotDurable as error:
        if not allow_volatile:
            raise NotDurable(f"redis at {server} {error}") from None
        log.warning("redis cannot be asked whether it is durable", server=server)
        return
    reason = unusable(found)
    if reason is not None:
        raise BusError(f"redis at {server} cannot carry the bus: {reason}")
    problems = volatile(found)
    if problems and not allow_volatile:
        raise NotDurable(
            f"redis at {server} would lose samples: {'; '.join(problems)}. Or go on without: bus.redis_allow_volatile=true"
        )
    if problems:
        log.warning("redis would lose samples with its own death", server=server, problems=problems)
