"""The trainer's side of a round with real weights: a weight server, and the waiting that topic `round` does in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from configs.schema import WeightSyncSettings
from sample_bus.messages import WeightRound
from weight_sync import StageFailure, StageReport, WeightServer


class WeightRounds:
    """Use it as a context manager inside a running event loop."""

    def __init__(self, socket_dir: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self._loop = asyncio.get_running_loop()
        self._settled: dict[str, asyncio.Future[None]] = {}
        self._server = WeightServer(
            WeightSyncSettings(),
            socket_dir=socket_dir,
            dtype=dtype,
            on_staged=self._report_staged,
            on_failed=self._report_failed,
        )

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.__exit__(kind, error, trace)

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> WeightRound:
        published = self._server.publish(tensors.items(), policy_version=version)
        return WeightRound(
            policy_version=version,
            incarnation="a",
            address=self._server.address,
            manifest_digest=published.manifest_digest,
            num_tensors=published.num_tensors,
            total_bytes=published.total_bytes,
            announced_at=0.0,
        )

    async def wait_staged(self, announced: WeightRound, engine: str, nonce: str) -> None:
        await self._of(nonce)

    def _report_staged(self, report: StageReport) -> None:
        self._loop.call_soon_threadsafe(self._staged, report)

    def _report_failed(self, failure: StageFailure) -> None:
        self._loop.call_soon_threadsafe(self._failed, failure)

    def _of(self, nonce: str) -> asyncio.Future[None]:
        return self._settled.setdefault(nonce, self._loop.create_future())

    def _staged(self, report: StageReport) -> None:
        self._of(report.nonce).set_result(None)

    def _failed(self, failure: StageFailure) -> None:
        self._of(failure.nonce).set_exception(RuntimeError(str(failure)))
