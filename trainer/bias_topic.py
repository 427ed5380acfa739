"""Topic `bias`: what was trained against what age cost.

Invariant: the topic follows the report within about a second, and holds its last state when the run has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sample_bus.messages import BiasReport
from sample_bus.protocols import Control

_MIN_INTERVAL_S = 1.0


class BiasTopic:
    def __init__(self, control: Control, report: Callable[[], BiasReport]) -> None:
        self._control = control
        self._report = report
        self._changed = asyncio.Event()
        self._changed.set()

    def touch(self) -> None:
        """Samples were settled; published soon."""
        self._changed.set()

    async def run(self) -> None:
        """Publish on change until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.publish()
            await asyncio.sleep(_MIN_INTERVAL_S)

    async def publish(self) -> None:
        await self._control.publish("bias", self._report())
