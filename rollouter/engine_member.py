"""One engine of the pool: its client, what it holds, and how a round of weights is brought to it.

Invariant: the engine holds all of one version, and the pool knows which; when that is in doubt, it counts as holding none.
However a commit ends, generation is resumed in one place, and a request reaches the engine only after that was answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import structlog

from agent_loop.errors import AgentLoopError, EngineUnavailable, RequestRefused
from agent_loop.vllm_client import VllmClient
from agent_loop.vllm_wire import UNLABELLED
from configs.schema import WeightSyncSettings
from rollouter.engines import EngineServer
from sample_bus.messages import EngineStatus, RoundResult, WeightRound

log = structlog.get_logger()

PartialRollout = Literal["keep", "recompute", "finish"]

WaitStaged = Callable[[WeightRound, str, str], Awaitable[None]]
"""(round, engine name, nonce): returns once the trainer says that this staging is complete (topic `round`,
`staged[engine] == nonce`); raises any Exception with the reason if it failed (`failed[nonce]`) or was overtaken by a newer
round. The pool sets the deadline."""


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
        """`server` is None for an engine that was started elsewhere."""
        self.name = name
        self.client = client
        self.server = server
        self.max_requests = max_requests
        self.state = EngineState.STARTING
        self.held: Held | None = None
        self.in_flight = 0
        self.restarts = 0
        self.failed_commits = 0
        """In a row, the engine's own: a staging that the trainer failed does not count."""
        self.num_doubts = 0
        """How often it was unsure what the engine holds; what it generated over such a moment is thrown away."""
        self.last_pause_ms: float | None = None
        self.round_lock = asyncio.Lock()
        self.trouble = asyncio.Event()
        """Set when the engine must be looked at: it gave no answer in time, or a round failed on it."""

    @property
    def is_alive(self) -> bool:
        return self.state not in (EngineState.STARTING, EngineState.DEAD)

    def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            state=self.state.value,
            policy_version=None if self.held is None else self.held.policy_version,
            num_running=self.in_flight,
            last_pause_ms=self.last_pause_ms,
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

    def doubt(self) -> None:
        """Nobody knows what it holds."""
        self.held = None
        self.num_doubts += 1

    def settle(self) -> None:
        """Serve if there are weights to serve."""
        self.state = EngineState.WAITING if self.held is None else EngineState.SERVING

    def lose(self) -> None:
        """The process is gone, and with it the weights."""
        self.state = EngineState.DEAD
        self.held = None
        self.failed_commits = 0


async def bring(
    member: Member,
    announced: WeightRound,
    wait_staged: WaitStaged,
    *,
    mode: PartialRollout,
    settings: WeightSyncSettings,
    on_change: Callable[[], None],
) -> RoundResult:
    """Bring one engine to a round: stage while it generates, then pause, load, confirm, resume.

    Never raises for the engine's failure: the result has the reason. `on_change` is called whenever the member's state changed.
    """
    async with member.round_lock:
        started = time.monotonic()
        stage_ms = 0.0
        if member.held == Held.of(announced):
            return _result(member, announced, committed=True)
        try:
            await _stage(member, announced, wait_staged, settings)
            stage_ms = (time.monotonic() - started) * 1e3
            await _commit(member, announced, mode=mode, settings=settings, on_change=on_change)
        except Exception as error:  # noqa: BLE001 - an engine's failure is this round's result, whatever it is
            member.trouble.set()
            reason = str(error) or type(error).__name__
            log.warning("round failed on an engine", engine=member.name, policy_version=announced.policy_version, why=reason)
            return _result(member, announced, committed=False, stage_ms=stage_ms, message=reason)
        return _result(member, announced, committed=True, stage_ms=stage_ms)


