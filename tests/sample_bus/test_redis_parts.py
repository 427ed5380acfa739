"""What is decided about Redis without a server."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import BusError, Insecure, WireError
from sample_bus.redis_copies import Copies
from sample_bus.redis_durability import read_survey, unusable, volatile
from sample_bus.redis_intake import Entry, Intake
from sample_bus.redis_keys import entry_id, fields_of, frames_of, letter, place_of, read_letter
from sample_bus.redis_lock import has_ended, read_holder, this_process
from sample_bus.redis_open import broker_at
from sample_bus.redis_thread import Backoff
from tests.sample_bus.ends import bus_settings


@given(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1))
def test_a_place_survives_its_entry_id(epoch: int, seq: int) -> None:
    assert place_of(entry_id(epoch, seq).encode()) == (epoch, seq)


@given(st.lists(st.binary(max_size=50), max_size=12))
def test_frames_survive_the_fields_of_an_entry(frames: list[bytes]) -> None:
    assert frames_of([bytes(field) for field in fields_of(frames)]) == tuple(frames)


@given(st.lists(st.binary(max_size=5), max_size=6))
def test_fields_of_another_make_are_refused(fields: list[bytes]) -> None:
    try:
        frames = frames_of(fields)
    except WireError:
        return
    assert [bytes(field) for field in fields_of(frames)] == fields


@given(st.binary(max_size=200))
def test_no_published_bytes_do_more_than_be_refused(data: bytes) -> None:
    try:
        sender, _ = read_letter(data)
    except WireError:
        return
    assert 0 < len(sender) <= 64


def test_a_letter_is_read_as_it_was_written() -> None:
    assert read_letter(letter(b"a.1", b"frame")) == (b"a.1", b"frame")


class _Server:
    """A stream on a server that may lose its end, and a trainer that reads it: what `Copies` is told of."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.top = 0
        self.held: dict[int, bytes] = {}

    def add(self, batch: Sequence[tuple[int, Sequence[bytes | memoryview]]]) -> None:
        for seq, frames in batch:
            if seq >= self.top:  # the server takes rising ids only
                self.entries[seq], self.top = bytes(frames[0]), seq + 1

    def lose(self, top: int) -> None:
        self.top = min(self.top, top)
        self.entries = {seq: frame for seq, frame in self.entries.items() if seq < self.top}

    def read(self) -> int:
        """The trainer takes what comes next, in order; what it holds from there on."""
        while len(self.held) in self.entries:
            self.held[len(self.held)] = self.entries[len(self.held)]
        return len(self.held)


@given(st.lists(st.one_of(st.just("offer"), st.just("add"), st.just("reply lost"), st.just("read"), st.integers(0, 30))))
def test_whatever_the_server_loses_the_trainer_gets_everything_in_order(acts: list[str | int]) -> None:
    """B134: a number is a crash after which the server has only so many records. One failure at a time: what the trainer holds
    is not lost with the server."""
    server, copies = _Server(), Copies(0)
    for act in [*acts, "add", "read"]:
        if act == "offer":
            copies.add(copies.next_seq, [f"record {copies.next_seq}".encode()])
        elif act == "read":
            copies.note_received(server.read())
        elif isinstance(act, int):
            server.lose(act)
            copies.resume(server.top)
        else:
            while batch := copies.batch(20):
                server.add(batch)
                if act == "reply lost":
                    copies.resume(server.top)
                    break
                copies.note_stored(batch[-1][0] + 1)
    copies.note_received(server.read())
    assert server.held == {seq: f"record {seq}".encode() for seq in range(copies.next_seq)}
    assert copies.num_bytes == 0


def test_only_what_the_trainer_does_not_hold_stays_in_memory() -> None:
    copies = Copies(5)
    for seq in range(5, 9):
        copies.add(seq, [b"12345678"])
    copies.note_received(7)
    assert copies.num_bytes == 32  # not known to be on the server yet
    copies.note_stored(9)
    assert copies.num_bytes == 16
    copies.note_received(9)
    assert copies.num_bytes == 0


def test_a_batch_is_bounded_by_its_bytes_and_never_empty() -> None:
    copies = Copies(0)
    for seq in range(4):
        copies.add(seq, [bytes(100)])
    assert [seq for seq, _ in copies.batch(250)] == [0, 1]
    assert [seq for seq, _ in copies.batch(1)] == [0]


