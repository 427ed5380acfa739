"""One engine inside a Ray actor, which owns the bundle that was reserved for it.

Invariant: the server is started, waited for and ended by the same code as under local placement; the kernel ends it with the
actor. Arguments and answers are plain JSON types.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import structlog

from configs.gpu import VISIBLE
from configs.schema import EngineSettings
from rollouter.engine_command import EngineShare
from rollouter.vllm_server import VllmServer

log = structlog.get_logger()


class RayEngine:
    """The actor. Its methods are those of `VllmServer`."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        socket: str,
        log_file: str,
        cores: list[int] | None,
        cwd: str,
        *,
        on_gpu: bool,
    ) -> None:
        """`on_gpu`: use the GPUs that Ray assigned to this actor; their names are in its environment."""
        os.chdir(cwd)
        self._gpus = os.environ.get(VISIBLE, "") if on_gpu else None
        share = EngineShare(cores=None if on_gpu or cores is None else tuple(cores), gpus=self._gpus)
        self._server = VllmServer(
            name, EngineSettings.model_validate(settings), socket=Path(socket), log_file=Path(log_file), share=share
        )

    async def launch(self) -> dict[str, Any]:
        """Start the process; returns its `pid` and the names of its `gpus`."""
        _restore_priority()
        await self._server.launch()
        return {"pid": self._server.pid, "gpus": self._gpus}

    async def serve(self, model_dir: str, dtype: str) -> None:
        """Raises EngineStartError."""
        await self._server.serve(model_dir, dtype)

    async def wait_ended(self) -> dict[str, Any]:
        """Wait for its end; returns `status` and `why`."""
        status = await self._server.wait_ended()
        return {"status": status, "why": self._server.why_ended()}

    async def kill(self) -> None:
        self._server.kill()

    async def stop(self) -> None:
        await self._server.stop()


def _restore_priority() -> None:
    """Ray runs its workers at nice 15 unless told otherwise, which a cluster that is joined was perhaps not."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning("engine runs at low priority; start Ray with RAY_worker_niceness=0", nice=nice)
