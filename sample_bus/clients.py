"""Who is connected to the trainer, and who may be. Pure: told what arrived, it says what to do.

Invariant: at most one rollouter of a name. A second one is refused while the first is alive, takes its place when it is not,
and is left waiting while that is unknown. A process that reconnects is recognized and never counts as a second one.
"""

from __future__ import annotations

from dataclasses import dataclass

from sample_bus.frames import PROTOCOL, Hello
from sample_bus.peers import Role


@dataclass(slots=True, eq=False)
class Client:
    """A process that was welcomed."""

    peer: bytes
    """Its present connection."""
    name: str
    role: Role
    process: int
    connected: bool = True
    epoch: int | None = None
    """Of its stream; None while it has opened none on this connection."""
    next_seq: int = 0
    """Of its stream, when it opened it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Welcome the client."""

    client: Client
    hello: Hello
    gone: tuple[bytes, ...]
    """Connections that are no longer anybody's."""
    replaced: Client | None
    """The rollouter whose place it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Refuse the client."""

    peer: bytes
    hello: Hello
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Find out whether the present rollouter is alive: `heard` or `gone` decides."""

    probe: bytes


class Clients:
    def __init__(self) -> None:
        self._clients: dict[bytes, Client] = {}
        self._rollouters: dict[str, Client] = {}
        self._candidates: dict[bytes, Hello] = {}

    @property
    def rollouters(self) -> list[Client]:
        """Those with an open stream on a living connection."""
        return [client for client in self._rollouters.values() if client.connected and client.epoch is not None]

    @property
    def connected(self) -> list[Client]:
        return [client for client in self._clients.values() if client.connected]

    def at(self, peer: bytes) -> Client | None:
        return self._clients.get(peer)

    def named(self, name: str) -> Client | None:
        """The rollouter of that name that was welcomed last, connected or not."""
        return self._rollouters.get(name)

    def is_candidate(self, peer: bytes) -> bool:
        return peer in self._candidates

    def hello(self, peer: bytes, hello: Hello) -> Take | Turn | Wait:
        if hello.protocol != PROTOCOL:
            return Turn(peer=peer, hello=hello, reason=f"it speaks protocol {hello.protocol}, the trainer {PROTOCOL}")
        if hello.role not in set(Role):
            return Turn(peer=peer, hello=hello, reason=f"unknown role {hello.role[:40]!r}")
        present = self._rollouters.get(hello.name) if hello.role == Role.ROLLOUTER else None
        rivals = present is not None and present.process != hello.process
        if rivals and present is not None and present.connected:
            self._candidates[peer] = hello
            return Wait(probe=present.peer)
        self._candidates.pop(peer, None)
        client = Client(peer, hello.name, Role(hello.role), hello.process)
        gone = [other.peer for other in self._clients.values() if other.process == client.process and other.peer != peer]
        if rivals and present is not None and present.peer in self._clients:
            gone.append(present.peer)
        for other in gone:
            del self._clients[other]
        self._clients[peer] = client
        if client.role is Role.ROLLOUTER:
            self._rollouters[client.name] = client
        return Take(client=client, hello=hello, gone=tuple(gone), replaced=present if rivals else None)

    def heard(self, peer: bytes) -> list[Turn]:
        """The client is alive: whoever waits for its place is refused."""
        client = self._clients.get(peer)
        if client is None or client.role is not Role.ROLLOUTER:
            return []
        rivals = {other: hello for other, hello in self._candidates.items() if hello.name == client.name}
        for other in rivals:
            del self._candidates[other]
        reason = f"rollouter {client.name!r} is connected and alive: a second one needs a name of its own"
        return [Turn(peer=other, hello=hello, reason=reason) for other, hello in rivals.items()]

    def disconnected(self, peer: bytes) -> list[Take | Turn | Wait]:
        """The connection broke. The client may come back; if another waits for its place, that one gets it."""
        self._candidates.pop(peer, None)
        client = self._clients.get(peer)
        if client is None:
            return []
        client.connected = False
        return self._reconsider()

    def left(self, peer: bytes) -> list[Take | Turn | Wait]:
        """The client is gone for good, or silent for so long that it counts as that."""
        decisions = self.disconnected(peer)
        self._clients.pop(peer, None)
        return decisions

    def _reconsider(self) -> list[Take | Turn | Wait]:
        candidates, self._candidates = self._candidates, {}
        return [self.hello(peer, hello) for peer, hello in candidates.items()]