def _result(
    member: Member, announced: WeightRound, *, committed: bool, stage_ms: float = 0.0, message: str = ""
) -> RoundResult:
    return RoundResult(
        policy_version=announced.policy_version,
        engine=member.name,
        committed=committed,
        manifest_digest=announced.manifest_digest if committed else "",
        pause_ms=(member.last_pause_ms or 0.0) if committed else 0.0,
        stage_ms=stage_ms,
        message=message,
    )


async def _stage(member: Member, announced: WeightRound, wait_staged: WaitStaged, settings: WeightSyncSettings) -> None:
    nonce = secrets.token_hex(8)
    deadline_s = settings.round_timeout_s
    await member.client.collective_rpc(
        "headrace_stage",
        address=announced.address,
        policy_version=announced.policy_version,
        engine=member.name,
        nonce=nonce,
        timeout_s=deadline_s,
    )
    try:
        async with asyncio.timeout(deadline_s):
            await wait_staged(announced, member.name, nonce)
    except TimeoutError as error:
        raise EngineUnavailable(
            f"version {announced.policy_version} was not staged on {member.name} within "
            f"weight_sync.round_timeout_s={deadline_s:g} s"
        ) from error


async def _commit(
    member: Member,
    announced: WeightRound,
    *,
    mode: PartialRollout,
    settings: WeightSyncSettings,
    on_change: Callable[[], None],
) -> None:
    """Pause, load, confirm, resume. Raises what went wrong; the member's state says afterwards what it holds."""
    client = member.client
    member.state = EngineState.UPDATING
    on_change()
    paused_at = time.monotonic()
    try:
        try:
            paused_at = await _pause(client, mode, settings)
            await _load(client, announced, settings)
        except BaseException:
            member.failed_commits += 1
            await asyncio.shield(_look_after_failure(member))
            raise
        member.held = Held.of(announced)
    finally:
        await asyncio.shield(_resume(member))
        member.last_pause_ms = (time.monotonic() - paused_at) * 1e3
        member.settle()
        on_change()
    if member.held is None:
        raise EngineUnavailable(f"{member.name} loaded version {announced.policy_version} but did not resume")
    member.failed_commits = 0


async def _resume(member: Member) -> None:
    """Once, however the commit ended; an engine that does not resume counts as holding nothing."""
    try:
        await member.client.resume()
    except AgentLoopError as error:
        member.doubt()
        log.warning("engine did not resume", engine=member.name, why=str(error))


async def _pause(client: VllmClient, mode: PartialRollout, settings: WeightSyncSettings) -> float:
    """Returns the time from which nothing was generated."""
    if mode == "finish":
        await client.pause("wait", clear_cache=True, timeout_s=settings.round_timeout_s)
        return time.monotonic()
    asked_at = time.monotonic()
    await client.pause("keep", clear_cache=mode == "recompute")
    return asked_at


async def _load(client: VllmClient, announced: WeightRound, settings: WeightSyncSettings) -> None:
    await client.start_weight_update()
    update_info = {"policy_version": announced.policy_version, "manifest_digest": announced.manifest_digest}
    await client.update_weights(update_info, timeout_s=settings.round_timeout_s)
    await client.finish_weight_update(str(announced.policy_version))
    loaded = await _loaded_versions(client)
    if loaded != {announced.policy_version}:
        raise RequestRefused(f"after the update the workers hold {loaded}, expected version {announced.policy_version}")


async def _loaded_versions(client: VllmClient) -> set[int | None]:
    return {status["loaded"] for status in await client.collective_rpc("headrace_status")}


async def _look_after_failure(member: Member) -> None:
    """Find out whether the weights before are still loaded, whole and labelled as such. If not, or if nobody says, what the
    engine samples from here on counts for nothing."""
    before = None if member.held is None else member.held.policy_version
    expected = UNLABELLED if before is None else str(before)
    try:
        if await _loaded_versions(member.client) == {before} and await member.client.weight_version() == expected:
            return
    except AgentLoopError as error:
        log.warning("engine does not say what it holds", engine=member.name, why=str(error))
    member.doubt()
    if member.server is not None:
        member.server.kill()
