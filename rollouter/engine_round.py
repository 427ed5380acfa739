"""How a round of weights is brought to one engine: stage while it generates, then pause, load, stamp, resume.

Invariant: what may stand in a KV cache under new weights is known. `keep` freezes the requests in flight and lets them go on
with their cache; `recompute` ends them with what they have, and `finish` lets them come to their end first, and both empty the
prefix cache before the new version is stamped. However a commit ends, generation is resumed in one place, and a request reaches
the engine only after that was answered. Each phase has its deadline, and so has what is asked after a failure: an engine that
misses one, or is lost meanwhile, is out of the round, and holds up the others no longer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from agent_loop.errors import AgentLoopError, EngineUnavailable, RequestRefused
from agent_loop.vllm_client import VllmClient
from agent_loop.vllm_wire import UNLABELLED
from configs.schema import WeightSyncSettings
from rollouter.engine_member import EngineState, Held, Member, PartialRollout, WaitStaged
from rollouter.engine_turn import Turn
from rollouter.errors import WeightCacheLost
from sample_bus.messages import RoundPhase, RoundResult, WeightRound

log = structlog.get_logger()

_CACHE_RESETS = 5
_RESET_AGAIN_S = 0.05
"""The blocks of requests that have just ended may be held a moment longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an engine stages a version from, and who says that it has."""

    address: str
    wait_staged: WaitStaged
    cohort: int = 1
    """Workers of all engines that stage it there at the same time, over a collective."""


OpenSource = Callable[[WeightRound], Awaitable[Source]]
"""Returns once the version can be staged there; raises why it cannot."""


async def bring(
    member: Member,
    announced: WeightRound,
    open_source: OpenSource,
    *,
    mode: Callable[[], PartialRollout],
    settings: WeightSyncSettings,
    drain_timeout_s: float,
    on_change: Callable[[], None],
    turn: asyncio.Lock | None = None,
) -> RoundResult:
    """Bring one engine to a round. `mode` is asked when the pause begins; `turn` is held while it switches, for no longer than
    a switch may take.

    Never raises for the engine's failure: the result has the reason. `on_change` is called whenever the member's state changed.
    """
    async with member.round_lock:
        if member.held == Held.of(announced):
            return _result(member, announced, committed=True)
        progress = _Progress()
        member.begin_attempt(Held.of(announced))

        async def switch() -> None:
            await _stage(member, announced, open_source, settings)
            progress.stage_ms = (time.monotonic() - started) * 1e3
            async with Turn(turn) as mine:
                progress.phase = RoundPhase.COMMIT
                await _commit(
                    member,
                    announced,
                    progress,
                    mine,
                    mode=mode(),
                    settings=settings,
                    drain_timeout_s=drain_timeout_s,
                    on_change=on_change,
                )

        started = time.monotonic()
        try:
            await _unless_lost(member, switch())
        except Exception as error:  # noqa: BLE001 - an engine's failure is this round's result, whatever it is
            member.trouble.set()
            reason = str(error) or type(error).__name__
            log.warning(
                "round failed on an engine",
                engine=member.name,
                policy_version=announced.policy_version,
                phase=progress.phase.value,
                attempt=member.attempt,
                why=reason,
            )
            return _result(member, announced, committed=False, stage_ms=progress.stage_ms, phase=progress.phase, message=reason)
        result = _result(member, announced, committed=True, stage_ms=progress.stage_ms)
        return result.model_copy(update={"probe_logprobs": await _probe(member, announced)})


async def _unless_lost(member: Member, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, up to the moment in which the engine is lost. Raises what it raises, and EngineUnavailable."""
    task, lost = asyncio.ensure_future(work), asyncio.ensure_future(member.life.wait())
    try:
        if member.is_alive:
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
    finally:
        lost.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        raise EngineUnavailable(f"{member.name} was lost meanwhile")
    task.result()


