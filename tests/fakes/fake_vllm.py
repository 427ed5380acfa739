"""A server that speaks vLLM's routes over a Unix socket without a model: for faults that a real one does not show on demand.

Its weights are a version, and so is what its prefix cache holds for a cache salt: the label under which it was computed. Each
sampled token bears the label in force when it was sampled. Like vLLM, it freezes or ends requests while paused, refuses an
update that was not started or not staged, and drops a request whose connection closes. `violations` lists
what must never happen: a token while weights are replaced, a request that arrives meanwhile, an abort while paused.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

Fault = Literal["500", "503", "400", "close", "hang", "die"]


@dataclass(slots=True, eq=False, kw_only=True)
class FakeVllm:
    """`async with FakeVllm(socket=path) as server: ...`"""

    socket: Path
    token_s: float = 0.0
    """Time of one token."""
    eos: int = 0
    logprob_of: Callable[[int, float], float] = lambda token, temperature: -0.5
    """(token, temperature) → what is reported."""
    shape_response: Callable[[dict[str, Any]], Any] = lambda response: response
    """Changes a generate response before it is sent."""
    on_stage: Callable[[str, int, str], None] = lambda engine, version, nonce: None
    """(engine, version, nonce): a staging was asked for."""
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    """Path to the faults of its next calls."""
    calls: list[str] = field(default_factory=list)
    """Paths in order; without queries."""
    bodies: list[Any] = field(default_factory=list)
    """Generate requests."""
    violations: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    """From which it was told to stage."""
    cohorts: list[int] = field(default_factory=list)
    """How many it was told stage with it."""
    num_workers: int = 1
    lora_scale: float | None = None
    """By which it counts adapters, as it was started; None: it takes whole weights."""
    stale_reads: list[str] = field(default_factory=list)
    """Requests that began on what other weights had computed."""
    before_resume: asyncio.Event | None = None
    """A call that resumes is answered once it is set, and generation goes on then."""
    fails_resets: int = 0
    """So many next resets of the prefix cache fail: blocks are in use."""
    cached: dict[str, str] = field(default_factory=dict)
    """Cache salt to the label of the weights that computed what is cached for it."""
    kv_requests: int | None = None
    """Requests for which the KV cache has room, as `/metrics` tells it; None: it keeps no statistics."""
    label: str = "default"
    loaded: int | None = None
    staged: int | None = None
    paused: bool = False
    updating: bool = False
    active: int = 0
    peak_active: int = 0
    dropped: int = 0
    """Requests whose client went away."""
    _running: dict[str, asyncio.Event] = field(default_factory=dict)
    _unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    async def __aenter__(self) -> FakeVllm:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._unpaused.set()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        self.socket.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self.socket), backlog=2048).start()

    async def stop(self) -> None:
        """Close everything at once: connections break."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def forget(self) -> None:
        """What a restart does to an engine: the weights it was started with, nothing staged, nothing paused."""
        self.label, self.loaded, self.staged = "default", None, None
        self.paused = self.updating = False
        self.cached.clear()
        self._unpaused.set()

    def fail(self, path: str, *faults: Fault) -> None:
        """The next calls of `path` end so."""
        self.faults.setdefault(path, deque()).extend(faults)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` after a request came or went."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        if self.faults.get(path):
            answer = await self._fail(request, self.faults[path].popleft())
            if answer is not None:
                return answer
        body = await request.json() if request.can_read_body else {}
        match path:
            case "/inference/v1/generate":
                return await self._generate(body)
            case "/health":
                return web.Response()
            case "/metrics":
                return web.Response(text=self._metrics())
            case "/pause":
                await self._pause(request.query["mode"])
                return web.json_response({"status": "paused"})
            case "/resume":
                if self.before_resume is not None:
                    await self.before_resume.wait()
                self.paused = False
                self._unpaused.set()
                return web.json_response({"status": "resumed"})
            case "/reset_prefix_cache":
                return web.json_response({"success": self._reset_cache()})
            case "/is_paused":
                return web.json_response({"is_paused": self.paused})
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/abort_requests":
                return self._abort(body.get("request_ids") or list(self._running))
            case "/collective_rpc":
                return self._worker_method(body["method"], body["kwargs"])
            case "/start_weight_update" | "/update_weights" | "/finish_weight_update":
                return self._update(path, body)
        return web.Response(status=404)

    async def _fail(self, request: web.Request, fault: Fault) -> web.Response | None:
        match fault:
            case "500" | "503" | "400":
                return web.json_response({"error": {"message": f"told to answer {fault}"}}, status=int(fault))
            case "hang":
                await asyncio.Event().wait()
            case "close":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            case "die":
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.stop()))
                await asyncio.Event().wait()
        return None

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        if self.updating:
            self.violations.append("a request arrived while weights were being replaced")
        self.bodies.append(body)
        parameters, name = body["sampling_params"], f"generate-tokens-{body['request_id']}"
        tokens: list[int] = []
        labels: list[str] = []
        end = "length"
        with self._counted(name) as aborted:
            while len(tokens) < parameters["max_tokens"] and end == "length":
                await asyncio.sleep(self.token_s)
                if not aborted.is_set():
                    await self._unpaused.wait()
                if aborted.is_set():
                    end = "abort"
                    break
                if self.updating:
                    self.violations.append("a token was sampled while weights were being replaced")
                if not tokens:
                    self._read_cache(body)
                token = (sum(body["token_ids"]) + len(tokens)) % 97 + 3
                tokens.append(token)
                labels.append(self.label)
                if token in parameters["stop_token_ids"] or token == self.eos:
                    end = "stop"
        return self._answer(tokens, labels, end, parameters)

    @contextmanager
    def _counted(self, name: str) -> Iterator[asyncio.Event]:
        aborted = self._running[name] = asyncio.Event()
        self.active += 1
        self.peak_active = max(self.peak_active, self.active)
        self._changed.set()
        try:
            yield aborted
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            self.active -= 1
            del self._running[name]
            self._changed.set()

    def _answer(self, tokens: list[int], labels: list[str], end: str, parameters: dict[str, Any]) -> web.Response:
        spans: list[dict[str, Any]] = []
        for at, label in enumerate(labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": label, "start": at, "end": at + 1})
        temperature = parameters["temperature"]
        alternatives = range(200, 200 + parameters["logprobs"])
        content = [
            {"token_id": token, "logprob": self.logprob_of(token, temperature), "rank": 1}
            | {"top_logprobs": [{"token_id": t, "logprob": self.logprob_of(t, temperature)} for t in (token, *alternatives)]}
            for token in tokens
        ]
        choice = {"index": 0, "finish_reason": end, "token_ids": tokens, "logprobs": {"content": content}}
        response = self.shape_response({"choices": [choice | {"weight_versions": spans or None}]})
        text = response if isinstance(response, str) else json.dumps(response)
        return web.Response(text=text, content_type="application/json")

    def _metrics(self) -> str:
        if self.kv_requests is None:
            return "python_info 1.0\n"
        running = min(self.active, self.kv_requests)
        return (
            f'vllm:num_requests_running{{engine="0"}} {running:.1f}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.active - running:.1f}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {running / self.kv_requests}\n'
            'vllm:num_preemptions_total{engine="0"} 0.0\n'
        )

    async def _pause(self, mode: str) -> None:
        if mode == "wait":
            await self.until(lambda: self.active == 0)
        ended = list(self._running.values()) if mode == "abort" else []
        for aborted in ended:
            aborted.set()
        self.paused = True
        self._unpaused.clear()
        await self.until(lambda: not any(running in ended for running in self._running.values()))

    def _read_cache(self, body: dict[str, Any]) -> None:
        """A request begins: on what is cached for its salt, or it computes that."""
        if self.cached.setdefault(body.get("cache_salt", ""), self.label) != self.label:
            self.stale_reads.append(body["request_id"])

    def _reset_cache(self) -> bool:
        if self.fails_resets:
            self.fails_resets -= 1
            return False
        self.cached.clear()
        return True

    def _abort(self, names: list[str]) -> web.Response:
        if self.paused:
            self.violations.append("an abort arrived while paused")
        for name in names:
            if name in self._running:
                self._running[name].set()
        return web.json_response({"status": "aborted"})

    def _worker_method(self, method: str, arguments: dict[str, Any]) -> web.Response:
        if method == "headrace_stage":
            self.staged, self.updating = arguments["policy_version"], False
            self.addresses.append(arguments["address"])
            self.cohorts.append(arguments["cohort"])
            self.on_stage(arguments["engine"], arguments["policy_version"], arguments["nonce"])
        status = {"state": "staged", "staged": self.staged, "loaded": self.loaded, "lora_scale": self.lora_scale}
        return web.json_response({"results": [status] * self.num_workers})

    def _update(self, path: str, body: dict[str, Any]) -> web.Response:
        if path == "/start_weight_update":
            self.updating = True
        elif not self.updating:
            return web.json_response({"error": "no update was started"}, status=500)
        elif path == "/update_weights":
            wanted = body["update_info"]["policy_version"]
            if wanted != self.staged:
                return web.json_response({"error": f"NotStaged: got version {wanted}, {self.staged} is staged"}, status=500)
            self.loaded = wanted
        else:
            self.label, self.updating = body["weight_version"], False
        return web.json_response({"message": "ok"})
