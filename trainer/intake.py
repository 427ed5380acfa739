"""From the bus to whole groups, fresh enough to train.

Consumes leased samples; produces batches of whole groups; settles what it drops. Invariant: every sample that was received is
queued here, handed out in exactly one batch, or dropped with a counted reason.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from sample_bus.messages import Counts
from sample_bus.protocols import Consumer, Leased
from trainer.groups import Dropped, DropReason, Group, GroupAssembler, ids, is_stale

log = structlog.get_logger()


class Intake:
    """Owns every sample between the bus and the optimizer."""

    def __init__(
        self,
        consumer: Consumer,
        *,
        group_size: int,
        samples_per_step: int,
        max_staleness: int | None,
        incarnation: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._consumer = consumer
        self._groups_per_step = samples_per_step // group_size
        self._max_staleness = max_staleness
        self._incarnation = incarnation
        self._on_change = on_change
        self._assembler = GroupAssembler()
        self._ready: deque[Group] = deque()
        self._changed = asyncio.Event()
        self._producer: tuple[str, int] | None = None
        self._received = 0
        self._trained = 0
        self._dropped: dict[str, int] = {}

    async def run(self) -> None:
        """Take samples from the bus until cancelled."""
        while True:
            self._take(await self._consumer.lease())

    async def next_batch(self, policy_version: Callable[[], int]) -> list[Group]:
        """The oldest whole groups, as many as a step takes; waits for them. Groups beyond `max_staleness` are dropped first."""
        while True:
            self._drop_stale(policy_version())
            if len(self._ready) >= self._groups_per_step:
                batch = [self._ready.popleft() for _ in range(self._groups_per_step)]
                self._on_change()
                return batch
            self._changed.clear()
            await self._changed.wait()

    def settle_trained(self, groups: Sequence[Group]) -> None:
        """The groups' effect is in the weights."""
        members = [leased for group in groups for leased in group.members]
        self._consumer.acknowledge([leased.id for leased in members])
        self._trained += len(members)
        self._on_change()

    def close_group(self, group_id: str, reason: str) -> None:
        """A seat of the group will never be filled: give its siblings up."""
        log.info("group closed", group_id=group_id, reason=reason)
        self._drop(self._assembler.close(group_id, DropReason.GROUP_INCOMPLETE))

    def close_epoch(self, producer: str, epoch: int) -> None:
        """That life of the producer is over: its open groups will never be whole."""
        self._drop(self._assembler.close_epoch(producer, epoch))

    def close_unfinished(self) -> None:
        """The run is over: nothing more will be trained."""
        self._drop(self._assembler.close_all(DropReason.UNFINISHED))
        leftover = tuple(leased for group in self._ready for leased in group.members)
        self._ready.clear()
        self._drop(Dropped(reason=DropReason.UNFINISHED, members=leftover))

    def counts(self) -> Counts:
        """The trainer's side of the ledger."""
        settled = self._trained + sum(self._dropped.values())
        return Counts(
            received=self._received, trained=self._trained, dropped=dict(self._dropped), queued=self._received - settled
        )

    def waiting_for(self) -> str:
        """What the next batch still lacks, in words."""
        text = f"groups {len(self._ready)} of {self._groups_per_step}, samples in open groups {self._assembler.num_waiting}"
        oldest = self._assembler.oldest_open()
        if oldest is not None:
            group_id, seats = oldest
            text += f", oldest open group {group_id} lacks seats {list(seats)}"
        return text

    def _take(self, leased: Leased) -> None:
        self._received += 1
        producer = (leased.id.producer, leased.id.epoch)
        if producer != self._producer:
            self._producer = producer
            self._drop(self._assembler.close_other_epochs(*producer))
        outcome = self._assembler.add(leased)
        if isinstance(outcome, Dropped):
            self._drop(outcome)
        elif isinstance(outcome, Group):
            self._ready.append(outcome)
            self._changed.set()
        self._on_change()

    def _drop_stale(self, policy_version: int) -> None:
        fresh: deque[Group] = deque()
        for group in self._ready:
            if is_stale(group, policy_version=policy_version, incarnation=self._incarnation, max_staleness=self._max_staleness):
                self._drop(Dropped(reason=DropReason.STALE, members=group.members))
            else:
                fresh.append(group)
        self._ready = fresh

    def _drop(self, dropped: Dropped) -> None:
        if not dropped.members:
            return
        self._consumer.acknowledge([leased.id for leased in dropped.members], dropped=True)
        self._dropped[dropped.reason] = self._dropped.get(dropped.reason, 0) + len(dropped.members)
        log.info(
            "samples dropped", reason=str(dropped.reason), num_samples=len(dropped.members), rollouts=ids(dropped.members)[:8]
        )
        self._on_change()
