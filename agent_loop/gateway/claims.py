"""Rollouts that wait for a program to take them, and programs that wait for a rollout: each is given to one.

Invariant: a rollout is taken by one program at most, in the order in which rollouts came; one that a program hung up on before
it was told of it is the next to be taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from agent_loop.gateway.served import ServedSession


@dataclass(slots=True, eq=False, kw_only=True)
class Offer:
    """One rollout."""

    task: Any
    """Plain data."""
    served: ServedSession
    taken: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """By whom: the token that it was claimed with."""
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """By the program's word; an exception is what the rollout fails with."""

    @property
    def is_open(self) -> bool:
        """Whether it may be taken."""
        return not self.taken.done() and not self.served.is_over


class Claims:
    """Of one gateway."""

    def __init__(self) -> None:
        self._offers: deque[Offer] = deque()
        self._waiting: deque[asyncio.Future[Offer]] = deque()
        self.is_over = False

    @property
    def num_offers(self) -> int:
        return sum(offer.is_open for offer in self._offers)

    @property
    def num_waiting(self) -> int:
        """Programs that wait for a rollout."""
        return sum(not waiter.done() for waiter in self._waiting)

    def offer(self, offer: Offer, *, first: bool = False) -> None:
        """`first`: before all others."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(offer)
                return
        if first:
            self._offers.appendleft(offer)
        else:
            self._offers.append(offer)

    def withdraw(self, offer: Offer) -> None:
        """Nobody takes it any more."""
        offer.taken.cancel()
        if offer in self._offers:
            self._offers.remove(offer)

    def fail_all(self, error: BaseException) -> None:
        """What waits to be taken fails."""
        for offer in self._offers:
            if offer.is_open:
                offer.taken.set_exception(error)
        self._offers.clear()

    def end(self) -> None:
        """No rollout will come any more: who waits for one is told."""
        self.is_over = True
        for waiter in self._waiting:
            waiter.cancel()

    async def claim(self, timeout_s: float) -> Offer | None:
        """The next offer, to be marked as taken by the caller without a wait in between; None: there was none within
        `timeout_s` seconds."""
        while self._offers:
            offer = self._offers.popleft()
            if offer.is_open:
                return offer
        if timeout_s <= 0 or self.is_over:
            return None
        waiter: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        except asyncio.CancelledError:  # whoever asked has hung up
            if waiter.done() and not waiter.cancelled():
                self.offer(waiter.result(), first=True)
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        return waiter.result() if waiter.done() and not waiter.cancelled() else None
