"""A client of one vLLM server: generation by token ids, and the routes that control it.

Invariant: every call ends by a deadline, and its failure is one of three kinds: the engine is unavailable (may be tried again),
it refused what was asked (never), or its answer cannot be trained on. Nothing is tried again here.

The server needs `--enable-scale-out` and `VLLM_SERVER_DEV_MODE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, Self
from urllib.parse import quote

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson

from agent_loop.engine import Generation, SamplingParams
from agent_loop.errors import BadGeneration, EngineUnavailable, RequestRefused
from agent_loop.vllm_wire import decode_choice, decode_prompt_logprobs, decode_response, encode_request

PauseMode = Literal["abort", "wait", "keep"]
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection, so that a request never meets a closing one."""
_RETRYABLE = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_QUOTED = 500
_JSON = {"Content-Type": "application/json"}


class VllmClient:
    """`Engine` over HTTP. As many connections as there are requests at once: nothing queues in the pool unseen.

    Use it inside a running event loop, as an async context manager or with `close`.
    """

    def __init__(self, address: str, *, request_timeout_s: float, control_timeout_s: float, model: str | None = None) -> None:
        """`address` is `unix:PATH` or `http://HOST:PORT`; `control_timeout_s` bounds the calls that do not generate. `model`
        names an adapter of the server that requests are for; None: what it serves."""
        self.address = address
        self._model = model
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        if address.startswith("unix:"):
            self._socket: str | None = address.removeprefix("unix:")
            self._base = "http://engine"
        elif address.startswith(("http://", "https://")):
            self._socket = None
            self._base = address.rstrip("/")
        else:
            raise RequestRefused(f"engine address: got {address!r}, expected unix:PATH or http://HOST:PORT")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests in flight end with EngineUnavailable."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ── generation ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> Generation:
        """`Engine.generate`. Requests with different `cache_salt` share no KV cache. Cancelling closes the connection, upon
        which the server drops the request."""
        body = encode_request(prompt_ids, sampling, request_id=request_id, cache_salt=cache_salt, model=self._model)
        answer = await self._call(
            "POST", "/inference/v1/generate", body=body, timeout_s=self._request_timeout_s, what=request_id
        )
        return decode_response(answer, request_id=request_id)

    async def top_logprobs(self, prompt_ids: Sequence[int], *, temperature: float, num_logprobs: int) -> dict[int, float]:
        """Token id to log-probability of the likeliest next tokens, as the server reports them at `temperature`."""
        sampling = SamplingParams(temperature=temperature, max_tokens=1, seed=0)
        body = encode_request(np.array(prompt_ids, np.int32), sampling, request_id="probe", num_logprobs=num_logprobs)
        answer = await self._call("POST", "/inference/v1/generate", body=body, timeout_s=self._request_timeout_s, what="probe")
        choice = decode_choice(answer, request_id="probe")
        try:
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            return {entry["token_id"]: entry["logprob"] for entry in top}
        except (KeyError, IndexError, TypeError) as error:
            raise BadGeneration(f"probe: got {str(choice)[:_QUOTED]}, expected top_logprobs") from error

    async def score(self, token_ids: Sequence[int], *, cache_salt: str) -> list[float]:
        """Log-probability in nats of each token but the first, given those before it, at temperature 1."""
        ids = np.array(token_ids, np.int32)
        body = encode_request(
            ids,
            SamplingParams(temperature=1.0, max_tokens=1, seed=0),
            request_id="probe",
            cache_salt=cache_salt,
            model=self._model,
            scores_prompt=True,
        )
        answer = await self._call("POST", "/inference/v1/generate", body=body, timeout_s=self._control_timeout_s, what="probe")
        return decode_prompt_logprobs(answer, ids.tolist(), request_id="probe")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these generations; each answers with what it has and stop reason `abort`."""
        await self._control("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}" for request_id in request_ids]})

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s, what="health")
        except (EngineUnavailable, RequestRefused):
            return False
        return True

    async def metrics(self, *, timeout_s: float) -> str:
        """What the server tells of itself, as Prometheus text; without vLLM's own numbers where it keeps no statistics."""
        return (await self._call("GET", "/metrics", timeout_s=timeout_s, what="metrics")).decode(errors="replace")

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float | None = None) -> None:
        """Stop scheduling at a token boundary: `keep` freezes requests, `wait` lets them finish first, `abort` ends them with
        what they have. Requests that come meanwhile wait."""
        await self._control(f"/pause?mode={quote(mode)}&clear_cache={str(clear_cache).lower()}", timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float | None = None) -> None:
        await self._control("/resume", timeout_s=timeout_s)

    async def reset_prefix_cache(self) -> bool:
        """Forget what was computed for earlier requests; False while blocks are in use. Requests that wait are kept."""
        answer = orjson.loads(await self._control("/reset_prefix_cache?reset_running_requests=true"))
        return answer.get("success") is True

    async def is_paused(self) -> bool:
        return bool(orjson.loads(await self._control("/is_paused", method="GET"))["is_paused"])

    async def start_weight_update(self) -> None:
        await self._control("/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any], *, timeout_s: float) -> None:
        await self._control("/update_weights", {"update_info": dict(update_info)}, timeout_s=timeout_s)

    async def finish_weight_update(self, weight_version: str) -> None:
        """Stamp the version that tokens bear from here on."""
        await self._control("/finish_weight_update", {"weight_version": weight_version})

    async def weight_version(self) -> str:
        """The label of the weights that are loaded; `default` before the first update."""
        return str(orjson.loads(await self._control("/weight_info", method="GET"))["weight_version"])

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a worker method; one result a worker."""
        results: list[Any] = orjson.loads(await self._control("/collective_rpc", {"method": method, "kwargs": kwargs}))[
            "results"
        ]
        return results

    async def _control(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str = "POST", timeout_s: float | None = None
    ) -> bytes:
        data = None if body is None else orjson.dumps(body)
        deadline_s = self._control_timeout_s if timeout_s is None else timeout_s
        return await self._call(method, path, body=data, timeout_s=deadline_s, what=path)

    async def _call(self, method: str, path: str, *, body: bytes | None = None, timeout_s: float, what: str) -> bytes:
        if self._session is None:
            self._session = self._open()
        try:
            async with self._session.request(
                method,
                self._base + path,
                data=body,
                headers=_JSON if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"{what}: no answer from {self.address} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{what}: {self.address}: {type(error).__name__}: {error}") from error
        if response.status == HTTPStatus.OK:
            return answer
        words = f"{what}: {self.address} answered {response.status}: {answer[:_QUOTED].decode(errors='replace')}"
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR or response.status in _RETRYABLE:
            raise EngineUnavailable(words)
        raise RequestRefused(words)

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=KEEP_ALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        return aiohttp.ClientSession(
            connector=connector, auto_decompress=False, skip_auto_headers=("User-Agent", "Accept-Encoding")
        )


_NUM_PROBED = 5
"""Few: a vocabulary smaller than this ends the engine, and tiny models have tiny vocabularies."""


async def logprobs_follow_temperature(client: VllmClient, *, prompt_ids: Sequence[int] = (1, 2, 3)) -> bool | None:
    """Whether the server reports log-probabilities after temperature, as training needs them; None if the probe cannot tell.

    Two tokens' log-probabilities differ by their logits' difference over the temperature, so at 0.5 the difference must be
    twice that at 1.0; a server that reports raw ones gives the same difference twice.
    """
    cold = await client.top_logprobs(prompt_ids, temperature=0.5, num_logprobs=_NUM_PROBED)
    warm = await client.top_logprobs(prompt_ids, temperature=1.0, num_logprobs=_NUM_PROBED)
    both = sorted(cold.keys() & warm.keys(), key=lambda token: warm[token])
    if len(both) < 2:
        return None
    low, high = both[0], both[-1]
    at_one, at_half = warm[high] - warm[low], cold[high] - cold[low]
    if at_one < 1e-3:
        return None
    return at_half > 1.5 * at_one
