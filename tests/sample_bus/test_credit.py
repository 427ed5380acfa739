"""The two accounts of a stream, the producer's and the trainer's, over a channel that breaks, with ends that die."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus import wire
from sample_bus.credit import Credit, Sizes, Stream
from sample_bus.errors import BusError, PeerLost
from sample_bus.inbox import Inbox, Standing, Verdict
from sample_bus.outbox import Offer, Outbox
from sample_bus.position import BusPosition, StreamPosition
from sample_bus.protocols import Leased
from sample_bus.sample import Sample, SampleId
from tests.fakes.samples import make_sample

SAMPLE = make_sample()
ROOM = 10**9
Frames = Sequence[bytes | memoryview]


class Store:
    """A producer's durable copies, and what they send: the carrier of a link, in memory."""

    def __init__(self) -> None:
        self.committed = 0
        self.kept: list[Frames] = []
        self.slow: deque[tuple[int, Frames]] = deque()
        self.cursor: int | None = None
        self.limit = 0
        self.sent: deque[tuple[int, Frames]] = deque()

    @property
    def next_seq(self) -> int:
        return self.committed + len(self.kept)

    def store(self, seq: int, frames: Frames) -> None:
        self.slow.append((seq, frames))

    def write(self) -> None:
        if self.slow:
            seq, frames = self.slow.popleft()
            assert seq == self.next_seq, "records are stored densely and in order"
            self.kept.append(frames)
            self._send()

    def deliver(self, first: int | None, limit: int) -> None:
        self.cursor = first if first is not None else self.cursor
        self.limit = limit
        self._send()

    def hold(self) -> None:
        self.cursor = None

    def free(self, watermark: int) -> None:
        self.kept = self.kept[watermark - self.committed :]
        self.committed = watermark

    def sizes(self) -> tuple[int, ...]:
        return tuple(wire.num_bytes(frames) for frames in self.kept)

    def die(self) -> None:
        """What was not written is lost, and what was under way."""
        self.slow.clear()
        self.sent.clear()
        self.cursor = None

    def _send(self) -> None:
        while self.cursor is not None and self.cursor < min(self.limit, self.next_seq):
            assert self.cursor >= self.committed, "a freed record was asked for"
            self.sent.append((self.cursor, self.kept[self.cursor - self.committed]))
            self.cursor += 1


