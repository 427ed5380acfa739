"""The other end of the gateway, for programs that take rollouts: `serve_rollouts(play)` plays them as they come.

Only aiohttp and the standard library are needed; what it sends stands in docs/gateway.md, for programs in other languages.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

URL_VARIABLE = "HEADRACE_GATEWAY_URL"
TOKEN_VARIABLE = "HEADRACE_GATEWAY_TOKEN"
_PATIENCE_S = 60.0
"""How long a gateway that does not answer is asked again."""
_WAIT_S = 20.0
"""How long one request for a rollout waits for one."""
_MAX_WORDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout that this program has to play."""

    task: Mapping[str, Any]
    """`task_id`, `prompt`, `messages`, `ground_truth`, `data_source`, `extra_info`."""
    base_url: str
    """For an OpenAI client."""
    api_key: str


Reward = float | Mapping[str, Any] | None
"""A number, a mapping with `reward` and `parts`, or None: the run's reward function is asked."""


class GatewayLost(Exception):
    """Raised when the gateway refuses this program, or does not answer any more."""


async def serve_rollouts(
    play: Callable[[Rollout], Awaitable[Reward]],
    *,
    concurrency: int = 16,
    address_file: str | os.PathLike[str] | None = None,
) -> None:
    """Play rollouts, so many at once, until the rollouter has ended and none comes in its place for a minute.

    Its address is taken from the environment (a program that the rollouter started has it there) or from `address_file`, the
    run's `gateway.json`, which is read each time: a rollouter that comes again listens elsewhere. What `play` raises fails its
    rollout and no other one. Raises GatewayLost.
    """
    if address_file is None:
        _address(None)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        workers = [asyncio.create_task(_work(http, address_file, play)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def _address(file: str | os.PathLike[str] | None) -> tuple[str, str]:
    if file is not None:
        found = json.loads(Path(file).read_bytes())
        return str(found["url"]), str(found["token"])
    try:
        return os.environ[URL_VARIABLE], os.environ[TOKEN_VARIABLE]
    except KeyError as error:
        raise GatewayLost(
            f"no gateway: {error.args[0]} is not set (the rollouter sets it for gateway.command), and no address_file was "
            "given (RUN_DIR/gateway.json of a run on this host)"
        ) from None


async def _work(
    http: aiohttp.ClientSession, address_file: str | os.PathLike[str] | None, play: Callable[[Rollout], Awaitable[Reward]]
) -> None:
    silent_since: float | None = None
    is_ending = False
    clock = asyncio.get_running_loop().time
    while True:
        try:
            url, token = _address(address_file)
            status, found, wait_s = await _post(http, f"{url}/sessions", token, {"wait_s": _WAIT_S})
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: no address, no answer of ours
            silent_since = silent_since or clock()
            if clock() - silent_since > _PATIENCE_S and is_ending:
                return
            if clock() - silent_since > _PATIENCE_S:
                raise GatewayLost(f"no gateway answered for {_PATIENCE_S:g} s: {error!r}") from error
            await asyncio.sleep(1.0)
            continue
        silent_since, is_ending = None, status == 503
        if status in (429, 503):
            await asyncio.sleep(wait_s)
        elif status != 200:
            raise GatewayLost(f"{url} refused a rollout with status {status}: {found}")
        else:
            await _play(http, found, play)


async def _play(http: aiohttp.ClientSession, found: Any, play: Callable[[Rollout], Awaitable[Reward]]) -> None:
    rollout = Rollout(task=found["task"], base_url=found["base_url"], api_key=found["api_key"])
    try:
        body = _body(await play(rollout))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        body = {"error": "something in it was cancelled"}
    except Exception as error:  # noqa: BLE001 - an agent is a program of its author: it may raise anything
        words = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_WORDS]
        sys.stderr.write(f"rollout of {rollout.task.get('task_id')} failed: {words}\n")
        body = {"error": words}
    try:
        status, said, _ = await _post(http, found["end_url"], rollout.api_key, body)
        if status == 400:
            await _post(http, found["end_url"], rollout.api_key, {"error": f"its end was refused: {said}"[:_MAX_WORDS]})
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        status, said = 0, str(error)
    if status not in (200, 410):  # 410: its deadline was over before
        sys.stderr.write(f"the end of {rollout.task.get('task_id')} was not taken: status {status}: {said}\n")


def _body(reward: Reward) -> dict[str, Any]:
    """Plain data. Raises what odd rewards raise."""
    if reward is None:
        return {}
    if not isinstance(reward, Mapping):
        return {"reward": float(reward)}
    parts = reward.get("parts") or {}
    value = reward.get("reward")
    return {
        "reward": None if value is None else float(value),
        "parts": {str(name): float(part) for name, part in parts.items()},
    }


async def _post(http: aiohttp.ClientSession, url: str, token: str, body: Any) -> tuple[int, Any, float]:
    """(status, answer, seconds to wait before asking again)."""
    async with http.post(url, json=body, headers={"Authorization": f"Bearer {token}"}) as response:
        found = await response.json(content_type=None)
        return response.status, found, float(response.headers.get("Retry-After", "1"))
