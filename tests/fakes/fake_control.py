"""A control channel without a network: topics are kept, requests go straight to their handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

from sample_bus.errors import RequestFailed
from sample_bus.messages import Message
from sample_bus.protocols import Handler

M = TypeVar("M", bound=Message)


class FakeControl:
    """Implements `sample_bus.protocols.ControlServer`; `published` holds every value in order."""

    def __init__(self) -> None:
        self.published: list[tuple[str, Message]] = []
        self.changed = asyncio.Event()
        """Set by each publication."""
        self._handlers: dict[str, tuple[type[Message], Handler]] = {}

    def get(self, topic: str, kind: type[M]) -> M | None:
        for name, value in reversed(self.published):
            if name == topic and isinstance(value, kind):
                return value
        return None

    async def watch(self, topic: str, kind: type[M]) -> AsyncIterator[M]:
        for name, value in self.published:
            if name == topic and isinstance(value, kind):
                yield value

    async def publish(self, topic: str, value: Message) -> None:
        self.published.append((topic, value))
        self.changed.set()

    async def request(self, name: str, body: Message, reply: type[M], *, timeout_s: float | None = None) -> M:
        kind, handler = self._handlers[name]
        try:
            answer: Any = await handler(kind.model_validate(body.model_dump(mode="json")))
        except Exception as error:
            raise RequestFailed(str(error)) from error
        return reply.model_validate(answer.model_dump(mode="json"))

    def handle(self, name: str, kind: type[Message], handler: Handler) -> None:
        self._handlers[name] = (kind, handler)

    def expect(self, names: Iterable[str]) -> None:
        """Nobody asks this one early."""