class Channel:
    """An outbox and an inbox with two pipes between them. Each step either moves something or breaks something."""

    def __init__(self, max_samples: int, max_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.limits = (max_samples, max_bytes)
        self.inbox = Inbox(max_samples=max_samples, max_bytes=max_bytes)
        self.store = Store()
        self.epoch = 1
        self.leased: list[Leased] = []
        self.effect: list[str] = []
        """What is in the trainer's weights."""
        self.saved: tuple[BusPosition, list[str]] = (BusPosition(), [])
        self.acks: deque[Standing] = deque()
        self.offers: dict[str, asyncio.Future[SampleId]] = {}
        self.outbox = self.opened()
        self.connect()

    def opened(self) -> Outbox:
        outbox = Outbox("p", self.store)
        outbox.open(self.epoch, self.store.committed, self.store.sizes())
        return outbox

    def connect(self) -> None:
        """What was under way is lost."""
        self.store.sent.clear()
        self.acks.clear()
        self.outbox.pause()
        gone = self.inbox.open_stream(("p", self.epoch), committed=self.outbox.committed)
        assert gone is None, "nothing is freed that no checkpoint covers"
        standing = self.inbox.standing(("p", self.epoch))
        self.outbox.resume(standing.received, standing.committed, standing.credit)

    def kill_producer(self) -> None:
        """Offers that were not durable are lost with it, and nobody was told that they were safe."""
        self.store.die()
        self.offers = {name: done for name, done in self.offers.items() if done.done()}
        self.outbox = self.opened()
        self.connect()

    def kill_trainer(self) -> None:
        """It goes on from its checkpoint."""
        position, effect = self.saved
        self.effect = list(effect)
        self.leased.clear()
        self.inbox = Inbox(max_samples=self.limits[0], max_bytes=self.limits[1])
        self.inbox.seek(position)
        self.connect()

    def save(self) -> None:
        """A checkpoint, and then its commit."""
        self.saved = (self.inbox.position(), list(self.effect))
        self.inbox.commit(self.saved[0])
        self.acks.append(self.inbox.standing(("p", self.epoch)))

    def offer(self, size: int) -> None:
        name = f"t{len(self.offers)}-{size}"
        parts = wire.prepare(make_sample(reply=[1] * size, task_id=name), "p")
        done: asyncio.Future[SampleId] = self.loop.create_future()
        self.offers[name] = done
        self.outbox.add(Offer(parts, wire.PREFIX_BYTES + wire.num_bytes(parts), done))

    def write(self) -> None:
        self.store.write()
        self.outbox.stored(self.store.next_seq)

    def arrive(self) -> None:
        if not self.store.sent:
            return
        seq, frames = self.store.sent.popleft()
        sample_id, sample = wire.decode(frames, max_bytes=1 << 20)
        assert sample_id.seq == seq
        assert isinstance(sample, Sample)
        verdict = self.inbox.take(Leased(id=sample_id, sample=sample, nbytes=wire.num_bytes(frames)))
        assert verdict in (Verdict.TAKEN, Verdict.DUPLICATE)
        self.acks.append(self.inbox.standing(("p", self.epoch)))

    def train(self, which: int, late: bool) -> None:
        """Settle some record; the acknowledgements of it may overtake each other or be repeated."""
        while len(self.leased) < 4 and (leased := self.inbox.lease()) is not None:
            assert isinstance(leased, Leased)
            self.leased.append(leased)
        if self.leased:
            one = self.leased.pop(which % len(self.leased))
            self.inbox.acknowledge([one.id], dropped=False)
            self.effect.append(one.sample.task_id)
            self.acks.append(self.inbox.standing(("p", self.epoch)))
        if late:
            self.acks.rotate(1)

    def tell(self, repeat: bool) -> None:
        if self.acks:
            standing = self.acks[0] if repeat else self.acks.popleft()
            self.outbox.advance(standing.received, standing.committed, standing.credit)

    def check(self) -> None:
        statistics = self.inbox.statistics()
        assert statistics.queued <= self.limits[0]
        assert statistics.queued_bytes <= self.limits[1]
        assert len(set(self.effect)) == len(self.effect), "a record is in effect twice"

    def drain(self) -> None:
        """Everything that was offered, and everything that was promised, is in effect once."""
        self.connect()
        for _ in range(10 * len(self.offers) + 10):
            self.write()
            self.arrive()
            self.tell(repeat=False)
            self.train(0, late=False)
            self.check()
        for name, done in self.offers.items():
            assert done.done(), name
            assert name in self.effect
        assert self.inbox.statistics().queued == 0
        assert self.inbox.position().of("p", self.epoch) == StreamPosition(
            producer="p", epoch=self.epoch, watermark=self.store.next_seq
        )
        self.loop.close()


DEATHS = ("connect", "kill_producer", "kill_trainer", "save")
MOVES = st.one_of(
    st.tuples(st.just("offer"), st.integers(1, 60)),
    st.tuples(st.just("write")),
    st.tuples(st.just("arrive")),
    st.tuples(st.just("train"), st.integers(0, 99), st.booleans()),
    st.tuples(st.just("tell"), st.booleans()),
)
FLOW = (("offer", 20), ("write",), ("arrive",), ("tell", False), ("train", 3, False), ("tell", False))
FILL = (("offer", 20), ("write",), ("arrive",), ("tell", False))
STEPS = st.lists(
    st.one_of(
        st.lists(MOVES, min_size=1, max_size=12),
        st.integers(1, 8).map(lambda times: [*FLOW] * times),
        st.integers(1, 8).map(lambda times: [*FILL] * times),
        st.sampled_from(DEATHS).map(lambda name: [(name,)]),
    ),
    min_size=10,
    max_size=40,
).map(lambda parts: [step for part in parts for step in part])


@given(STEPS, st.integers(1, 6), st.integers(1500, 6000))
def test_bound_holds_and_every_record_is_in_effect_once_whatever_breaks(
    steps: list[tuple[object, ...]], max_samples: int, max_bytes: int
) -> None:
    channel = Channel(max_samples, max_bytes)
    for name, *values in steps:
        getattr(channel, str(name))(*values)
        channel.check()
    channel.drain()


def offer_to(outbox: Outbox, loop: asyncio.AbstractEventLoop) -> asyncio.Future[SampleId]:
    parts = wire.prepare(SAMPLE, "p")
    done: asyncio.Future[SampleId] = loop.create_future()
    outbox.add(Offer(parts, wire.PREFIX_BYTES + wire.num_bytes(parts), done))
    return done


def outbox_with(store: Store) -> Outbox:
    outbox = Outbox("p", store)
    outbox.open(1, 0, ())
    return outbox


def test_new_trainer_with_less_room_gets_no_more_than_that_of_what_is_kept() -> None:
    store = Store()
    outbox = outbox_with(store)
    loop = asyncio.new_event_loop()
    for _ in range(5):
        offer_to(outbox, loop)
    outbox.resume(0, 0, Credit(samples=4, room_bytes=ROOM))
    for _ in range(5):
        store.write()
    assert [seq for seq, _ in store.sent] == [0, 1, 2, 3]
    store.sent.clear()
    outbox.resume(0, 0, Credit(samples=2, room_bytes=ROOM))
    assert [seq for seq, _ in store.sent] == [0, 1]
    outbox.advance(2, 0, Credit(samples=9, room_bytes=ROOM))
    store.write()
    assert [seq for seq, _ in store.sent] == [0, 1, 2, 3, 4]
    loop.close()


def test_offer_that_failed_after_it_got_its_place_stays_in_the_stream() -> None:
    store = Store()
    outbox = outbox_with(store)
    loop = asyncio.new_event_loop()
    futures = [offer_to(outbox, loop) for _ in range(3)]
    outbox.resume(0, 0, Credit(samples=2, room_bytes=ROOM))
    outbox.fail(PeerLost("gone"))
    assert all(isinstance(done.exception(), PeerLost) for done in futures)
    assert (outbox.next_seq, outbox.num_stored, outbox.num_waiting) == (2, 0, 0)
    store.write()
    store.write()
    outbox.stored(2)
    assert outbox.num_stored == 2
    loop.close()


def test_offers_are_stored_while_the_trainer_is_away_as_far_as_its_credit_reached() -> None:
    store = Store()
    outbox = outbox_with(store)
    loop = asyncio.new_event_loop()
    outbox.resume(0, 0, Credit(samples=2, room_bytes=ROOM))
    outbox.pause()
    offers = [offer_to(outbox, loop) for _ in range(3)]
    for _ in range(3):
        store.write()
        outbox.stored(store.next_seq)
    assert [done.done() for done in offers] == [True, True, False]
    assert not store.sent
    loop.close()


def test_sizes_are_those_of_any_run_of_kept_records() -> None:
    sizes = Sizes(10, (5, 7, 11))
    assert (sizes.first, sizes.next_seq, sizes.total_bytes) == (10, 13, 23)
    assert sizes.before(12) - sizes.before(10) == 12
    sizes.append(100)
    sizes.free(12)
    assert (sizes.first, sizes.next_seq, sizes.total_bytes) == (12, 14, 111)
    assert sizes.before(14) - sizes.before(13) == 100
    sizes.free(99)
    assert (sizes.first, sizes.next_seq, sizes.total_bytes) == (14, 14, 0)


def test_producers_share_one_room() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("old", 1), committed=0)
    assert inbox.standing(("old", 1)).credit.samples == 10
    for seq in range(4):
        assert inbox.take(leased("old", 1, seq)) is Verdict.TAKEN
    inbox.open_stream(("new", 2), committed=0)
    assert inbox.standing(("new", 2)).credit == Credit(samples=5, room_bytes=1000)
    assert inbox.standing(("old", 1)).credit == Credit(samples=10, room_bytes=100)


