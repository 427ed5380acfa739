"""What the trainer must hear: requests that are sent until it answered.

Invariant: a report reached the trainer that was connected when it was made, or the caller learns that another one took over.
"""

from __future__ import annotations

from configs.schema import BusSettings
from sample_bus.errors import RequestFailed
from sample_bus.messages import Accepted, Message
from sample_bus.protocols import Link


class Reports:
    """Sends reports over the link."""

    def __init__(self, link: Link, bus: BusSettings) -> None:
        self._link = link
        silence_s = bus.heartbeat_timeout_s + bus.request_timeout_s
        self._timeout_s = silence_s if bus.on_lost == "fail" else bus.connect_timeout_s + silence_s

    async def send(self, name: str, body: Message) -> bool:
        """True once the trainer took it; False when another trainer came instead, which did not ask for it.

        A lost trainer is waited for as long as `bus.on_lost` says: whoever watches it gives up first, and says that it is lost.
        Raises RequestFailed with the trainer's refusal, or naming
        the deadline.
        """
        before = self._link.resumption
        try:
            await self._link.request(name, body, Accepted, timeout_s=self._timeout_s)
        except RequestFailed:
            now = self._link.resumption
            if before is None or now is None or before.incarnation == now.incarnation:
                raise
            return False
        return True
