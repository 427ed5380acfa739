"""Following policy versions: each announced round is brought to the engines, and the trainer hears how it ended.

Invariant: a version counts as held only after an engine confirmed it and no engine serves the one before any more; a failed
round leaves the older one in force until the engines have caught up by themselves, within a deadline. A round under way is
brought to its end, whatever is announced meanwhile; then the newest one is next, and those in between are skipped. So engines
make progress however fast versions come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rollouter.admission import HeldVersion
from rollouter.engines import EngineFleet
from rollouter.errors import RoundFailed
from rollouter.reports import Reports
from sample_bus.messages import RoundResult, WeightRound
from sample_bus.protocols import Control

log = structlog.get_logger()


class TrainerReplaced(Exception):
    """Raised inside a wait for a staging when another trainer process announces: the one that was asked is gone."""


class StagingFailed(Exception):
    """Raised inside a wait for a staging that the trainer reports as failed."""


class Follower:
    """Drives the engines to the newest round."""

    def __init__(
        self,
        *,
        engines: EngineFleet,
        control: Control,
        reports: Reports,
        catch_up_timeout_s: float,
        on_announced: Callable[[WeightRound], None] = lambda round: None,
        on_held: Callable[[HeldVersion | None], None] = lambda held: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`catch_up_timeout_s`: how long after a failed round the engines may take to catch up. `on_announced` runs before the
        engines are touched: what is hopeless under the new version is cancelled there."""
        self._engines = engines
        self._control = control
        self._reports = reports
        self._catch_up_timeout_s = catch_up_timeout_s
        self._on_announced = on_announced
        self._on_held = on_held
        self._on_change = on_change
        self.is_syncing = False
        self.held: HeldVersion | None = None
        self._announced: WeightRound | None = None
        self._caught_up = asyncio.Event()
        self._unreported: asyncio.Queue[RoundResult] = asyncio.Queue()

    async def run(self) -> None:
        """Follow until cancelled. Raises RoundFailed when no engine takes a version, RequestFailed when nobody hears of it."""
        async for announced in self._control.watch("round", WeightRound):
            if self.held == _version_of(announced):
                continue
            self._on_announced(announced)
            if self.held is not None and self.held.incarnation != announced.incarnation:
                self._hold(None)
            await self._bring(announced)

    def take_catch_up(self, result: RoundResult) -> None:
        """An engine has caught up with the newest round by itself, or has failed to."""
        log.info("engine caught up" if result.committed else "engine did not catch up", **_short(result))
        self._unreported.put_nowait(result)
        announced = self._announced
        if result.committed and announced is not None and announced.policy_version == result.policy_version:
            self._caught_up.set()
            if not self.is_syncing:  # else others may still serve the version before
                self._hold(_version_of(announced))

    async def report_catch_ups(self) -> None:
        """Tell the trainer of them. Never returns."""
        while True:
            await self._reports.send("round.result", await self._unreported.get())

    async def wait_staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        """Returns once the trainer says that this staging is complete. Raises StagingFailed, TrainerReplaced.

        Newer rounds of the same trainer do not end the wait: they tell of stagings of the versions before, too.
        """
        async for newest in self._control.watch("round", WeightRound):
            if nonce in newest.failed:
                raise StagingFailed(f"version {announced.policy_version} on {engine}: {newest.failed[nonce]}")
            if newest.incarnation != announced.incarnation:
                raise TrainerReplaced(f"version {announced.policy_version} on {engine}: another trainer announces now")
            if newest.staged.get(engine) == nonce:
                return

    async def _bring(self, announced: WeightRound) -> None:
        """An engine holds `announced` afterwards, or none could and there is a newer round. Raises RoundFailed."""
        self._announced = announced
        self._caught_up.clear()
        results = await self._sync(announced)
        committed = any(result.committed for result in results) or self._caught_up.is_set()
        if committed:
            self._hold(_version_of(announced))
        for result in results:
            await self._reports.send("round.result", result)
        if committed:
            return
        why = "; ".join(f"{result.engine}: {result.message}" for result in results) or "no engine is alive"
        log.warning("round failed, engines are to catch up", policy_version=announced.policy_version, why=why)
        waits = [asyncio.ensure_future(self._overtaken(announced)), asyncio.ensure_future(self._caught_up.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=self._catch_up_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            raise RoundFailed(
                f"no engine took version {announced.policy_version} within {self._catch_up_timeout_s:g} s; first failure: {why}"
            )

    async def _overtaken(self, announced: WeightRound) -> bool:
        async for newest in self._control.watch("round", WeightRound):
            if _version_of(newest) != _version_of(announced):
                return True
        return False

    async def _sync(self, announced: WeightRound) -> list[RoundResult]:
        self.is_syncing = True
        self._on_change()
        try:
            results = await self._engines.sync(announced, self.wait_staged)
        finally:
            self.is_syncing = False
            self._on_change()
        for result in results:
            log.info("round ended", **_short(result))
        return results

    def _hold(self, held: HeldVersion | None) -> None:
        self.held = held
        self._on_held(held)


def _version_of(announced: WeightRound) -> HeldVersion:
    return HeldVersion(incarnation=announced.incarnation, policy_version=announced.policy_version)


def _short(result: RoundResult) -> dict[str, object]:
    return result.model_dump(exclude_defaults=True)
