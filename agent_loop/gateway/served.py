"""One rollout's session as the gateway serves it: its token, its calls, and how it ends.

Invariant: each turn is sampled once. A call that the client sends again, because it lost patience or the connection, gets the
answer of the call that it repeats. An engine that fails ends the session; whatever else a program sends changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
import xxhash

from agent_loop.gateway.asks import Refusal, Rules, read_ask
from agent_loop.gateway.branches import Answer, Branches
from agent_loop.gateway.http import parsed
from agent_loop.gateway.replies import completion, events, text_completion, text_events
from agent_loop.gateway.responses import Responses, response, response_events
from agent_loop.gateway.text_asks import read_text_ask
from agent_loop.session import Session

log = structlog.get_logger()

_REPEATABLE = 32
"""Calls of one session that may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One of OpenAI's interfaces."""

    prefix: str
    read: Callable[[ServedSession, Any], Any]
    """(session, body) -> what is asked. Raises Refusal."""
    answer: Callable[[Branches, Any], Any]
    """(branches, what is asked) -> awaitable Answer."""
    whole: Callable[..., dict[str, Any]]
    stream: Callable[..., Iterator[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer with what it answers."""

    interface: Interface
    ask: Any
    answer: Answer
    identity: str
    created: int

    def whole(self) -> dict[str, Any]:
        return self.interface.whole(self.ask, self.answer, identity=self.identity, created=self.created)

    def events(self) -> Iterator[bytes]:
        """Server-sent events."""
        return self.interface.stream(self.ask, self.answer, identity=self.identity, created=self.created)


class ServedSession:
    """Of one rollout; belongs to the server."""

    def __init__(self, session: Session, branches: Branches, *, rules: Rules, max_calls: int) -> None:
        self.session = session
        self.branches = branches
        self.rules = rules
        self.responses = Responses()
        self.identity = secrets.token_urlsafe(18)
        self.token = secrets.token_urlsafe(24)
        self.failure: BaseException | None = None
        """What the engine raised."""
        self.failed = asyncio.Event()
        """Set with `failure`."""
        self.used_at = time.monotonic()
        """When a call came or was answered last."""
        self._max_calls = max_calls
        self._running: set[asyncio.Task[Reply]] = set()
        self._repeatable: OrderedDict[int, asyncio.Task[Reply]] = OrderedDict()
        self._closed = False

    @property
    def is_over(self) -> bool:
        return self._closed or self.failure is not None

    @property
    def num_running(self) -> int:
        """Calls that are being answered."""
        return len(self._running)

    async def call(self, interface: Interface, body: bytes, *, is_repeat: bool) -> Reply:
        """Raises Refusal."""
        self.used_at = time.monotonic()
        key = xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh32_intdigest(interface.prefix.encode()))
        running = self._repeatable.get(key) if is_repeat else None
        if running is None:
            ask = interface.read(self, parsed(body))
            if self.num_running >= self._max_calls:
                why = f"the session answers {self.num_running} calls now (gateway.max_calls_per_session)"
                raise Refusal(429, why, code="too_many_calls", retry_after_s=1)
            running = asyncio.ensure_future(self._answer(interface, ask, body))
            self._keep(key, running)
        else:
            self.session.count("repeated_calls")
        await asyncio.wait((running,))
        self.used_at = time.monotonic()
        if running.cancelled():
            raise over()
        error = running.exception()
        if isinstance(error, Refusal):
            raise error
        if error is not None:
            self.failure = self.failure or error
            self.failed.set()
            raise Refusal(500, "the engine failed, and with it the rollout", code="rollout_failed")
        return running.result()

    async def close(self) -> None:
        """End what it still generates."""
        self._closed = True
        running = list(self._running)
        for call in running:
            call.cancel()
        if running:
            await asyncio.wait(running)

    async def _answer(self, interface: Interface, ask: Any, body: bytes) -> Reply:
        answer = await interface.answer(self.branches, ask)
        identity = f"{interface.prefix}_{secrets.token_hex(12)}"
        if interface is RESPONSES:
            self.responses.remember(identity, parsed(body), ask, answer)
        return Reply(interface=interface, ask=ask, answer=answer, identity=identity, created=int(time.time()))

    def _keep(self, key: int, running: asyncio.Task[Reply]) -> None:
        self._running.add(running)
        self._repeatable[key] = running
        self._repeatable.move_to_end(key)
        while len(self._repeatable) > _REPEATABLE:
            self._repeatable.popitem(last=False)

        def ended(call: asyncio.Task[Reply]) -> None:
            self._running.discard(call)
            failed = call.cancelled() or call.exception() is not None
            if failed and self._repeatable.get(key) is call:
                del self._repeatable[key]

        running.add_done_callback(ended)


def over() -> Refusal:
    return Refusal(410, "the session is over", code="session_over")


def facts_of(served: ServedSession, url: str) -> Mapping[str, str]:
    """What a program needs to use the session at `url`."""
    return {"base_url": f"{url}/v1", "api_key": served.token, "reward_url": f"{url}/reward", "end_url": f"{url}/end"}


CHAT = Interface(
    prefix="chatcmpl",
    read=lambda served, body: read_ask(body, served.rules),
    answer=lambda branches, ask: branches.answer(ask),
    whole=completion,
    stream=events,
)
TEXT = Interface(
    prefix="cmpl",
    read=lambda served, body: read_text_ask(body, served.rules),
    answer=lambda branches, ask: branches.go_on(ask),
    whole=text_completion,
    stream=text_events,
)
RESPONSES = Interface(
    prefix="resp",
    read=lambda served, body: served.responses.read(body, served.rules),
    answer=lambda branches, ask: branches.answer(ask),
    whole=response,
    stream=response_events,
)