async def _probe(member: Member, announced: WeightRound) -> tuple[float, ...]:
    """The round's probe, scored while the engine generates under the same weights; nothing where it does not answer."""
    if not announced.probe_ids or member.held is None:
        return ()
    scored: list[float] = []

    async def score(cache_salt: str) -> None:
        scored.extend(await member.client.score(announced.probe_ids, cache_salt=cache_salt))

    try:
        await _unless_lost(member, score(member.held.cache_salt))
    except AgentLoopError as error:
        log.warning("engine did not score the probe", engine=member.name, why=str(error))
    return tuple(scored)


@dataclass(slots=True)
class _Progress:
    phase: RoundPhase = RoundPhase.STAGE
    stage_ms: float = 0.0


def _result(
    member: Member,
    announced: WeightRound,
    *,
    committed: bool,
    stage_ms: float = 0.0,
    phase: RoundPhase | None = None,
    message: str = "",
) -> RoundResult:
    return RoundResult(
        policy_version=announced.policy_version,
        engine=member.name,
        committed=committed,
        manifest_digest=announced.manifest_digest if committed else "",
        pause_ms=(member.last_pause_ms or 0.0) if committed else 0.0,
        stage_ms=stage_ms,
        drain_ms=(member.last_drain_ms or 0.0) if committed else 0.0,
        incarnation=announced.incarnation,
        attempt=max(1, member.attempt),
        phase=phase,
        message=message,
    )


async def _stage(member: Member, announced: WeightRound, open_source: OpenSource, settings: WeightSyncSettings) -> None:
    deadline_s, setting = min(
        (settings.round_timeout_s, "round_timeout_s"), (settings.stage_timeout_s, "stage_timeout_s"), key=lambda pair: pair[0]
    )

    async def stage_from(source: Source) -> None:
        nonce = secrets.token_hex(8)
        await member.client.collective_rpc(
            "headrace_stage",
            address=source.address,
            policy_version=announced.policy_version,
            engine=member.name,
            nonce=nonce,
            timeout_s=deadline_s,
            verify=settings.verify,
            cohort=source.cohort,
        )
        await source.wait_staged(announced, member.name, nonce)

    try:
        async with asyncio.timeout(deadline_s):
            try:
                await stage_from(await open_source(announced))
            except WeightCacheLost as error:
                log.warning("an engine stages once more", engine=member.name, why=str(error))
                await stage_from(await open_source(announced))
    except TimeoutError as error:
        raise EngineUnavailable(
            f"version {announced.policy_version} was not staged on {member.name} within weight_sync.{setting}={deadline_s:g} s"
        ) from error


async def _commit(
    member: Member,
    announced: WeightRound,
    progress: _Progress,
    turn: Turn,
    *,
    mode: PartialRollout,
    settings: WeightSyncSettings,
    drain_timeout_s: float,
    on_change: Callable[[], None],
) -> None:
    """Close the door, pause, load, confirm, resume. Raises what went wrong; the member says afterwards what it holds.

    From the pause on there is one deadline, at which the turn is passed on, too. An engine that is lost meanwhile is left
    alone: whatever comes in its place is none of this commit's business.
    """
    life = member.life
    member.state = EngineState.UPDATING
    on_change()
    num_in_flight = member.in_flight
    closed_at = time.monotonic()
    if mode == "finish":
        try:
            await _drain(member, drain_timeout_s)
        except BaseException:
            member.settle()
            on_change()
            raise
    paused_at = time.monotonic()
    deadline_s, setting = min((settings.commit_timeout_s, "commit_timeout_s"), (settings.round_timeout_s, "round_timeout_s"))
    turn.end_in(deadline_s)
    try:
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                await member.client.pause("keep" if mode == "keep" else "abort", clear_cache=False)
                await _load(member, announced, progress, settings, reset_cache=mode != "keep")
        except BaseException as error:
            member.failed_commits += 1
            if member.life is life:
                await asyncio.shield(_look_after_failure(member, settings.confirm_timeout_s))
            if isinstance(error, TimeoutError) and deadline.expired():
                raise EngineUnavailable(
                    f"{member.name} did not switch to version {announced.policy_version} within "
                    f"weight_sync.{setting}={deadline_s:g} s"
                ) from error
            raise
        if member.life is life:
            member.hold(Held.of(announced), fresh_cache=mode != "keep")
    finally:
        if member.life is life:
            await asyncio.shield(_resume(member, settings.connect_timeout_s))
        member.last_pause_ms = (time.monotonic() - paused_at) * 1e3
        member.last_drain_ms = (paused_at - closed_at) * 1e3
        member.settle()
        on_change()
    if member.held is None:
        raise EngineUnavailable(f"{member.name} loaded version {announced.policy_version} but did not resume")
    member.failed_commits = 0
    log.debug(
        "engine updated",
        engine=member.name,
        policy_version=announced.policy_version,
        partial_rollout=mode,
        num_in_flight=num_in_flight,
        drain_ms=round(member.last_drain_ms, 1),
        pause_ms=round(member.last_pause_ms, 1),
    )


