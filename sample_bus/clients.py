"""Who is connected to the trainer, and who may be. Pure: told what arrived, it says what to do.

Invariant: at most one rollouter. A second one is refused while the first is alive, takes its place when it is not, and is left
waiting while that is unknown. A process that reconnects is recognized by its epoch and never counts as a second one.
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
    epoch: int
    connected: bool = True


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
        self._rollouter: Client | None = None
        self._candidates: dict[bytes, Hello] = {}

    @property
    def rollouter(self) -> Client | None:
        """The rollouter that was welcomed last, connected or not."""
        return self._rollouter

    @property
    def connected(self) -> list[Client]:
        return [client for client in self._clients.values() if client.connected]

    def at(self, peer: bytes) -> Client | None:
        return self._clients.get(peer)

    def is_candidate(self, peer: bytes) -> bool:
        return peer in self._candidates

    def hello(self, peer: bytes, hello: Hello) -> Take | Turn | Wait:
        present = self._rollouter
        if hello.protocol != PROTOCOL:
            return Turn(peer=peer, hello=hello, reason=f"it speaks protocol {hello.protocol}, the trainer {PROTOCOL}")
        if hello.role not in set(Role):
            return Turn(peer=peer, hello=hello, reason=f"unknown role {hello.role[:40]!r}")
        rivals = hello.role == Role.ROLLOUTER and present is not None and present.epoch != hello.epoch
        if rivals and present is not None and present.connected:
            self._candidates[peer] = hello
            return Wait(probe=present.peer)
        self._candidates.pop(peer, None)
        client = Client(peer, hello.name, Role(hello.role), hello.epoch)
        gone = [other.peer for other in self._clients.values() if other.epoch == client.epoch and other.peer != peer]
        if rivals and present is not None and present.peer in self._clients:
            gone.append(present.peer)
        for other in gone:
            del self._clients[other]
        self._clients[peer] = client
        if client.role is Role.ROLLOUTER:
            self._rollouter = client
        return Take(client=client, hello=hello, gone=tuple(gone), replaced=present if rivals else None)

    def heard(self, peer: bytes) -> list[Turn]:
        """The client is alive: whoever waits for its place is refused."""
        present = self._rollouter
        if present is None or present.peer != peer:
            return []
        candidates, self._candidates = self._candidates, {}
        reason = f"rollouter {present.name!r} is connected and alive, and this version takes one rollouter"
        return [Turn(peer=other, hello=hello, reason=reason) for other, hello in candidates.items()]

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
