"""The two accounts of a stream, the producer's and the trainer's, over a channel that breaks at any moment."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus import wire
from sample_bus.credit import Credit, Stream
from sample_bus.errors import PeerLost
from sample_bus.inbox import Inbox, Position, Verdict
from sample_bus.outbox import Offer, Outbox
from sample_bus.protocols import Leased
from sample_bus.sample import Sample, SampleId
from tests.fakes.samples import make_sample

SAMPLE = make_sample()


class Channel:
    """An outbox and an inbox with two pipes between them. Each step either moves something or breaks the connection."""

    def __init__(self, max_samples: int, max_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.limits = (max_samples, max_bytes)
        self.epoch = 0
        self.inbox = Inbox(max_samples=max_samples, max_bytes=max_bytes)
        self.leased: list[Leased] = []
        self.handed_out: list[str] = []
        self.confirmed: list[str] = []
        self.offered = 0
        self.restart_producer()

    def restart_producer(self) -> None:
        """Its memory is gone: a new epoch."""
        self.epoch += 1
        self.outbox = Outbox("p", self.epoch, lambda seq, frames: self.data.append((seq, frames)))
        self.offers: dict[str, asyncio.Future[SampleId]] = {}
        self.connect()

    def connect(self) -> None:
        """What was under way is lost."""
        self.data: deque[tuple[int, object]] = deque()
        self.acks: deque[Position] = deque()
        self.outbox.pause()
        place = ("p", self.epoch)
        first, before = self.outbox.first_unreceived, self.outbox.bytes_before_unreceived
        self.inbox.open_stream(place, first_unreceived=first, bytes_before=before)
        position = self.inbox.position(place)
        self.outbox.resume(position.received, position.credit)

    def offer(self, size: int) -> None:
        name = f"{self.epoch}/{self.offered}"
        parts = wire.prepare(make_sample(reply=[1] * size, task_id=name), "p")
        done: asyncio.Future[SampleId] = self.loop.create_future()
        self.offers[name] = done
        self.offered += 1
        self.outbox.add(Offer(parts, wire.PREFIX_BYTES + wire.num_bytes(parts), done))

    def arrive(self) -> None:
        if not self.data:
            return
        seq, frames = self.data.popleft()
        sample_id, sample = wire.decode(frames, max_bytes=1 << 20)  # type: ignore[arg-type]
        assert sample_id.seq == seq
        verdict = self.inbox.take(Leased(id=sample_id, sample=sample, nbytes=wire.num_bytes(frames)))  # type: ignore[arg-type]
        assert verdict is Verdict.TAKEN
        self.acks.append(self.inbox.position(("p", self.epoch)))

    def acknowledge(self, which: int, late: bool) -> None:
        """Settle some sample; the acknowledgements of it may overtake each other or be repeated."""
        if (leased := self.inbox.lease()) is not None:
            self.handed_out.append(leased.sample.task_id)
            self.leased.append(leased)
        if self.leased:
            self.inbox.acknowledge([self.leased.pop(which % len(self.leased)).id], dropped=False)
            self.acks.append(self.inbox.position(("p", self.epoch)))
        if late:
            self.acks.rotate(1)

    def tell(self, repeat: bool) -> None:
        if self.acks:
            position = self.acks[0] if repeat else self.acks.popleft()
            self.outbox.advance(position.received, position.credit)

    def check(self) -> None:
        statistics = self.inbox.statistics()
        assert statistics.queued <= self.limits[0]
        assert statistics.queued_bytes <= self.limits[1]
        assert len(set(self.handed_out)) == len(self.handed_out)

    def drain(self) -> None:
        """Everything that was offered by the present process arrives, whatever happened before."""
        self.connect()
        for _ in range(10 * self.offered + 10):
            self.arrive()
            self.tell(repeat=False)
            self.acknowledge(0, late=False)
            self.check()
        for name, done in self.offers.items():
            assert done.done(), name
            assert name in self.handed_out
        mine = [name for name in self.handed_out if name.startswith(f"{self.epoch}/")]
        assert mine == list(self.offers)
        assert self.inbox.statistics().queued == 0
        self.loop.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 60)),
        st.tuples(st.just("arrive")),
        st.tuples(st.just("acknowledge"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("tell"), st.booleans()),
        st.tuples(st.just("connect")),
        st.tuples(st.just("restart_producer")),
    ),
    max_size=80,
)


@given(STEPS, st.integers(1, 6), st.integers(1500, 6000))
def test_bound_holds_and_everything_arrives_once_in_order_whatever_breaks(
    steps: list[tuple[object, ...]], max_samples: int, max_bytes: int
) -> None:
    channel = Channel(max_samples, max_bytes)
    for name, *values in steps:
        getattr(channel, str(name))(*values)
        channel.check()
    channel.drain()


def test_new_trainer_with_less_room_gets_no_more_than_that_of_what_was_sent() -> None:
    sent: list[int] = []
    outbox = Outbox("p", 1, lambda seq, frames: sent.append(seq))
    loop = asyncio.new_event_loop()
    for _ in range(5):
        parts = wire.prepare(SAMPLE, "p")
        outbox.add(Offer(parts, wire.PREFIX_BYTES + wire.num_bytes(parts), loop.create_future()))
    outbox.resume(0, Credit(samples=4, num_bytes=10**9))
    assert sent == [0, 1, 2, 3]
    sent.clear()
    outbox.resume(0, Credit(samples=2, num_bytes=10**9))
    assert sent == [0, 1]
    outbox.advance(2, Credit(samples=9, num_bytes=10**9))
    assert sent == [0, 1, 2, 3, 4]
    loop.close()


def test_offer_that_failed_after_it_was_sent_stays_in_the_stream() -> None:
    sent: list[int] = []
    outbox = Outbox("p", 1, lambda seq, frames: sent.append(seq))
    loop = asyncio.new_event_loop()
    futures: list[asyncio.Future[SampleId]] = [loop.create_future() for _ in range(3)]
    for done in futures:
        parts = wire.prepare(SAMPLE, "p")
        outbox.add(Offer(parts, wire.PREFIX_BYTES + wire.num_bytes(parts), done))
    outbox.resume(0, Credit(samples=2, num_bytes=10**9))
    outbox.fail(PeerLost("gone"))
    assert all(isinstance(done.exception(), PeerLost) for done in futures)
    assert (outbox.next_seq, outbox.first_unreceived, outbox.num_waiting) == (2, 0, 0)
    outbox.resume(1, Credit(samples=9, num_bytes=10**9))
    assert sent == [0, 1, 1]
    loop.close()


def test_lost_repeated_and_late_acknowledgements_change_nothing() -> None:
    near, far = Credit(samples=3, num_bytes=500), Credit(samples=5, num_bytes=400)
    assert near.or_further(far) == far.or_further(near) == Credit(samples=5, num_bytes=500)
    assert near.or_further(near) == near


@pytest.mark.parametrize(("seq", "before", "nbytes", "allowed"), [(4, 90, 10, True), (5, 0, 1, False), (4, 91, 10, False)])
def test_credit_is_in_samples_and_in_bytes(seq: int, before: int, nbytes: int, allowed: bool) -> None:
    assert Credit(samples=5, num_bytes=100).allows(seq, before, nbytes) is allowed


def test_streams_share_one_room() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("old", 1), first_unreceived=0, bytes_before=0)
    for seq in range(4):
        assert inbox.take(leased("old", 1, seq)) is Verdict.TAKEN
    inbox.open_stream(("new", 2), first_unreceived=0, bytes_before=0)
    assert inbox.position(("new", 2)).credit == Credit(samples=6, num_bytes=600)
    first = inbox.lease()
    assert first is not None
    inbox.acknowledge([first.id], dropped=False)
    assert inbox.position(("new", 2)).credit == Credit(samples=7, num_bytes=700)


def test_account_for_a_resumption_leaves_out_what_was_dropped() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("p", 1), first_unreceived=0, bytes_before=0)
    inbox.count_from(50)
    for seq in range(5):
        inbox.take(leased("p", 1, seq))
    taken = [inbox.lease() for _ in range(3)]
    inbox.acknowledge([sample.id for sample in taken[:2] if sample], dropped=True)
    inbox.acknowledge([sample.id for sample in taken[2:] if sample], dropped=False)
    assert (inbox.accounted, inbox.dropped) == (50 + 5 - 2, 2)


def test_stream_counts_what_it_holds() -> None:
    stream = Stream(received=7, received_bytes=700)
    stream.receive(100)
    stream.receive(50)
    assert (stream.received, stream.settled, stream.queued_bytes) == (9, 7, 150)
    stream.settle(100)
    assert stream.credit(room_samples=3, room_bytes=200) == Credit(samples=11, num_bytes=1000)
    assert stream.credit(room_samples=-5, room_bytes=-5) == Credit(samples=9, num_bytes=850)


def leased(producer: str, epoch: int, seq: int) -> Leased:
    sample: Sample = SAMPLE
    return Leased(id=SampleId(producer, epoch, seq), sample=sample, nbytes=100)
