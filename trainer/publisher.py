"""Publishing policy versions: snapshot, announce, follow the engines until they have committed.

Invariant: topic `round` always describes the newest version; training goes on as soon as the snapshot is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from sample_bus.messages import Accepted, RoundResult, WeightRound
from sample_bus.protocols import ControlServer
from weight_sync.errors import WeightSyncError
from weight_sync.server import StageFailure, StageReport, WeightServer

log = structlog.get_logger()


class Publisher:
    """Owns the weight server and topic `round`. A context manager; all methods belong to the event loop."""

    def __init__(
        self,
        control: ControlServer,
        settings: WeightSyncSettings,
        *,
        incarnation: str,
        socket_dir: Path,
        dtype: torch.dtype,
        loop: asyncio.AbstractEventLoop,
        on_version: Callable[[int, str], None] = lambda version, digest: None,
    ) -> None:
        """`on_version` is told each version and its digest before it is announced."""
        self._control = control
        self._settings = settings
        self._incarnation = incarnation
        self._loop = loop
        self._on_version = on_version
        self._round: WeightRound | None = None
        self._changed = asyncio.Condition()
        self._committed: dict[str, int] = {}
        self.last_results: dict[str, RoundResult] = {}
        """Engine name to how its newest round ended."""
        self._announcements: set[asyncio.Task[None]] = set()
        self._server = WeightServer(
            settings, socket_dir=socket_dir, dtype=dtype, on_staged=self._staged_in_thread, on_failed=self._failed_in_thread
        )
        control.handle("round.result", RoundResult, self._take_result)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop serving; the socket is gone afterwards."""
        self._server.close()

    async def announce(self, weights: Iterable[tuple[str, torch.Tensor]], *, policy_version: int, executor: Executor) -> float:
        """Snapshot `weights` on `executor` and announce them as `policy_version`. Returns the snapshot's seconds.

        Raises WeightSyncError when an earlier version is still in use beyond its deadline.
        """
        publication = await self._loop.run_in_executor(
            executor,
            lambda: self._server.publish(weights, policy_version=policy_version),
        )
        self._round = WeightRound(
            policy_version=policy_version,
            incarnation=self._incarnation,
            address=self._server.address,
            manifest_digest=publication.manifest_digest,
            num_tensors=publication.num_tensors,
            total_bytes=publication.total_bytes,
            announced_at=time.time(),
        )
        self._on_version(policy_version, publication.manifest_digest)
        await self._control.publish("round", self._round)
        log.info(
            "policy version published",
            policy_version=policy_version,
            num_tensors=publication.num_tensors,
            megabytes=round(publication.total_bytes / 1e6, 1),
            snapshot_ms=round(publication.seconds * 1e3, 1),
        )
        return publication.seconds

    async def wait_committed(self, policy_version: int, *, timeout_s: float) -> None:
        """Until some engine serves `policy_version`. Raises WeightSyncError at the deadline."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: any(version >= policy_version for version in self._committed.values()))
        except TimeoutError:
            raise WeightSyncError(
                f"no engine committed policy version {policy_version} within {timeout_s:.0f} s; committed: {self._committed}"
            ) from None

    async def _take_result(self, result: RoundResult) -> Accepted:
        current = self._round
        self.last_results[result.engine] = result
        if not result.committed:
            log.warning("round failed", engine=result.engine, policy_version=result.policy_version, reason=result.message)
            return Accepted()
        is_current = current is not None and result.policy_version == current.policy_version
        if current is not None and is_current and result.manifest_digest != current.manifest_digest:
            raise WeightSyncError(
                f"engine {result.engine} loaded digest {result.manifest_digest} as policy version {result.policy_version}, "
                f"expected {current.manifest_digest}"
            )
        log.info(
            "round committed",
            engine=result.engine,
            policy_version=result.policy_version,
            pause_ms=round(result.pause_ms, 1),
            stage_ms=round(result.stage_ms, 1),
        )
        async with self._changed:
            self._committed[result.engine] = result.policy_version
            self._changed.notify_all()
        return Accepted()

    def _staged_in_thread(self, report: StageReport) -> None:
        self._loop.call_soon_threadsafe(self._note, report.policy_version, "staged", report.engine, report.nonce)

    def _failed_in_thread(self, failure: StageFailure) -> None:
        log.warning("staging failed", engine=failure.engine, policy_version=failure.policy_version, reason=failure.reason)
        self._loop.call_soon_threadsafe(self._note, failure.policy_version, "failed", failure.nonce, failure.reason)

    def _note(self, policy_version: int, field: str, key: str, value: str) -> None:
        current = self._round
        if current is None or current.policy_version != policy_version:
            return
        self._round = current.model_copy(update={field: {**getattr(current, field), key: value}})
        task = self._loop.create_task(self._control.publish("round", self._round))
        self._announcements.add(task)
        task.add_done_callback(self._announcements.discard)
