"""Retained topics: the last value of each, and those who wait for the next one. Lives in the event loop.

Invariant: a watcher sees the newest value at the latest when it asks again; values in between may be skipped, none is
seen twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from sample_bus.errors import WireError
from sample_bus.messages import Message
from sample_bus.packing import Buffer, pack, unpack

M = TypeVar("M", bound=Message)


def encode_body(body: Message) -> bytes:
    return pack(body.model_dump(mode="json"))


def decode_body(data: Buffer, kind: type[M], what: str) -> M:
    """A validated message. Raises WireError naming `what` and the field."""
    try:
        return kind.model_validate(unpack(data, what))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(f"{what}: {kind.__name__}.{where}: {first['msg']} (got {repr(first['input'])[:80]})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    value: bytes
    revision: int
    """Rises with each value; counted by whoever owns the board."""
    change: int
    """Number of this change on this board."""


class TopicBoard:
    def __init__(self) -> None:
        self._retained: dict[str, Retained] = {}
        self._decoded: dict[str, tuple[int, Message]] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._changes = 0
        self._closed = False

    def set(self, name: str, value: bytes, revision: int | None = None) -> int:
        """Keep a value; without `revision` it gets the next one. Returns its revision."""
        before = self._retained.get(name)
        if revision is None:
            revision = (before.revision if before else 0) + 1
        self._changes += 1
        self._retained[name] = Retained(value=value, revision=revision, change=self._changes)
        self._wake(name)
        return revision

    def clear(self, keep: frozenset[str]) -> None:
        """Forget all topics but these."""
        for name in [name for name in self._retained if name not in keep]:
            del self._retained[name]

    def items(self) -> Iterator[tuple[str, Retained]]:
        return iter(self._retained.items())

    def retained(self, name: str) -> Retained:
        return self._retained[name]

    def __contains__(self, name: str) -> bool:
        return name in self._retained

    def revision(self, name: str) -> int:
        retained = self._retained.get(name)
        return retained.revision if retained else 0

    def get(self, name: str, kind: type[M]) -> M | None:
        """Newest value. Raises WireError if it is not a `kind`."""
        retained = self._retained.get(name)
        return None if retained is None else self._decode(name, retained, kind)

    async def watch(self, name: str, kind: type[M]) -> AsyncIterator[M]:
        """The current value, then each newer one, until the board closes. Raises WireError as `get` does."""
        seen = 0
        while not self._closed:
            retained = self._retained.get(name)
            if retained is not None and retained.change != seen:
                seen = retained.change
                yield self._decode(name, retained, kind)
                continue
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(name, set()).add(changed)
            try:
                await changed
            finally:
                self._waiting[name].discard(changed)

    def close(self) -> None:
        """End all watchers."""
        self._closed = True
        for name in list(self._waiting):
            self._wake(name)

    def _wake(self, name: str) -> None:
        for changed in self._waiting.get(name, ()):
            if not changed.done():
                changed.set_result(None)

    def _decode(self, name: str, retained: Retained, kind: type[M]) -> M:
        cached: Any = self._decoded.get(name)
        if cached is not None and cached[0] == retained.change and type(cached[1]) is kind:
            known: M = cached[1]
            return known
        value = decode_body(retained.value, kind, f"topic {name}")
        self._decoded[name] = (retained.change, value)
        return value
