"""The engines of this rollouter: started, supervised, kept at one policy version, and used as one `Engine`.

Invariant: an engine gets a request only while it runs, holds the policy version that was committed last, and is not being
updated. An engine that was started again, or on which a round failed, catches up before it gets one.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from agent_loop.engine import NO_VERSION, Generation, SamplingParams
from agent_loop.errors import BadGeneration, EngineError, EngineUnavailable
from agent_loop.session import session_of
from agent_loop.vllm_client import VllmClient, logprobs_follow_temperature
from configs.bus_address import is_loopback
from configs.cpu import core_shares
from configs.gpu import gpu_shares, visible_gpus
from configs.schema import EngineSettings, Settings, WeightSyncSettings
from rollouter.adapter_engine import ADAPTER_NAME, scale_problem
from rollouter.engine_command import engine_shares
from rollouter.engine_errors import EnginesLost, EngineStartError
from rollouter.engine_limits import EngineLimits
from rollouter.engine_member import EngineState, Held, Member, PartialRollout, WaitStaged
from rollouter.engine_round import Source, bring
from rollouter.engine_seats import Seats
from rollouter.engines import EngineServer
from rollouter.errors import WeightCacheLost
from rollouter.open_turns import OpenTurn, OpenTurns, goes_on_here, salt_of
from rollouter.provenance import with_provenance
from rollouter.ray_server import RayDriver, RayServer
from rollouter.vllm_server import VllmServer
from rollouter.weight_cache import WeightCache
from rollouter.weight_check import unanswered, weights_of
from sample_bus.messages import EngineStatus, RoundResult, WeightRound
from sample_bus.weight_checks import EngineWeights

log = structlog.get_logger()

_MAX_FAILED_COMMITS = 3
_CATCH_UP_AGAIN_S = 1.0
_OTHER_FILES = 256
_ENDING_S = 1.0
"""An engine that closes its connections is about to end."""
_REACH_EVERY_S = 2.0
_LOOK_EVERY_S = 5.0
"""Between two health checks of an engine that nobody complains about."""


class EnginePool:
    """`Engine` over all servers of `engine.num_engines` or `engine.urls`."""

    def __init__(
        self,
        engine: EngineSettings,
        weight_sync: WeightSyncSettings,
        *,
        socket_dir: Path,
        log_dir: Path,
        partial_rollout: Callable[[], PartialRollout],
        live: Callable[[], Settings] | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_round_result: Callable[[RoundResult], None] = lambda result: None,
        cache: WeightCache | None = None,
        adapter_scale: float | None = None,
    ) -> None:
        """`on_change` is called on the event loop after any change of `statuses()`; `on_round_result` with the outcome when an
        engine catches up by itself (the outcomes of `sync` are returned by it). `partial_rollout` is asked at each pause.
        `live` gives the settings in force, for the number of requests of an engine; None: as many as it decodes together.
        `cache` stages for the engines of this host; None: each engine stages from the trainer. `adapter_scale` is what engines
        must count adapters by; None: they are given whole weights."""
        self._adapter_scale = adapter_scale
        self._settings = engine
        self._weight_sync = weight_sync
        self._partial_rollout = partial_rollout
        self._on_change = on_change
        self._on_round_result = on_round_result
        self._cache = cache
        self._ray: RayDriver | None = None
        self._members = self._make_members(socket_dir, log_dir)
        self._look_after_other_hosts()
        self._seats = Seats(self._members)
        self._open_turns = OpenTurns(self._seats.give_back)
        self._limits = None if live is None else EngineLimits(self._members, self._seats, live, on_change=self._touch)
        self._newest: tuple[WeightRound, WaitStaged] | None = None
        self._switch: Callable[[], str] = (lambda: weight_sync.switch) if live is None else lambda: live().weight_sync.switch
        self._turn = asyncio.Lock()
        """Of the engine that switches, where they do so one after another."""
        self._alive = asyncio.Event()
        self._generated_tokens = 0
        self._model: tuple[str, str] | None = None

    def _make_members(self, socket_dir: Path, log_dir: Path) -> list[Member]:
        settings = self._settings
        if settings.urls:
            names = [(f"engine-{index}", url) for index, url in enumerate(settings.urls)]
            return [Member(name, self._client(url), server=None, max_requests=settings.max_num_seqs) for name, url in names]
        gpus = gpu_shares(visible_gpus(), num_engines=settings.num_engines)
        shares = engine_shares(settings.num_engines, cores=core_shares().engine, gpus=None if gpus is None else gpus.engines)
        if settings.placement == "ray":
            self._ray = RayDriver(settings, gpus=gpus, log_file=log_dir / "ray.log")
        members = []
        for index, share in enumerate(shares):
            name = f"engine-{index}"
            socket, log_file = socket_dir / name, log_dir / f"{name}.log"
            server: EngineServer
            if self._ray is not None:
                server = RayServer(name, self._ray, socket=socket, log_file=log_file, cores=share.cores)
            else:
                server = VllmServer(name, settings, socket=socket, log_file=log_file, share=share)
            members.append(Member(name, self._client(server.address), server=server, max_requests=settings.max_num_seqs))
        return members

    def _look_after_other_hosts(self) -> None:
        """Engines that are not on this host get weights by tcp, from the cache or from the trainer."""
        remote = [member.name for member in self._members if not member.is_local]
        if not remote:
            return
        listens = not is_loopback(self._weight_sync.listen_host)
        if self._cache is not None and listens:
            self._cache.serves_others = True
        elif self._weight_sync.transport in ("shared_memory", "file"):
            log.warning(
                "engines of other hosts cannot be reached by this transport unless they share the run's directories",
                engines=remote,
                transport=self._weight_sync.transport,
                expected="weight_sync.transport=tcp, or weight_sync.listen_host beyond loopback with weight_sync.host_cache",
            )

    def _client(self, address: str) -> VllmClient:
        return VllmClient(
            address,
            request_timeout_s=self._settings.request_timeout_s,
            control_timeout_s=self._weight_sync.round_timeout_s,
            model=ADAPTER_NAME if self._weight_sync.lora == "adapter" else None,
        )

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def launch(self) -> None:
        """Start the server processes ahead of `start`: they import what they need while the model is being prepared."""
        if self._cache is not None:
            await self._cache.launch()
        for member in self._members:
            if member.server is not None:
                await member.server.launch()

    async def start(self, model_dir: str, dtype: str) -> None:
        """Start (or reach) all engines and check them; afterwards each waits for its first weights.

        Raises EngineStartError; what was started is ended by `close`.
        """
        self._model = (model_dir, dtype)
        _allow_connections(self._settings.max_num_seqs * len(self._members))
        try:
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(self._start_member(member))
        except ExceptionGroup as errors:  # not except*: what that raises is wrapped again before Python 3.11.4
            first = errors.exceptions[0]
            if isinstance(first, EngineStartError):
                raise first from None
            raise

    async def _start_member(self, member: Member) -> None:
        assert self._model is not None
        self._change(member, EngineState.STARTING)
        if member.server is not None:
            await member.server.serve(*self._model)
        else:
            await self._reach(member, timeout_s=self._settings.start_timeout_s)
            await self._resume(member)
        await self._check(member)
        self._change(member, EngineState.WAITING)

    def _model_dtype(self) -> str:
        assert self._model is not None, "supervise before start"
        return self._model[1]

    async def _resume(self, member: Member) -> None:
        """An engine that was started elsewhere may have been left in mid-commit, by us when it did not answer or by a rollouter
        that is gone; whatever it holds counts for nothing. Raises EngineStartError."""
        try:
            await member.client.resume(timeout_s=self._weight_sync.connect_timeout_s)
        except EngineError as error:
            raise EngineStartError(f"{member.name} ({member.client.address}) cannot be used: {error}") from error

    async def _check(self, member: Member) -> None:
        """Refuse an engine whose log-probabilities leave temperature out, or that applies adapters otherwise than the trainer:
        every importance ratio would be wrong."""
        try:
            follows = await logprobs_follow_temperature(member.client)
            workers = await member.client.collective_rpc("headrace_status")
        except EngineError as error:
            raise EngineStartError(f"{member.name} ({member.client.address}) cannot be used: {error}") from error
        if follows is False:
            raise EngineStartError(
                f"{member.name} ({member.client.address}) reports log-probabilities before temperature, expected after; "
                "start it with --logprobs-mode processed_logprobs"
            )
        for worker in workers:
            problem = scale_problem(worker.get("lora_scale", self._adapter_scale), self._adapter_scale)
            if problem is not None:
                raise EngineStartError(f"{member.name} ({member.client.address}) {problem}")
        if follows is None:
            log.warning("the engine's log-probability mode could not be told", engine=member.name)

    async def close(self) -> None:
        """Stop what was started here; afterwards no process and no socket of it is left."""
        self._seats.fail(EngineUnavailable("the engines are being closed"))
        self._open_turns.close()
        for member in self._members:
            member.lose()
        await asyncio.gather(*(member.client.close() for member in self._members))
        try:
            await asyncio.gather(*(member.server.stop() for member in self._members if member.server is not None))
            if self._cache is not None:
                await self._cache.close()
        finally:
            if self._ray is not None:
                await self._ray.close()

    # ── supervision ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def supervise(self) -> None:
        """Run beside everything else after `start`: restarts dead engines and lets them catch up. Never returns.

        Raises EnginesLost once no engine is left and none may be started again; requests that wait get it too.
        """
        async with asyncio.TaskGroup() as group:
            limiting = None if self._limits is None else group.create_task(self._limits.run())
            caching = None if self._cache is None else group.create_task(self._cache.run(self._model_dtype()))
            watched = [group.create_task(self._watch(member)) for member in self._members]
            await asyncio.wait(watched)
            for side in (limiting, caching):
                if side is not None:
                    side.cancel()
        error = EnginesLost("no engine is left; " + "; ".join(task.result() for task in watched))
        self._seats.fail(error)
        raise error

    async def _watch(self, member: Member) -> str:
        """Look after one engine until it is given up; returns why."""
        server = member.server
        while True:
            ended = asyncio.ensure_future(server.wait_ended() if server is not None else asyncio.Event().wait())
            try:
                reason = await self._until_ended(member, ended)
            finally:
                ended.cancel()
            member.lose()
            self._change(member, EngineState.DEAD)
            log.error("engine lost", engine=member.name, why=reason, restarts=member.restarts)
            reason = await self._restart(member, reason)
            if member.state is EngineState.DEAD:
                return f"{member.name}: {reason}"
            await self._catch_up(member)

    async def _until_ended(self, member: Member, ended: asyncio.Future[int] | asyncio.Future[bool]) -> str:
        """Until the process is gone or the engine proves unusable; looks into every trouble meanwhile, and now and then without
        one: an API server whose engine died lets a call in progress wait for ever."""
        server = member.server
        while True:
            trouble = asyncio.ensure_future(member.trouble.wait())
            try:
                await asyncio.wait((ended, trouble), timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                in_trouble = trouble.done()
            finally:
                trouble.cancel()
            if in_trouble:
                member.trouble.clear()
            if ended.done():
                return _how_it_ended(member, ended.result())
            if not await member.client.is_healthy(timeout_s=self._weight_sync.connect_timeout_s):
                await asyncio.wait((ended,), timeout=_ENDING_S)
                if ended.done():
                    return _how_it_ended(member, ended.result())
                reason = (
                    f"no answer to a health check (weight_sync.connect_timeout_s={self._weight_sync.connect_timeout_s:g} s)"
                )
            elif not in_trouble or await self._recover(member):
                continue
            elif member.failed_commits < _MAX_FAILED_COMMITS:
                await asyncio.wait((ended,), timeout=_CATCH_UP_AGAIN_S)
                continue
            else:
                reason = f"could not load the newest weights in {member.failed_commits} tries"
            if server is None:
                return reason
            log.warning("engine is killed", engine=member.name, why=reason)
            server.kill()
            await asyncio.wait((ended,))
            return reason

    async def _restart(self, member: Member, reason: str) -> str:
        """Start it again, as often as allowed; the member is DEAD afterwards if that is over. Returns the last reason."""
        while member.restarts < self._settings.max_restarts:
            member.restarts += 1
            log.warning("engine is started again", engine=member.name, restart=member.restarts, of=self._settings.max_restarts)
            try:
                await self._start_member(member)
            except EngineStartError as error:
                reason = str(error)
                member.lose()
                self._change(member, EngineState.DEAD)
                log.error("engine did not start again", engine=member.name, why=reason)
            else:
                member.trouble.clear()
                return reason
        return f"{reason} (started again {member.restarts} times, engine.max_restarts={self._settings.max_restarts})"

    async def _recover(self, member: Member) -> bool:
        """It answers: let it go on, with the newest weights; False if it did not take them."""
        member.trust()
        self._touch()
        return await self._catch_up(member)

    async def _catch_up(self, member: Member) -> bool:
        """Bring the newest round to an engine that lacks it; True if it has it now."""
        if self._newest is None:
            return True
        announced, wait_staged = self._newest
        if member.held == Held.of(announced):
            return True
        turn = self._turn if self._switch() == "rolling" else None
        cohort = await self._cohort_of([member], announced)
        result = await self._bring(member, announced, wait_staged, turn=turn, cohort=cohort)
        self._on_round_result(result)
        return result.committed

    async def _reach(self, member: Member, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await member.client.is_healthy(timeout_s=self._weight_sync.connect_timeout_s):
                    log.info("waiting for an engine", engine=member.name, address=member.client.address)
                    await asyncio.sleep(_REACH_EVERY_S)
        except TimeoutError:
            raise EngineStartError(
                f"{member.name}: {member.client.address} did not answer within engine.start_timeout_s={timeout_s:g} s"
            ) from None

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def sync(self, round: WeightRound, wait_staged: WaitStaged) -> list[RoundResult]:
        """Bring every living engine to `round`: stage while generating, then pause, load, resume. One result an engine.

        Never raises for an engine's failure. While no engine lives, it waits for one that is being started again, up to
        engine.start_timeout_s. An engine that comes back later catches up by itself. With `weight_sync.switch=rolling` they
        switch one after another, and those whose turn has not come serve the version before.
        """
        self._newest = (round, wait_staged)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._alive.wait()
        except TimeoutError:
            log.warning("no engine is alive", states=[status.state for status in self.statuses()])
        living = [member for member in self._members if member.is_alive]
        is_rolling = self._switch() == "rolling" and len(living) > 1
        before = self._seats.held
        if is_rolling and before is not None and before.incarnation == round.incarnation:
            self._seats.also = before
        try:
            turn = self._turn if is_rolling else None
            cohort = await self._cohort_of(living, round)
            brought = (self._bring(member, round, wait_staged, turn=turn, cohort=cohort) for member in living)
            return list(await asyncio.gather(*brought))
        finally:
            self._seats.also = None
            self._seats.refresh()

    async def _cohort_of(self, members: Iterable[Member], announced: WeightRound) -> int:
        """How many workers of `members` stage `announced` from the trainer together; over other ways each comes alone."""
        if self._cache is not None or not announced.address.startswith("collective:"):
            return 1
        wanting = [member for member in members if member.held != Held.of(announced)]
        timeout_s = self._weight_sync.connect_timeout_s
        return max(1, sum(await asyncio.gather(*(member.num_workers(timeout_s=timeout_s) for member in wanting))))

    async def _bring(
        self,
        member: Member,
        announced: WeightRound,
        wait_staged: WaitStaged,
        *,
        turn: asyncio.Lock | None = None,
        cohort: int = 1,
    ) -> RoundResult:
        async def open_source(announced: WeightRound) -> Source:
            if self._cache is not None and (member.is_local or self._cache.serves_others):
                try:
                    address = await self._cache.hold(announced, is_local=member.is_local)
                    return Source(address=address, wait_staged=self._cache.wait_staged)
                except WeightCacheLost as error:
                    log.warning("an engine stages from the trainer", engine=member.name, why=str(error))
            return Source(address=announced.address, wait_staged=wait_staged, cohort=cohort)

        def changed() -> None:
            if member.held == Held.of(announced):
                self._seats.held = member.held
            self._touch()

        return await bring(
            member,
            announced,
            open_source,
            mode=self._partial_rollout,
            settings=self._weight_sync,
            drain_timeout_s=self._settings.request_timeout_s,
            on_change=changed,
            turn=turn,
        )

    async def check_weights(self, *, effective: bool) -> list[EngineWeights]:
        """See `EngineFleet.check_weights`; each is asked between two of its rounds."""
        return list(await asyncio.gather(*(self._weights_of(member, effective=effective) for member in self._members)))

    async def _weights_of(self, member: Member, *, effective: bool) -> EngineWeights:
        if not member.is_alive:
            return unanswered(member.name, f"it is {member.state}")
        return await weights_of(member.name, member.client, effective=effective, lock=member.round_lock)

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, *, request_id: str) -> Generation:
        """`agent_loop.engine.Engine`: by the least loaded engine that serves; waits for one.

        A request whose engine gave no answer is tried once more, by another engine or by the same one after its restart.
        """
        try:
            return await self._generate_once(prompt_ids, sampling, request_id)
        except EngineUnavailable as error:
            log.warning("request is tried once more", request_id=request_id, why=str(error))
        return await self._generate_once(prompt_ids, sampling, f"{request_id}-again")

    async def _generate_once(self, prompt_ids: npt.NDArray[np.int32], sampling: SamplingParams, request_id: str) -> Generation:
        session = session_of(request_id)
        turn = self._open_turns.take_up(session, num_tokens=int(prompt_ids.size))
        member = await self._seat(session, turn, prompt_ids)
        num_doubts = member.num_doubts
        assert member.held is not None, f"{member.name} serves without weights"
        asked = salt_of(turn, member=member, held=member.held, mode=self._partial_rollout())
        started_at = time.monotonic()
        turn = None
        try:
            generation = await member.client.generate(prompt_ids, sampling, request_id=request_id, cache_salt=asked.cache_salt)
            num_new = int(generation.token_ids.size)
            if session and sampling.turn_goes_on and generation.stop_reason == "length" and num_new == sampling.max_tokens:
                num_tokens = int(prompt_ids.size) + num_new
                turn = OpenTurn(member=member, asked=asked, fresh=member.fresh, num_tokens=num_tokens)
        except EngineUnavailable:
            member.suspect()
            self._touch()
            raise
        finally:
            if turn is not None:
                self._open_turns.leave(session, turn)
            else:
                self._seats.give_back(member)
        if member.num_doubts != num_doubts:
            raise EngineUnavailable(f"request {request_id}: it is in doubt which weights {member.name} held meanwhile")
        if (generation.versions == NO_VERSION).any():
            raise BadGeneration(f"request {request_id}: {member.name} sampled with weights that no round brought")
        self._generated_tokens += int(generation.token_ids.size)
        if self._limits is not None:
            self._limits.took(member, time.monotonic() - started_at, int(generation.token_ids.size))
        return with_provenance(generation, asked=asked, held=member.held or asked, fresh=member.fresh)

    async def _seat(self, session: str, turn: OpenTurn | None, prompt_ids: npt.NDArray[np.int32]) -> Member:
        """The seat that the turn has kept, if its engine may be asked now; else a new one."""
        if turn is not None:
            if goes_on_here(turn, newest=self._seats.version_at(turn.member)):
                return turn.member
            self._seats.give_back(turn.member)
        return await self._seats.take(session, prompt=xxhash.xxh3_64_intdigest(prompt_ids.data))

    # ── what is seen from outside ────────────────────────────────────────────────────────────────────────────────────

    def statuses(self) -> tuple[EngineStatus, ...]:
        return tuple(member.status() for member in self._members)

    @property
    def policy_version(self) -> int | None:
        """The version that serving engines hold; None before the first sync."""
        return None if self._seats.held is None else self._seats.held.policy_version

    @property
    def generated_tokens(self) -> int:
        """Tokens that `generate` returned since the start."""
        return self._generated_tokens

    def _change(self, member: Member, state: EngineState) -> None:
        member.state = state
        self._touch()

    def _touch(self) -> None:
        if any(member.is_alive for member in self._members):
            self._alive.set()
        else:
            self._alive.clear()
        self._seats.refresh()
        self._on_change()


def _allow_connections(num_connections: int) -> None:
    """Make sure that this process may open one connection a request. Raises EngineStartError."""
    needed = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EngineStartError(
            f"{num_connections} requests at once (engine.max_num_seqs of all engines) need {needed} open files; "
            f"no more than {hard} are allowed (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _how_it_ended(member: Member, status: object) -> str:
    words = "" if member.server is None else f": {member.server.why_ended()}"
    return f"ended with status {status}{words}"
