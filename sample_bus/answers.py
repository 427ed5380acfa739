"""Requests on the trainer's side: who answers which, and what was answered.

Invariant: a request is carried out at most once per trainer process, however often its client sends it again after a broken
connection; every request is answered, if only with an error's text.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from sample_bus.errors import BusError, RequestFailed
from sample_bus.frames import Reply, Request
from sample_bus.messages import Message
from sample_bus.protocols import Handler
from sample_bus.topics import decode_body, encode_body

log = structlog.get_logger()
M = TypeVar("M", bound=Message)
_REMEMBERED = 1024
_CLOSE_S = 2.0


class Answers:
    def __init__(self) -> None:
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}
        self._expected: dict[str, asyncio.Event] = {}
        """Set when the request gets its handler."""
        self._given: OrderedDict[tuple[str, int, int], Reply | None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, name: str, kind: type[Message], handler: Handler) -> None:
        """Raises BusError if the request has a handler."""
        if name in self._handlers:
            raise BusError(f"request {name!r} has a handler already")
        self._handlers[name] = (kind, handler)
        if name in self._expected:
            self._expected[name].set()

    def expect(self, names: Iterable[str]) -> None:
        """These will have handlers: who asks before waits, instead of being told that nobody knows the request."""
        for name in names:
            if name not in self._handlers:
                self._expected.setdefault(name, asyncio.Event())

    def answer(self, client: tuple[str, int], request: Request, send: Callable[[Reply], None]) -> None:
        """Carry the request out in a task of its own and send the reply; a repeated one gets the reply that was given."""
        key = (*client, request.id)
        if key in self._given:
            given = self._given[key]
            if given is not None:
                send(given)
            return
        self._given[key] = None
        while len(self._given) > _REMEMBERED and next(iter(self._given.values())) is not None:
            self._given.popitem(last=False)

        async def carry_out() -> None:
            reply = await self._reply(client[0], request)
            self._given[key] = reply
            send(reply)

        task = asyncio.get_running_loop().create_task(carry_out(), name=f"request {request.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ask(self, name: str, body: Message, reply: type[M], *, timeout_s: float) -> M:
        """A request of the trainer to itself. Raises RequestFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._reply("trainer", Request(id=0, name=name, body=encode_body(body)))
        except TimeoutError as error:
            raise RequestFailed(f"{name}: no answer within {timeout_s:g} s") from error
        if not answer.ok:
            raise RequestFailed(f"{name}: {answer.error}")
        return decode_body(answer.body, reply, f"reply to {name}")

    async def close(self) -> None:
        """Let running handlers end, within two seconds, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()

    async def _reply(self, client: str, request: Request) -> Reply:
        try:
            if request.name not in self._handlers and request.name in self._expected:
                await self._expected[request.name].wait()
            if request.name not in self._handlers:
                raise RequestFailed(
                    f"the trainer knows no request {request.name!r}; known: {', '.join(sorted(self._handlers)) or 'none'}"
                )
            kind, handler = self._handlers[request.name]
            body = encode_body(await handler(decode_body(request.body, kind, f"request {request.name}")))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            log.warning("request failed", name=request.name, client=client, error=f"{type(error).__name__}: {error}")
            return Reply(id=request.id, ok=False, body=b"", error=(str(error) or type(error).__name__)[:4000])
        return Reply(id=request.id, ok=True, body=body, error="")
