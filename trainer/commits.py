"""When producers may free their copies of what was settled.

Invariant: a position is committed only when nothing that it covers can be asked for again. With periodic checkpoints that is
once a checkpoint holds it. Without, there is nothing to go on from, so it is at once; except after the checkpoint at the end,
from which the run may be taken up again: what is let go beyond it stays with the producers.
"""

from __future__ import annotations

import asyncio

from sample_bus.journal_writer import JournalWriter
from sample_bus.position import BusPosition
from sample_bus.protocols import Consumer


class Commits:
    def __init__(self, consumer: Consumer, journal: JournalWriter, *, at_once: bool) -> None:
        self._consumer = consumer
        self._journal = journal
        self._at_once = at_once
        self._settled = asyncio.Event()

    def settled(self) -> None:
        """Records were trained or dropped, and the journal was told."""
        if self._at_once:
            self._settled.set()

    def saved(self, position: BusPosition) -> None:
        """A checkpoint that covers `position` is durable."""
        self._consumer.commit(position)

    def hold(self) -> None:
        """From now on only checkpoints commit."""
        self._at_once = False
        self._settled.clear()

    async def run(self) -> None:
        """Commit at once what is settled, where that is the rule, until cancelled."""
        while True:
            await self._settled.wait()
            self._settled.clear()
            position = self._consumer.position()
            await self._journal.flush()
            self._consumer.commit(position)

    def finish(self) -> None:
        """The run is over: commit what was settled last."""
        if self._settled.is_set() and not self._journal.is_blocked:
            self._consumer.commit(self._consumer.position())