def test_unsettled_records_of_an_earlier_epoch_take_their_producers_room() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("p", 1), committed=0)
    inbox.standing(("p", 1))
    for seq in range(4):
        inbox.take(leased("p", 1, seq))
    inbox.open_stream(("p", 2), committed=0)
    assert inbox.standing(("p", 2)).credit.samples == 6
    first = inbox.lease()
    assert first is not None
    inbox.acknowledge([first.id], dropped=False)
    assert inbox.standing(("p", 2)).credit.samples == 7


def test_account_for_a_resumption_leaves_out_what_was_dropped_and_counts_what_will_come() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("p", 1), committed=0)
    inbox.standing(("p", 1))
    inbox.count_from(50)
    for seq in range(5):
        inbox.take(leased("p", 1, seq))
    taken = [inbox.lease() for _ in range(3)]
    inbox.acknowledge([one.id for one in taken[:2] if one], dropped=True)
    inbox.acknowledge([one.id for one in taken[2:] if one], dropped=False)
    assert (inbox.accounted(("p", 1), 5), inbox.dropped) == (50 + 5 - 2, 2)
    assert inbox.accounted(("p", 1), 9) == 50 + 5 - 2 + 4


def test_records_that_a_position_covers_are_refused_and_the_others_come_again() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    covered = StreamPosition(producer="p", epoch=1, watermark=3, beyond=((4, 6),))
    inbox.seek(BusPosition(streams=(covered,)))
    assert inbox.position() == BusPosition(streams=(covered,)), "a position outlives a checkpoint before the producer comes"
    inbox.open_stream(("p", 1), committed=0)
    assert inbox.standing(("p", 1)).received == 3
    assert inbox.accounted(("p", 1), 7) == 2
    verdicts = [inbox.take(leased("p", 1, seq)) for seq in (3, 4, 5, 6)]
    assert verdicts == [Verdict.TAKEN, Verdict.DUPLICATE, Verdict.DUPLICATE, Verdict.TAKEN]
    assert [one.id.seq for one in (inbox.lease(), inbox.lease()) if one] == [3, 6]
    assert inbox.statistics().duplicates == 2


