"""How many requests each engine of the pool is given at once: the live settings, and what is found by looking at the engine.

Invariant: the limit is read at each decision, so a live change holds for the next request; while it is below what is in flight
nothing is taken back. With engine.adaptive_requests each engine is looked at every engine.pressure_interval_s; without, nobody
looks.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from agent_loop.errors import EngineError
from configs.schema import Settings
from rollouter.concurrency import Demand, Limit, Pressure, bound_of, next_limit, read_pressure
from rollouter.engine_member import EngineState, Member
from rollouter.engine_seats import Seats

log = structlog.get_logger()

_MAX_SAMPLES = 256


@dataclass(slots=True)
class _Watched:
    """What is known of one engine."""

    limit: Limit = field(default_factory=Limit)
    seconds_per_token: list[float] = field(default_factory=list)
    """Of requests that ended since the look before."""
    is_silent: bool | None = None
    """Whether it keeps no statistics; None: it was not asked yet."""


class EngineLimits:
    """Sets `Member.limit` of each engine."""

    def __init__(
        self, members: Sequence[Member], seats: Seats, live: Callable[[], Settings], *, on_change: Callable[[], None]
    ) -> None:
        """`live` gives the settings in force; `on_change` is called after a limit has moved: it hands free seats out."""
        self._seats = seats
        self._live = live
        self._on_change = on_change
        self._watched = {member.name: _Watched() for member in members}
        self._members = members
        for member in members:
            member.limit = lambda name=member.name: self.limit_of(name)  # type: ignore[misc]

    def limit_of(self, name: str) -> int:
        """Requests that the engine may have at once under the settings of this moment."""
        settings = self._live()
        if settings.engine.adaptive_requests:
            return min(self._watched[name].limit.requests, _bound(settings))
        return settings.engine.max_requests or settings.engine.max_num_seqs

    def took(self, member: Member, seconds: float, num_tokens: int) -> None:
        """A request ended after `seconds` with so many new tokens."""
        samples = self._watched[member.name].seconds_per_token
        if num_tokens and len(samples) < _MAX_SAMPLES:
            samples.append(seconds / num_tokens)

    async def run(self) -> None:
        """Look at all engines until cancelled."""
        async with asyncio.TaskGroup() as looking:
            for member in self._members:
                looking.create_task(self._watch(member))

    async def _watch(self, member: Member) -> None:
        while True:
            settings = self._live()
            await asyncio.sleep(settings.engine.pressure_interval_s)
            if settings.engine.adaptive_requests and member.state is EngineState.SERVING:
                await self.look(member)
            else:
                self._watched[member.name].seconds_per_token.clear()  # times over a pause say nothing of the load

    async def look(self, member: Member) -> None:
        """Ask the engine how it is and set its limit."""
        pressure = await self._pressure(member)
        watched, settings = self._watched[member.name], self._live()
        samples, watched.seconds_per_token = watched.seconds_per_token, []
        demand = Demand(
            in_flight=member.in_flight,
            num_waiting=self._seats.num_waiting,
            seconds_per_token=statistics.median(samples) if samples else None,
        )
        before = watched.limit
        watched.limit = next_limit(before, pressure, demand, bound=_bound(settings))
        if watched.limit.requests != before.requests:
            log.debug(
                "requests of an engine",
                engine=member.name,
                limit=watched.limit.requests,
                before=before.requests,
                in_flight=demand.in_flight,
                waiting=demand.num_waiting,
                queued_inside=None if pressure is None else pressure.num_waiting,
                kv_cache_usage=None if pressure is None else round(pressure.kv_cache_usage, 3),
            )
            self._on_change()

    async def _pressure(self, member: Member) -> Pressure | None:
        try:
            pressure = read_pressure(await member.client.metrics(timeout_s=self._live().weight_sync.connect_timeout_s))
        except EngineError as error:
            pressure = None
            log.debug("engine does not say how it is", engine=member.name, why=str(error))
        watched = self._watched[member.name]
        if watched.is_silent is None or watched.is_silent != (pressure is None):
            watched.is_silent = pressure is None
            if watched.is_silent:
                log.info("engine keeps no statistics: its requests are limited by how long a token takes", engine=member.name)
        return pressure


def _bound(settings: Settings) -> int:
    return bound_of(
        max_requests=settings.engine.max_requests,
        max_num_seqs=settings.engine.max_num_seqs,
        max_concurrent_rollouts=settings.rollouter.max_concurrent_rollouts,
    )
