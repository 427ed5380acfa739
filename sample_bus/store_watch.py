"""Says, while a producer's copies cannot be written, that offers wait and why. Lives in the event loop."""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger()

NOTICE_S = 5.0


class StoreWatch:
    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._error = ""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def problem(self) -> str:
        """Why records cannot be made durable at the moment; empty if they can."""
        return self._error

    def blocked(self, error: str) -> None:
        self._error = error
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
            self._say()

    def unblocked(self) -> None:
        if self._since is not None:
            log.info("records can be made durable again", name=self._name, waited_s=self._waited_s())
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._since, self._error = None, None, ""

    def _waited_s(self) -> float:
        return round(asyncio.get_running_loop().time() - (self._since or 0.0), 1)

    def _say(self) -> None:
        log.warning(
            "records cannot be made durable, offers wait", name=self._name, problem=self._error, waited_s=self._waited_s()
        )
        self._timer = asyncio.get_running_loop().call_later(NOTICE_S, self._say)