async def _drain(member: Member, timeout_s: float) -> None:
    """Until no turn is under way. Raises EngineUnavailable at the deadline: nothing is wrong with the engine, which serves on
    and is asked again."""
    member.is_draining = True
    try:
        async with asyncio.timeout(timeout_s):
            await member.idle.wait()
    except TimeoutError:
        raise EngineUnavailable(
            f"{member.name} still has {member.in_flight} requests {timeout_s:g} s after its door was closed "
            "(partial_rollout=finish, engine.request_timeout_s)"
        ) from None
    finally:
        member.is_draining = False


async def _resume(member: Member, timeout_s: float) -> None:
    """Once, however the commit ended; an engine that does not resume counts as holding nothing."""
    try:
        await member.client.resume(timeout_s=timeout_s)
    except AgentLoopError as error:
        member.doubt()
        log.warning("engine did not resume", engine=member.name, why=str(error))


async def _load(
    member: Member, announced: WeightRound, progress: _Progress, settings: WeightSyncSettings, *, reset_cache: bool
) -> None:
    client = member.client
    await client.start_weight_update()
    update_info = {
        "policy_version": announced.policy_version,
        "manifest_digest": announced.manifest_digest,
        "verify": settings.verify == "always" or (settings.verify == "first" and member.held is None),
    }
    await client.update_weights(update_info, timeout_s=min(settings.commit_timeout_s, settings.round_timeout_s))
    if reset_cache:
        await _reset_prefix_cache(client, announced)
    progress.phase = RoundPhase.CONFIRM
    try:
        async with asyncio.timeout(settings.confirm_timeout_s):
            await client.finish_weight_update(str(announced.policy_version))
            loaded = await _loaded_versions(client)
    except TimeoutError:
        raise EngineUnavailable(
            f"version {announced.policy_version} was not confirmed within "
            f"weight_sync.confirm_timeout_s={settings.confirm_timeout_s:g} s"
        ) from None
    if loaded != {announced.policy_version}:
        raise RequestRefused(f"after the update the workers hold {loaded}, expected version {announced.policy_version}")


async def _reset_prefix_cache(client: VllmClient, announced: WeightRound) -> None:
    """Nothing that older weights computed is left. Raises RequestRefused if the engine says again and again that it is."""
    for attempt in range(_CACHE_RESETS):
        await asyncio.sleep(_RESET_AGAIN_S * min(attempt, 1))
        if await client.reset_prefix_cache():
            return
    raise RequestRefused(
        f"the prefix cache was not emptied for version {announced.policy_version} in {_CACHE_RESETS} tries: blocks are in use"
    )


async def _loaded_versions(client: VllmClient) -> set[int | None]:
    return {status["loaded"] for status in await client.collective_rpc("headrace_status")}


async def _look_after_failure(member: Member, timeout_s: float) -> None:
    """Find out whether the weights before are still loaded, whole and labelled as such. If not, or if nobody says, what the
    engine samples from here on counts for nothing."""
    before = None if member.held is None else member.held.policy_version
    expected = UNLABELLED if before is None else str(before)
    try:
        async with asyncio.timeout(timeout_s):
            if await _loaded_versions(member.client) == {before} and await member.client.weight_version() == expected:
                return
    except (AgentLoopError, TimeoutError) as error:
        why = str(error) or f"no answer within weight_sync.confirm_timeout_s={timeout_s:g} s"
        log.warning("engine does not say what it holds", engine=member.name, why=why)
    member.doubt()
    if member.server is not None:
        member.server.kill()
