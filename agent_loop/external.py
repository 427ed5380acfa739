"""The agent loop of programs that live longer than a rollout: they take rollouts from the gateway, one after the other or many
at once, from wherever they run.

Invariant: a rollout's time begins when a program takes it. A program that says nothing more, or ends, fails what it took and
nothing else. What waits for a program that never comes is said in the log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Self

import orjson
import structlog

from agent_loop.errors import AgentLoopError, LoopError, ProgramUnavailable, words_of
from agent_loop.gateway.claims import Offer
from agent_loop.gateway.client import TOKEN_VARIABLE, URL_VARIABLE
from agent_loop.gateway.program_process import beside_proxies, end_of, run_program
from agent_loop.gateway.server import Gateway
from agent_loop.loop import LoopSetup
from agent_loop.program import branches_of, check_command, check_reward, listen, task_of
from agent_loop.session import Session
from agent_loop.task import Task
from configs.schema import GatewaySettings, ToolSettings

log = structlog.get_logger()

_COMPLAINS_AFTER_S = 30.0
_GRACE_S = 2.0
_MAX_BARREN = 3
"""Programs of ours in a row that end without having taken a rollout, after which rollouts fail instead of waiting."""
_LONGEST_PAUSE_S = 30.0
_LONG_LOG_BYTES = 64 << 20
"""A log of a program that is longer when it is started again is put aside; one is kept so."""


class External:
    """Offers rollouts; starts `gateway.command` as programs of its own where there is one."""

    shows = ("system", "user", "tool")

    def __init__(self, settings: GatewaySettings, tools: ToolSettings, run_dir: Path) -> None:
        self._settings = settings
        self._tools = tools
        self._run_dir = run_dir
        self._gateway = Gateway(settings)
        self._gateway.on_asked = self._asked
        self._gateway.on_claim = self._claimed
        self._programs: list[asyncio.Task[None]] = []
        self._playing: dict[str, set[Offer]] = {}
        """By the token of who took them."""
        self._fault: ProgramUnavailable | None = None
        """Why nothing can be played now."""
        self._barren = dict.fromkeys(range(settings.num_programs), 0)
        """Times in a row that each program ended without having taken one of the rollouts that were offered."""
        self._complained_at = 0.0
        self._claimed_at = time.monotonic()

    @classmethod
    def set_up(cls, setup: LoopSetup) -> Self:
        """Raises LoopError where it has no directory, or its program is not there."""
        if setup.run_dir is None:
            raise LoopError("the agent loop external needs a run_dir")
        if setup.gateway.command:
            check_command(setup.gateway)
        return cls(setup.gateway, setup.tools, setup.run_dir)

    @property
    def address_file(self) -> Path:
        """Where a program on this host finds the URL and the token: JSON with `url` and `token`."""
        return self._run_dir / "gateway.json"

    async def open(self) -> None:
        """Listen, and start what is to be started. Raises LoopError when nobody can listen."""
        await listen(self._gateway, self._settings)
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        self._gateway.claim_tokens.add(token)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self.address_file.unlink(missing_ok=True)
        with os.fdopen(os.open(self.address_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(orjson.dumps({"url": self._gateway.base, "token": token}))
        if self._settings.command:
            self._programs = [
                asyncio.create_task(self._keep(number), name=f"program {number}")
                for number in range(self._settings.num_programs)
            ]
        else:
            log.info("rollouts wait for programs to take them", url=self._gateway.base, token_in=str(self.address_file))

    async def close(self) -> None:
        self._gateway.claims.end()
        self._gateway.claims.fail_all(ProgramUnavailable("the rollouter ends"))
        for program in self._programs:
            program.cancel()
        if self._programs:
            await asyncio.wait(self._programs)
        self.address_file.unlink(missing_ok=True)
        await self._gateway.stop()

    async def run(self, task: Task, session: Session) -> None:
        """See `AgentLoop.run`. Raises LoopError when the program fails or falls silent, Unscored when it leaves no reward that
        was asked of it, and what the engine raised."""
        if self._fault is not None:
            raise ProgramUnavailable(str(self._fault))
        told = task_of(task)
        served = self._gateway.open(session, branches_of(session, self._tools))
        offer = Offer(task=told, served=served)
        try:
            if session.deadline is not None:
                session.deadline.hold()
            self._gateway.claims.offer(offer)
            token = await self._until_taken(offer)
            if session.deadline is not None:
                session.deadline.begin()
            players = self._playing.setdefault(token, set())
            players.add(offer)
            try:
                await self._until_ended(offer)
            finally:
                players.discard(offer)
        finally:
            self._gateway.claims.withdraw(offer)
            for unheard in (offer.taken, offer.ended):
                if unheard.done() and not unheard.cancelled():
                    unheard.exception()
            await self._gateway.close(served)
        if served.failure is not None:
            raise served.failure
        check_reward(session, self._settings)

    async def _until_taken(self, offer: Offer) -> str:
        while True:
            await asyncio.wait((offer.taken,), timeout=_COMPLAINS_AFTER_S)
            if offer.taken.done():
                return offer.taken.result()
            now = time.monotonic()
            if now - max(self._complained_at, self._claimed_at) >= _COMPLAINS_AFTER_S:
                self._complained_at = now
                log.warning(
                    "rollouts wait for a program to take them, and none asks",
                    waiting=self._gateway.claims.num_offers,
                    since_s=round(now - self._claimed_at),
                    url=f"{self._gateway.base}/sessions",
                    token_in=str(self.address_file),
                )

    async def _until_ended(self, offer: Offer) -> None:
        """Raises LoopError when the program fails, or makes no call for `gateway.idle_timeout_s`."""
        served, idle_s = offer.served, self._settings.idle_timeout_s
        failed = asyncio.ensure_future(served.failed.wait())
        try:
            while not offer.ended.done() and not failed.done():
                left_s = idle_s if served.num_running else served.used_at + idle_s - time.monotonic()
                if left_s <= 0:
                    why = f"its program made no call for {idle_s:g} s (gateway.idle_timeout_s)"
                    raise LoopError(f"rollout {served.session.rollout_id}: {why}")
                await asyncio.wait((offer.ended, failed), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
        if offer.ended.done():
            offer.ended.result()

    # ── programs of ours ─────────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self) -> None:
        self._fault = None

    def _claimed(self, token: str) -> None:
        self._claimed_at = time.monotonic()
        self._playing.setdefault(token, set())

    async def _keep(self, number: int) -> None:
        """Start program `number`, and start it again whenever it ends."""
        num_ends = 0
        while True:
            token = secrets.token_urlsafe(24)
            self._gateway.claim_tokens.add(token)
            try:
                why = await self._play(number, token)
            except (AgentLoopError, OSError) as error:
                why = words_of(error)
            finally:
                self._gateway.claim_tokens.discard(token)
            took = self._playing.pop(token, None)
            for offer in took or ():
                if not offer.ended.done():
                    rollout_id = offer.served.session.rollout_id
                    offer.ended.set_exception(ProgramUnavailable(f"rollout {rollout_id}: {why}"))
            num_ends = num_ends + 1 if took is None else 0
            if took is not None:
                self._barren[number] = 0
            elif self._gateway.claims.num_offers or self._fault is not None:
                self._barren[number] += 1
            pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2**num_ends) if num_ends else 0.0
            log.warning("program ended", program=number, why=why, failed_rollouts=len(took or ()), again_in_s=pause_s)
            self._judge(why)
            await asyncio.sleep(pause_s)

    def _judge(self, why: str) -> None:
        """Rollouts fail while no program is able to take one, instead of waiting."""
        if min(self._barren.values()) >= _MAX_BARREN and not self._gateway.claims.num_waiting:
            self._fault = ProgramUnavailable(f"gateway.command ends each time without taking a rollout: {why}")
            self._gateway.claims.fail_all(self._fault)

    async def _play(self, number: int, token: str) -> str:
        """How it ended. Raises LoopError when it cannot be started, OSError when its log cannot be written."""
        path = self._run_dir / "logs" / f"program-{number}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _LONG_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        variables = {URL_VARIABLE: self._gateway.base, TOKEN_VARIABLE: token, **beside_proxies(self._gateway.host)}
        with path.open("ab") as file:
            log.info("program starts", program=number, command=list(self._settings.command), log=str(path))
            ended = await run_program(self._settings.command, variables, into=file, grace_s=_GRACE_S)
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return f"the program ended with status {ended.status}: {end_of(file.read())!r} ({path})"
