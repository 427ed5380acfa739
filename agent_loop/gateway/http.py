"""Requests and answers of the gateway as bytes: bodies of JSON, errors in OpenAI's shape, rewards."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from agent_loop.gateway.asks import Refusal
from configs.limits import MAX_REWARD

MAX_BODY_BYTES = 16 << 20
_MAX_PARTS = 64


async def body_of(request: web.Request) -> bytes:
    """Raises Refusal (400, 413)."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refusal(413, f"got a body of more than {MAX_BODY_BYTES} bytes", code="too_large") from error
    except (web.HTTPException, RequestPayloadError) as error:
        raise Refusal(400, f"got a body that cannot be read: {error}", code="invalid_body") from error


def parsed(body: bytes) -> Any:
    """The JSON of `body`. Raises Refusal (400)."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"got a body that is not JSON: {error}", code="invalid_body") from error


def bearer_of(request: web.Request) -> bytes:
    """The key of a request."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")


def told(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    try:
        content = orjson.dumps(body)
    except TypeError:  # half a surrogate, which a model may write
        content = json.dumps(body).encode()
    return web.Response(body=content, status=status, content_type="application/json", headers=headers)


def told_refusal(refusal: Refusal) -> web.Response:
    headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else None
    return told(refusal.body(), status=refusal.status, headers=headers)


def read_reward(body: Any) -> tuple[float, dict[str, float]]:
    """`{"reward": x, "parts": {name: y}}`, or a bare number. Raises Refusal (400)."""
    if isinstance(body, dict):
        parts = body.get("parts") or {}
        value = body.get("reward")
    else:
        parts, value = {}, body
    if value is None or not _is_finite(value) or not abs(value) <= MAX_REWARD:
        why = f"reward: got {value!r}, expected a finite number of at most {MAX_REWARD:g} in size"
        raise Refusal(400, why, code="invalid_reward", param="reward")
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS or not all(map(_is_finite, parts.values())):
        raise Refusal(400, f"parts: expected at most {_MAX_PARTS} finite numbers by name", code="invalid_reward", param="parts")
    return float(value), {str(name): float(part) for name, part in parts.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
