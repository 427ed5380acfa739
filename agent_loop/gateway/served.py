"""One rollout's session as the gateway serves it: its token, its calls, and how it ends.

Invariant: each turn is sampled once. A call that the client sends again, because it lost patience or the connection, gets the
answer of the call that it repeats; an answer that nobody got is not trained. An engine that fails ends the session; whatever
else a program sends changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
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
from configs.schema import GatewaySettings

log = structlog.get_logger()

_REPEATED_WITHIN_S = 15.0
"""A client that hung up asks again within this time, or never."""


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


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a program, and its repeats."""

    key: int
    """Of what is asked."""
    answering: asyncio.Task[Reply]
    num_waiting: int = 0
    """Clients that wait for the answer."""
    is_told: bool = False
    """Whether one of them got it."""

    @property
    def is_deserted(self) -> bool:
        """Whether its client hung up before it got the answer: only such a call is repeated."""
        return not self.is_told and not self.num_waiting


class ServedSession:
    """Of one rollout; belongs to the server."""

    def __init__(self, session: Session, branches: Branches, *, rules: Rules, settings: GatewaySettings) -> None:
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
        self._settings = settings
        self._num_calls = 0
        self._calls: list[_Call] = []
        """Those that run, and those that ended and that nobody got yet."""
        self._closed = False

    @property
    def is_over(self) -> bool:
        return self._closed or self.failure is not None

    @property
    def num_running(self) -> int:
        """Calls that are being answered, and that somebody waits for."""
        return sum(call.num_waiting > 0 and not call.answering.done() for call in self._calls)

    async def call(self, interface: Interface, body: bytes, *, is_repeat: bool) -> Reply:
        """Raises Refusal."""
        if self.is_over:
            raise over()
        self.used_at = time.monotonic()
        key = xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh32_intdigest(interface.prefix.encode()))
        call = next((one for one in self._calls if one.key == key and one.is_deserted), None) if is_repeat else None
        if call is None:
            call = self._begin(interface, body, key)
        else:
            self.session.count("repeated_calls")
        call.num_waiting += 1
        try:
            await asyncio.wait((call.answering,))
        except asyncio.CancelledError:  # the client hung up
            if call.num_waiting == 1 and not call.is_told:
                asyncio.get_running_loop().call_later(_REPEATED_WITHIN_S, self._give_up, call)
            raise
        finally:
            call.num_waiting -= 1
        self.used_at = time.monotonic()
        if call.answering.cancelled():
            raise over()
        error = call.answering.exception()
        if isinstance(error, Refusal):
            raise error
        if error is not None:
            self.failure = self.failure or error
            self.failed.set()
            raise Refusal(500, "the engine failed, and with it the rollout", code="rollout_failed")
        call.is_told = True
        self._calls = [one for one in self._calls if one is not call]
        return call.answering.result()

    async def close(self) -> None:
        """End what it still generates. What nobody got is not trained."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.answering.cancel()
        if calls:
            await asyncio.wait([call.answering for call in calls])
        for call in calls:
            self._give_up(call)

    def _begin(self, interface: Interface, body: bytes, key: int) -> _Call:
        ask = interface.read(self, parsed(body))
        if self.num_running >= self._settings.max_calls_per_session:
            why = f"the session answers {self.num_running} calls now (gateway.max_calls_per_session)"
            raise Refusal(429, why, code="too_many_calls", retry_after_s=1)
        if self._num_calls >= self._settings.max_calls:
            why = f"the rollout has had its {self._num_calls} calls (gateway.max_calls)"
            raise Refusal(403, why, code="no_calls_left")
        self._num_calls += 1
        call = _Call(key=key, answering=asyncio.ensure_future(self._answer(interface, ask, body)))
        call.answering.add_done_callback(lambda answering: self._forget_failed(call))
        self._calls.append(call)
        return call

    async def _answer(self, interface: Interface, ask: Any, body: bytes) -> Reply:
        answer = await interface.answer(self.branches, ask)
        identity = f"{interface.prefix}_{secrets.token_hex(12)}"
        if interface is RESPONSES:
            self.responses.remember(identity, parsed(body), ask, answer)
        return Reply(interface=interface, ask=ask, answer=answer, identity=identity, created=int(time.time()))

    def _give_up(self, call: _Call) -> None:
        """What nobody waits for and nobody got, nobody will act on."""
        if call.num_waiting or call.is_told:
            return
        if not call.answering.done():
            call.answering.cancel()
        elif not call.answering.cancelled() and call.answering.exception() is None:
            self.branches.disown(call.answering.result().answer)
        self._calls = [one for one in self._calls if one is not call]

    def _forget_failed(self, call: _Call) -> None:
        """A repeat of what failed is a new call."""
        if call.answering.cancelled() or call.answering.exception() is not None:
            self._calls = [one for one in self._calls if one is not call]


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
