"""The trainer's count of the run's samples and closed seats. Pure.

Invariant: every sample received is trained, dropped for one reason, or queued; what no checkpoint covers is not in the counts
that the next process begins with, since it comes again or is reported as gone.
"""

from __future__ import annotations

from sample_bus.messages import Counts
from sample_bus.protocols import ConsumerStatistics
from trainer.groups import Dropped, DropReason, Group


class Books:
    """Counts since the run began, over restarts; `refunded` since this process began."""

    def __init__(self, before: Counts | None = None) -> None:
        """`before`: what an earlier process had counted when its checkpoint was taken (`Books.settled`)."""
        self._before = before or Counts()
        self._received = self._before.received
        self._trained = self._before.trained
        self._dropped = dict(self._before.dropped)
        self._closed = self._before.closed
        self._settled_closed = self._before.closed
        self._refunded = 0
        self._late = self._before.late_results
        self._rolled_back = self._before.rolled_back

    @property
    def num_queued(self) -> int:
        return self._received - self._num_settled

    @property
    def _num_settled(self) -> int:
        return self._trained + sum(self._dropped.values())

    def receive(self, *, closed: bool) -> None:
        if closed:
            self._closed += 1
        else:
            self._received += 1

    def train(self, group: Group, *, num_rolled_back: int = 0) -> None:
        """`num_rolled_back`: samples of it with tokens of a version that the trainer does not have."""
        self._trained += len(group.members)
        self._rolled_back += num_rolled_back
        self._settled_closed += len(group.closures)

    def drop(self, dropped: Dropped) -> None:
        num_samples = len(dropped.samples)
        if num_samples:
            self._dropped[dropped.reason] = self._dropped.get(dropped.reason, 0) + num_samples
        if dropped.reason is DropReason.DUPLICATE_SEAT:
            self._late += num_samples
        self._settled_closed += len(dropped.records) - num_samples
        self._refunded += len(dropped.records)

    def lose(self, num_samples: int, reason: DropReason) -> None:
        """Samples that an earlier process had received are kept by nobody any more. They are no longer admitted to anything,
        so nothing is refunded."""
        if num_samples:
            self._received += num_samples
            self._dropped[reason] = self._dropped.get(reason, 0) + num_samples

    def counts(self, statistics: ConsumerStatistics) -> Counts:
        """As of now. `statistics`: the bus's own, of this process."""
        return Counts(
            received=self._received,
            trained=self._trained,
            dropped=dict(self._dropped),
            queued=self.num_queued,
            closed=self._closed,
            refunded=self._refunded,
            late_results=self._late,
            rolled_back=self._rolled_back,
            duplicates=self._before.duplicates + statistics.duplicates,
            rejected=self._before.rejected + statistics.rejected,
        )

    def settled(self, statistics: ConsumerStatistics) -> Counts:
        """What is settled as of now, and nothing of what is queued: to be stored with the bus's position."""
        return self.counts(statistics).model_copy(
            update={"received": self._num_settled, "queued": 0, "closed": self._settled_closed, "refunded": 0}
        )