def _entry(seq: int, nbytes: int) -> Entry:
    return Entry(seq, [b"f0", bytes(nbytes)])


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    room=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 160)), min_size=1, max_size=40),
)
def test_records_are_handed_over_in_order_within_the_room(sizes: list[int], room: list[tuple[int, int]]) -> None:
    intake = Intake("p", "key", 1, 0)
    handed: list[int] = []
    received = 0
    for more, room_bytes in [*room, (len(sizes), 10_000)]:
        limit = received + more
        intake.open_room(received=received, limit=limit, room_bytes=room_bytes)
        while True:
            while (entry := intake.hand_over()) is not None:
                handed.append(entry.seq)
                assert entry.seq < limit
                assert sum(sizes[received : entry.seq + 1]) <= room_bytes
            assert intake.next_read + intake.count() <= max(limit, intake.next_read)
            batch = range(intake.next_read, min(intake.next_read + intake.count(), len(sizes)))
            if not batch:
                break
            for seq in batch:
                intake.take(_entry(seq, sizes[seq]))
        received = len(handed)
    assert handed == list(range(len(handed)))
    assert len(handed) == len(sizes)


def test_what_was_read_before_is_passed_over_and_a_gap_is_seen() -> None:
    intake = Intake("p", "key", 1, 10)
    intake.open_room(received=10, limit=20, room_bytes=1000)
    intake.take(_entry(8, 1))
    intake.take(_entry(10, 1))
    assert intake.next_read == 11
    assert list(intake.gap_before(13)) == [11, 12]
    assert not intake.gap_before(11)


def test_backoff_doubles_up_to_its_limit_and_starts_again() -> None:
    backoff = Backoff(first_s=0.1, longest_s=0.5)
    assert [backoff.failed() for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]
    backoff.worked()
    assert backoff.failed() == 0.1


def _facts(**changes: str) -> dict[str, str]:
    return {"redis_version": "7.0.15", "redis_mode": "standalone", "aof_enabled": "1", "maxmemory": "0", **changes}


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (_facts(), None),
        (_facts(aof_enabled="0"), "CONFIG SET appendonly yes"),
        (_facts(maxmemory_policy="allkeys-lru"), None),
        (_facts(maxmemory="1000", maxmemory_policy="allkeys-lru"), "CONFIG SET maxmemory-policy noeviction"),
        (_facts(maxmemory="1000", maxmemory_policy="noeviction"), None),
        (_facts(maxmemory="1000", maxmemory_policy="volatile-ttl"), None),
    ],
)
def test_a_server_that_would_lose_samples_is_told_with_its_remedy(facts: dict[str, str], remedy: str | None) -> None:
    """Streams have no expiry, so only an allkeys policy deletes them."""
    problems = volatile(read_survey(facts))
    assert bool(problems) == (remedy is not None)
    assert remedy is None or remedy in problems[0]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (_facts(), None),
        (_facts(redis_version="6.2.14"), None),
        (_facts(redis_version="8.0.1"), None),
        (_facts(redis_version="6.0.16"), "version 6.0.16, expected 6.2"),
        (_facts(redis_mode="cluster"), "cluster"),
    ],
)
def test_a_server_of_the_wrong_kind_is_told(facts: dict[str, str], reason: str | None) -> None:
    told = unusable(read_survey(facts))
    assert (told is None) == (reason is None)
    assert reason is None or reason in (told or "")


def test_a_process_that_ended_is_known_to_have_ended() -> None:
    me = this_process()
    assert read_holder(me.packed()) == me
    assert not has_ended(me, me)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert has_ended(dataclasses.replace(me, pid=child.pid, started=1), me)
    assert has_ended(dataclasses.replace(me, started=me.started + 1), me)  # a later process with its number


def test_a_process_elsewhere_is_never_taken_for_dead() -> None:
    me = this_process()
    assert not has_ended(dataclasses.replace(me, space="another machine", pid=1 << 22), me)


@given(st.binary(max_size=60))
def test_a_strange_lock_is_nobody(data: bytes) -> None:
    holder = read_holder(data)
    assert holder is None or holder.packed() == data


def test_the_password_comes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    file.chmod(0o600)
    bus = bus_settings(transport="redis", redis_password_file=file, redis_username="hr")
    broker = broker_at(bus, "redis://127.0.0.1:6379/0#run")
    assert (broker.username, broker.password) == ("hr", "s3cret")
    assert "s3cret" not in str(broker)
    file.write_text("\n")
    with pytest.raises(Insecure, match="it is empty"):
        broker_at(bus, "redis://127.0.0.1:6379/0#run")
    file.unlink()
    with pytest.raises(BusError, match="No such file"):
        broker_at(bus, "redis://127.0.0.1:6379/0#run")


def test_an_address_without_a_run_or_beyond_this_host_is_refused_when_an_end_is_opened() -> None:
    bus = bus_settings(transport="redis")
    with pytest.raises(BusError, match="expected #RUN"):
        broker_at(bus, "redis://127.0.0.1:6379/0")
    with pytest.raises(Insecure, match="allow_insecure"):
        broker_at(bus, "redis://10.0.0.7:6379/0#run")
    assert broker_at(bus_settings(transport="redis", allow_insecure=True), "redis://10.0.0.7:6379/0#run")
