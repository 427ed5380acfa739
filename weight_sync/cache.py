"""The weights of one host: each version is staged here once, and lent to every engine of the host.

Invariant: what is served is complete, verified, and has the digest that was announced. The two newest versions stay, whatever
becomes of the trainer; an engine that starts again, or joins late, gets them here. Where the trainer is on the same host its
memory is lent on: one copy in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch

from configs.schema import WeightSyncSettings
from weight_sync.cache_link import Event, NotTaken, Stage, Staged, StagingFailed, Taken
from weight_sync.errors import NotStaged
from weight_sync.server import StageFailure, StageReport, WeightServer
from weight_sync.staging import StagingArea
from weight_sync.transport import TransportName

log = structlog.get_logger()

RECEIVER = "host-cache"
"""Its name at the trainer."""


class HostCache:
    """A receiver of the trainer's and a server of the engines. Use it as a context manager.

    `on_event` is called from threads; it must hand over and return.
    """

    def __init__(
        self,
        settings: WeightSyncSettings,
        *,
        socket_dir: Path,
        dtype: torch.dtype,
        on_event: Callable[[Event], None],
        serves_others: bool = False,
    ) -> None:
        """`serves_others`: listen at `weight_sync.listen_host` too, at any free port, for engines of other hosts."""
        self._settings = settings
        self._on_event = on_event
        self._lock = threading.Lock()
        self._commands: dict[str, tuple[Stage, float]] = {}
        self._area = StagingArea(check_manifest=lambda manifest: None, lendable=True, on_end=self._take_end)
        self._serves_others = serves_others
        self._server = WeightServer(
            settings.model_copy(update={"listen_port": 0}),
            socket_dir=socket_dir,
            dtype=dtype,
            on_staged=self._tell_taken,
            on_failed=self._tell_not_taken,
            transports=[TransportName.SHARED_MEMORY, *([TransportName.TCP] if serves_others else [])],
        )

    def __enter__(self) -> Self:
        """Raises AddressTaken."""
        self._server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving; the socket is gone afterwards. Engines keep what they were lent."""
        self._area.close()
        self._server.close()

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def tcp_address(self) -> str:
        """For engines of other hosts; empty: they are not served."""
        return self._server.address_of(TransportName.TCP) if self._serves_others else ""

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are held, oldest first."""
        return self._server.versions

    def stage(self, command: Stage) -> None:
        """Begin to stage a version and return; `on_event` says how it ended."""
        with self._lock:
            self._commands[command.nonce] = (command, time.monotonic())
            try:
                self._area.stage(
                    command.address,
                    command.policy_version,
                    engine=RECEIVER,
                    nonce=command.nonce,
                    timeout_s=command.timeout_s,
                    verify=self._settings.verify,
                )
            except ValueError as error:
                del self._commands[command.nonce]
                failure = StagingFailed(nonce=command.nonce, reason=str(error))
            else:
                return
        self._on_event(failure)

    def _take_end(self, nonce: str) -> None:
        """In the thread of the staging."""
        with self._lock:
            command, began = self._commands.pop(nonce)
            event: Event
            try:
                weights = self._area.get(command.policy_version, command.manifest_digest)
            except NotStaged as error:
                event = StagingFailed(nonce=nonce, reason=str(error))
            else:
                self._server.hold(weights)
                self._area.mark_loaded(weights)
                event = Staged(
                    nonce=nonce,
                    policy_version=command.policy_version,
                    seconds=time.monotonic() - began,
                    num_bytes=weights.manifest.total_bytes,
                )
        self._on_event(event)

    def _tell_taken(self, report: StageReport) -> None:
        self._on_event(Taken(nonce=report.nonce, engine=report.engine, seconds=report.seconds, num_bytes=report.payload_bytes))

    def _tell_not_taken(self, failure: StageFailure) -> None:
        self._on_event(NotTaken(nonce=failure.nonce, engine=failure.engine, reason=failure.reason))