def test_what_a_producer_freed_and_no_position_covers_is_told_as_gone() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.seek(BusPosition(streams=(StreamPosition(producer="p", epoch=1, watermark=3, beyond=((5, 6),)),)))
    gone = inbox.open_stream(("p", 1), committed=8)
    assert gone is not None
    assert (gone.first, gone.last, gone.num_records) == (3, 8, 4)
    assert inbox.standing(("p", 1)).received == 8


def test_commit_beyond_what_is_settled_is_refused() -> None:
    inbox = Inbox(max_samples=10, max_bytes=1000)
    inbox.open_stream(("p", 1), committed=0)
    with pytest.raises(BusError, match="commit: p up to 1, settled up to 0"):
        inbox.commit(BusPosition(streams=(StreamPosition(producer="p", epoch=1, watermark=1),)))


def test_stream_counts_what_it_holds() -> None:
    stream = Stream.at(StreamPosition(producer="p", epoch=1, watermark=7))
    stream.receive(100)
    stream.receive(50)
    assert (stream.received, stream.settled.num_settled, stream.queued_bytes) == (9, 7, 150)
    stream.settle(7, 100)
    assert stream.credit(room_samples=3, room_bytes=200) == Credit(samples=11, room_bytes=150)
    assert stream.credit(room_samples=-5, room_bytes=-5) == Credit(samples=11, room_bytes=0), "credit is never taken back"


def leased(producer: str, epoch: int, seq: int) -> Leased:
    return Leased(id=SampleId(producer, epoch, seq), sample=SAMPLE, nbytes=100)
