"""The HTTP server in front of sessions: `/sessions/{id}/v1/…` and rewards, and `/sessions`, where programs take rollouts.

Invariant: a session answers only to its own token, and no longer than its rollout lives; a rollout is given only to who has the
gateway's token.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from aiohttp import web

from agent_loop.errors import LoopError, words_of
from agent_loop.gateway.asks import Refusal, Rules
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.claims import Claims, Offer
from agent_loop.gateway.http import MAX_BODY_BYTES, bearer_of, body_of, parsed, read_reward, told, told_refusal
from agent_loop.gateway.served import CHAT, RESPONSES, TEXT, Interface, ServedSession, facts_of, over
from agent_loop.session import Session
from configs.schema import GatewaySettings

log = structlog.get_logger()

_REMEMBERED = 4096
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "headrace"}
_MAX_REASON = 500
_SHUTDOWN_S = 2.0
"""For answers on their way, at the end."""


class Gateway:
    """Of one process."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._open: dict[str, ServedSession] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._offers: dict[str, Offer] = {}
        """Those that were taken, by session."""
        self._runner: web.AppRunner | None = None
        self._host = settings.host
        self._base = ""
        self.claims = Claims()
        self.claim_tokens: set[str] = set()
        """Whoever has one may take rollouts."""
        self.on_asked: Callable[[], None] = lambda: None
        """Called when a program asks for a rollout."""
        self.on_claim: Callable[[str], None] = lambda token: None
        """Told the token of each program that takes a rollout."""

    @property
    def base(self) -> str:
        """URL, from this host."""
        return self._base

    @property
    def host(self) -> str:
        """By which it is reached from this host, without the port."""
        return self._host

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/sessions", self._claim)
        for path, interface in (("chat/completions", CHAT), ("completions", TEXT), ("responses", RESPONSES)):
            app.router.add_post(f"/sessions/{{id}}/v1/{path}", self._caller(interface))
        app.router.add_get("/sessions/{id}/v1/models", self._models)
        app.router.add_get("/sessions/{id}/v1/models/{model:.+}", self._models)
        app.router.add_post("/sessions/{id}/reward", self._reward)
        app.router.add_post("/sessions/{id}/end", self._end)
        app.router.add_route("*", "/{rest:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._host = _LOOPBACK.get(host, host)
        self._base = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        log.info("gateway listens", url=self._base)

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def open(self, session: Session, branches: Branches) -> ServedSession:
        """Serve `session` until `close`."""
        rules = Rules(run_temperature=session.sampling.temperature, temperature=self._settings.temperature)
        served = ServedSession(session, branches, rules=rules, settings=self._settings)
        self._open[served.identity] = served
        return served

    def url(self, served: ServedSession) -> str:
        """Without the trailing `/v1`."""
        return f"{self._base}/sessions/{served.identity}"

    async def close(self, served: ServedSession) -> None:
        """End what it still generates; every later call is answered with 410."""
        self._open.pop(served.identity, None)
        self._offers.pop(served.identity, None)
        self._over.append(served.identity)
        await served.close()

    # ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────

    def _caller(self, interface: Interface) -> Callable[[web.Request], Any]:
        async def call(request: web.Request) -> web.StreamResponse:
            try:
                served = self._of(request)
                is_repeat = request.headers.get("x-stainless-retry-count", "0") != "0"
                reply = await served.call(interface, await body_of(request), is_repeat=is_repeat)
            except Refusal as refusal:
                return told_refusal(refusal)
            except Exception as error:  # noqa: BLE001 - a request that nobody thought of; the rollout goes on
                log.warning("a request failed in the gateway", path=request.path, error=words_of(error))
                return told_refusal(Refusal(500, f"the gateway failed: {words_of(error)}", code="internal_error"))
            if not reply.ask.stream:
                return told(reply.whole())
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            with contextlib.suppress(ConnectionError):  # the client hung up
                await response.prepare(request)
                for event in reply.events():
                    await response.write(event)
                await response.write_eof()
            return response

        return call

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._of(request)
        except Refusal as refusal:
            return told_refusal(refusal)
        model = request.match_info.get("model")
        return told({**_MODEL, "id": model} if model else {"object": "list", "data": [_MODEL]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        try:
            served = self._of(request)
            value, parts = read_reward(parsed(await body_of(request)))
            if served.is_over:
                raise over()
        except Refusal as refusal:
            return told_refusal(refusal)
        _set_reward(served, value, parts)
        self._ended(served, None)
        return told({"reward": value})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        try:
            served = self._of(request)
            body = await body_of(request)
            found: Any = parsed(body) if body else {}
            if not isinstance(found, Mapping):
                raise Refusal(400, f"got {type(found).__name__}, expected a JSON object", code="invalid_body")
            if served.is_over:
                raise over()
            if served.identity not in self._offers:
                raise Refusal(409, "the rollout ends with its program", code="not_claimed")
            if found.get("reward") is not None:
                _set_reward(served, *read_reward(dict(found)))
        except Refusal as refusal:
            return told_refusal(refusal)
        why = found.get("error")
        self._ended(served, None if why is None else str(why)[:_MAX_REASON])
        return told({"ended": True})

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        try:
            given = bearer_of(request)
            token = next((one for one in self.claim_tokens if secrets.compare_digest(given, one.encode())), None)
            if token is None:
                raise Refusal(401, "got another api key than the gateway's token", code="invalid_api_key")
            self.on_asked()
            body = await body_of(request)
            asked: Any = parsed(body) if body else {}
            wait_s = asked.get("wait_s", self._settings.claim_wait_s) if isinstance(asked, Mapping) else None
            if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not wait_s >= 0:
                why = f"wait_s: got {wait_s!r}, expected seconds of at least 0"
                raise Refusal(400, why, code="invalid_body", param="wait_s")
            offer = await self._claimed(request, min(float(wait_s), self._settings.claim_wait_s))
            if offer is None and self.claims.is_over:
                raise Refusal(503, "the rollouter ends", code="closing", retry_after_s=1)
            if offer is None:
                raise Refusal(429, "no rollout waits to be taken", code="no_rollout", retry_after_s=1)
        except Refusal as refusal:
            return told_refusal(refusal)
        served = offer.served
        served.used_at = time.monotonic()
        self._offers[served.identity] = offer
        offer.taken.set_result(token)
        self.on_claim(token)
        url = f"{request.url.origin()}/sessions/{served.identity}"  # as the program reaches this host
        return told({"id": served.identity, **facts_of(served, url), "task": offer.task})

    async def _claimed(self, request: web.Request, wait_s: float) -> Offer | None:
        ends_at = time.monotonic() + wait_s
        while True:
            offer = await self.claims.claim(ends_at - time.monotonic())
            if offer is None:
                return None
            if request.transport is None or request.transport.is_closing():
                self.claims.offer(offer, first=True)  # whoever asked has hung up
                return None
            if offer.is_open:
                return offer

    def _ended(self, served: ServedSession, why: str | None) -> None:
        offer = self._offers.get(served.identity)
        if offer is None or offer.ended.done():
            return
        if why is None:
            offer.ended.set_result(None)
        else:
            offer.ended.set_exception(LoopError(f"rollout {served.session.rollout_id}: its program gave up: {why}"))

    def _of(self, request: web.Request) -> ServedSession:
        identity = request.match_info["id"]
        served = self._open.get(identity)
        if served is None:
            if identity in self._over:
                raise over()
            raise Refusal(404, "no such session", code="unknown_session")
        if not secrets.compare_digest(bearer_of(request), served.token.encode()):
            raise Refusal(401, "got another api key than the session's token", code="invalid_api_key")
        if served.is_over:
            raise over()
        return served


def _set_reward(served: ServedSession, value: float, parts: dict[str, float]) -> None:
    served.session.reward, served.session.reward_parts = value, parts


async def _unknown(request: web.Request) -> web.StreamResponse:
    known = "…/v1/chat/completions, …/v1/completions, …/v1/responses or …/v1/models"
    return told_refusal(Refusal(404, f"{request.method} is not served here, expected {known}", code="unknown_url"))
