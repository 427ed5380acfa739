"""How a client sees the trainer: present, gone for a moment, lost, given up. Lives in the event loop.

Invariant: no wait on the trainer is silent or endless. While it is away the client has `connect_timeout_s`; then, or at once
when it is lost and `on_lost` is `fail`, every wait ends with PeerLost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from configs.schema import BusSettings
from sample_bus.errors import BusError, PeerLost
from sample_bus.feed import Feed
from sample_bus.patience import patient
from sample_bus.peers import LossReason, LostPeer, PeerState

log = structlog.get_logger()


class TrainerWatch:
    def __init__(self, bus: BusSettings, address: str, end_waits: Callable[[BusError], None]) -> None:
        """`end_waits` fails what waits for the trainer."""
        self._bus = bus
        self._address = address
        self._end_waits = end_waits
        self._state = PeerState.CONNECTING
        self._changes: Feed[PeerState] = Feed()
        self._lost: LostPeer | None = None
        self._unusable: BusError | None = None
        self._failure: BusError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem = ""

    @property
    def state(self) -> PeerState:
        return self._state

    def check(self) -> None:
        """Raise what ended the waits, while it holds."""
        error = self._failure or self._unusable
        if error is not None:
            raise error

    def expect(self) -> None:
        """The trainer is away: from now on it has `connect_timeout_s` to appear."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._bus.connect_timeout_s, self._give_up)

    def unreachable(self, problem: str) -> None:
        """It cannot be reached, and why."""
        if problem != self._problem:
            log.warning("the trainer cannot be reached", address=self._address, problem=problem)
        self._problem = problem

    def connected(self) -> None:
        self._lost = self._unusable = None
        self._problem = ""
        self._stop_timer()
        self._become(PeerState.CONNECTED)

    def away(self, state: PeerState) -> None:
        """The connection broke, or the trainer said goodbye."""
        if self._state is PeerState.CONNECTED or (state is PeerState.LEFT and self._state is not PeerState.LOST):
            log.warning("trainer disconnected", address=self._address, state=state.value)
            self._become(state)
            self.expect()

    def silent(self, silent_s: float) -> None:
        """Nothing was heard for the heartbeat timeout."""
        log.warning("trainer lost", address=self._address, silent_s=round(silent_s, 1), on_lost=self._bus.on_lost)
        self._lost = LostPeer(name="trainer", reason=LossReason.SILENT, silent_s=silent_s, problem=self._problem)
        self.expect()
        if self._bus.on_lost == "fail":
            why = f": {self._problem}" if self._problem else ""
            self._unusable = PeerLost(f"the trainer at {self._address} has been silent for {silent_s:.1f} s{why}")
        self._become(PeerState.LOST)
        if self._unusable is not None:
            self._end_waits(self._unusable)

    def fail(self, failure: BusError, state: PeerState | None = None) -> None:
        """Nothing will come of this client any more."""
        self._failure = self._failure or failure
        self._stop_timer()
        self._become(state or self._state)
        self._end_waits(self._failure)

    async def wait_connected(self, timeout_s: float) -> None:
        async for waited_s in patient(self._changes, timeout_s):
            if self._failure is not None:
                raise self._failure
            if self._state is PeerState.CONNECTED:
                return
            if waited_s is not None:
                log.info(
                    "waiting for the trainer",
                    address=self._address,
                    state=self._state.value,
                    waited_s=waited_s,
                    deadline_s=timeout_s,
                )
        raise PeerLost(
            f"no trainer answered at {self._address} within {timeout_s:g} s ({self._problem or f'it is {self._state}'})"
        )

    async def wait_lost(self) -> LostPeer:
        while self._lost is None:
            if self._failure is not None:
                raise self._failure
            await self._changes.wait_next()
        return self._lost

    def _give_up(self) -> None:
        self._timer = None
        timeout_s = self._bus.connect_timeout_s
        self._lost = self._lost or LostPeer(name="trainer", reason=LossReason.SILENT, silent_s=timeout_s)
        why = f": {self._problem}" if self._problem else ""
        self._unusable = PeerLost(f"no trainer at {self._address} for {timeout_s:g} s (bus.connect_timeout_s){why}")
        self._become(PeerState.LOST)
        self._end_waits(self._unusable)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _become(self, state: PeerState) -> None:
        self._state = state
        self._changes.pulse()
