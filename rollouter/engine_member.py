"""One engine of the pool: its client, its state, and what it holds.

Invariant: the engine holds all of one version, and the pool knows which; when that is in doubt, it counts as holding none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

import structlog

from agent_loop.errors import AgentLoopError
from agent_loop.vllm_client import VllmClient
from configs.bus_address import is_loopback
from rollouter.engines import EngineServer
from sample_bus.messages import EngineStatus, WeightRound

log = structlog.get_logger()

PartialRollout = Literal["keep", "recompute", "finish"]

WaitStaged = Callable[[WeightRound, str, str], Awaitable[None]]
"""(round, engine name, nonce): returns once the trainer says that this staging is complete (topic `round`,
`staged[engine] == nonce`), or the host's weight cache does; raises any Exception with the reason if it failed (`failed[nonce]`)
or the trainer was replaced. The pool sets the deadline."""


class EngineState(StrEnum):
    STARTING = "starting"
    WAITING = "waiting for weights"
    SERVING = "serving"
    UPDATING = "updating"
    SUSPECT = "not answering"
    """A request got no answer; nothing more is sent until a health check did."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A policy version of one trainer process; numbers are never compared across incarnations."""

    incarnation: str
    policy_version: int

    @classmethod
    def of(cls, announced: WeightRound) -> Held:
        return cls(incarnation=announced.incarnation, policy_version=announced.policy_version)

    @property
    def cache_salt(self) -> str:
        """Separates the KV caches of versions, so that no request continues what other weights computed."""
        return hashlib.sha256(f"{self.incarnation}/{self.policy_version}".encode()).hexdigest()[:16]


class Member:
    """State and operations of one engine. The pool serialises rounds by `round_lock`."""

    def __init__(self, name: str, client: VllmClient, *, server: EngineServer | None, max_requests: int) -> None:
        """`server` is None for an engine that was started elsewhere; `max_requests` is what it decodes together."""
        self.name = name
        self.client = client
        self.server = server
        self._max_requests = max_requests
        self.limit: Callable[[], int] = lambda: max_requests
        """Asked before each request: how many it may have at once now; never taken for more than it decodes together."""
        self.state = EngineState.STARTING
        self.held: Held | None = None
        self.fresh: Held | None = None
        """The version for which the prefix cache was emptied last."""
        self.idle = asyncio.Event()
        """Set while no request is with the engine."""
        self.idle.set()
        self._in_flight = 0
        self.is_draining = False
        """Before a pause with `partial_rollout=finish`: nobody is let in but turns that are under way."""
        self.restarts = 0
        self.failed_commits = 0
        """In a row, the engine's own: a staging that the trainer failed does not count."""
        self.num_doubts = 0
        """How often it was unsure what the engine holds; what it generated over such a moment is thrown away."""
        self.attempt = 0
        """Of bringing it to the version that was tried last."""
        self._tried: Held | None = None
        self._num_workers: int | None = None
        self.last_pause_ms: float | None = None
        self.last_drain_ms: float | None = None
        """From the closing of the door to the pause, at the last commit: with `finish`, the time that requests took to end."""
        self.round_lock = asyncio.Lock()
        self.life = asyncio.Event()
        """Set when the engine is lost; whatever comes in its place has one of its own."""
        self.trouble = asyncio.Event()
        """Set when the engine must be looked at: it gave no answer in time, or a round failed on it."""

    @property
    def is_alive(self) -> bool:
        return self.state not in (EngineState.STARTING, EngineState.DEAD)

    @property
    def is_local(self) -> bool:
        """Runs on this host, as far as its address says."""
        if self.server is not None or self.client.address.startswith("unix:"):
            return True
        return is_loopback(urlsplit(self.client.address).hostname or "")

    @property
    def max_requests(self) -> int:
        """Requests that it may have at once now; at least one."""
        return max(1, min(self._max_requests, self.limit()))

    @property
    def in_flight(self) -> int:
        """Requests that are with the engine."""
        return self._in_flight

    def enter(self) -> None:
        """A request goes to the engine."""
        self._in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        """A request has ended, whichever way."""
        assert self._in_flight > 0, f"{self.name}: a request left that had not entered"
        self._in_flight -= 1
        if self._in_flight == 0:
            self.idle.set()

    async def num_workers(self, *, timeout_s: float) -> int:
        """How many processes hold the model, each of which stages for itself; 0 if the engine does not say in time."""
        if self._num_workers is None:
            try:
                async with asyncio.timeout(timeout_s):
                    self._num_workers = len(await self.client.collective_rpc("headrace_status"))
            except (AgentLoopError, TimeoutError) as error:
                log.warning("engine does not say how many workers it has", engine=self.name, why=str(error))
                return 0
        return self._num_workers

    def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            state=self.state.value,
            policy_version=None if self.held is None else self.held.policy_version,
            num_running=self.in_flight,
            max_requests=self.max_requests,
            last_pause_ms=self.last_pause_ms,
            is_alive=self.is_alive,
        )

    def suspect(self) -> None:
        """A request got no answer: have the engine looked at before it gets another one."""
        if self.state is EngineState.SERVING:
            self.state = EngineState.SUSPECT
        self.trouble.set()

    def trust(self) -> None:
        """A health check was answered."""
        if self.state is EngineState.SUSPECT:
            self.settle()

    def begin_attempt(self, wanted: Held) -> None:
        """It is about to be brought to `wanted`, for the first time or again."""
        self.attempt = self.attempt + 1 if self._tried == wanted else 1
        self._tried = wanted

    def hold(self, held: Held, *, fresh_cache: bool) -> None:
        """It has loaded `held`; `fresh_cache`: nothing that other weights computed is left in it."""
        self.held = held
        if fresh_cache:
            self.fresh = held

    def doubt(self) -> None:
        """Nobody knows what it holds."""
        self.held = None
        self.num_doubts += 1

    def settle(self) -> None:
        """Serve if there are weights to serve; an engine that was lost meanwhile does not."""
        if self.is_alive:
            self.state = EngineState.WAITING if self.held is None else EngineState.SERVING

    def lose(self) -> None:
        """The process is gone, and with it the weights."""
        self.state = EngineState.DEAD
        self.held = self.fresh = None
        self.failed_commits = 0
        self.life.set()
        self.life = asyncio.Event()
