"""The HTTP server in front of sessions: `/sessions/{id}/v1/…` and `/sessions/{id}/reward`.

Invariant: a session answers only to its own token, and no longer than its rollout lives. A failure of the engine ends the
session: its rollout fails with that error; whatever else a program sends is answered and changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog
from aiohttp import web

from agent_loop.gateway.asks import Refusal, read_ask
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.replies import completion, events
from agent_loop.session import Session
from configs.schema import GatewaySettings

log = structlog.get_logger()

_MAX_BODY_BYTES = 16 << 20
_MAX_PARTS = 64
_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class OpenSession:
    """One rollout's, as the server has it."""

    identity: str
    token: str
    session: Session
    branches: Branches
    num_calls: int = 0
    """Now being answered."""
    failure: BaseException | None = None
    """What the engine raised."""
    closed: bool = False
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class Gateway:
    """Of one process."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._open: dict[str, OpenSession] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._runner: web.AppRunner | None = None
        self._base = ""

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{id}/v1/models", self._models)
        app.router.add_post("/sessions/{id}/reward", self._reward)
        app.router.add_route("*", "/{rest:.*}", _unknown)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("gateway listens", url=self._base)

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def open(self, session: Session, branches: Branches) -> OpenSession:
        """Serve `session` until `close`."""
        identity = secrets.token_urlsafe(18)
        found = OpenSession(identity=identity, token=secrets.token_urlsafe(24), session=session, branches=branches)
        self._open[identity] = found
        return found

    def url(self, found: OpenSession) -> str:
        """Without the trailing `/v1`."""
        return f"{self._base}/sessions/{found.identity}"

    async def close(self, found: OpenSession) -> None:
        """End what it still generates; every later call is answered with 410."""
        found.closed = True
        self._open.pop(found.identity, None)
        self._over.append(found.identity)
        for call in list(found.calls):
            call.cancel()
        if found.calls:
            await asyncio.wait(list(found.calls))

    # ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            found = self._of(request)
            ask = read_ask(
                await _json(request),
                run_temperature=found.session.sampling.temperature,
                temperature=self._settings.temperature,
            )
            if found.num_calls >= self._settings.max_calls_per_session:
                raise Refusal(
                    429,
                    f"the session answers {found.num_calls} calls now (gateway.max_calls_per_session)",
                    code="too_many_calls",
                    retry_after_s=1,
                )
            found.num_calls += 1
            try:
                call = asyncio.ensure_future(found.branches.answer(ask))
                found.calls.add(call)
                call.add_done_callback(found.calls.discard)
                await asyncio.wait((call,))
            finally:
                found.num_calls -= 1
            if call.cancelled():
                raise _ended()
            error = call.exception()
            if isinstance(error, Refusal):
                raise error
            if error is not None:
                found.failure = found.failure or error
                raise Refusal(500, "the engine failed, and with it the rollout", code="rollout_failed")
            answer = call.result()
        except Refusal as refusal:
            return _refuse(refusal)
        identity, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        if not ask.stream:
            return _answer(completion(ask, answer, identity=identity, created=created))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events(ask, answer, identity=identity, created=created):
            await response.write(event)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._of(request)
        except Refusal as refusal:
            return _refuse(refusal)
        return _answer({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "headrace"}]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        try:
            found = self._of(request)
            value, parts = read_reward(await _json(request))
        except Refusal as refusal:
            return _refuse(refusal)
        found.session.reward, found.session.reward_parts = value, parts
        return _answer({"reward": value})

    def _of(self, request: web.Request) -> OpenSession:
        identity = request.match_info["id"]
        found = self._open.get(identity)
        if found is None:
            if identity in self._over:
                raise _ended()
            raise Refusal(404, "no such session", code="unknown_session")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), found.token.encode()):
            raise Refusal(401, "got another api key than the session's token", code="invalid_api_key")
        if found.failure is not None or found.closed:
            raise _ended()
        return found


def read_reward(body: Any) -> tuple[float, dict[str, float]]:
    """`{"reward": x, "parts": {name: y}}`, or a bare number. Raises Refusal (400)."""
    if isinstance(body, dict):
        parts = body.get("parts") or {}
        value = body.get("reward")
    else:
        parts, value = {}, body
    if value is None or not _is_number(value):
        raise Refusal(400, f"reward: got {value!r}, expected a finite number", code="invalid_reward", param="reward")
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS or not all(_is_number(part) for part in parts.values()):
        raise Refusal(400, f"parts: expected at most {_MAX_PARTS} finite numbers by name", code="invalid_reward", param="parts")
    return float(value), {str(name): float(part) for name, part in parts.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


async def _json(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal(413, f"got a body of more than {_MAX_BODY_BYTES} bytes", code="too_large") from error
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"got a body that is not JSON: {error}", code="invalid_body") from error


async def _unknown(request: web.Request) -> web.StreamResponse:
    return _refuse(
        Refusal(404, f"{request.method} is not served here, expected …/v1/chat/completions or …/v1/models", code="unknown_url")
    )


def _ended() -> Refusal:
    return Refusal(410, "the session is over", code="session_over")


def _refuse(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else None
    return _answer(refusal.body(), status=refusal.status, headers=headers)


def _answer(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)
