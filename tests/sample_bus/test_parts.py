"""Liveness, clients, topics, answers, quarantine, addresses: each part alone."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.address import guarded
from sample_bus.answers import Answers
from sample_bus.clients import Clients, Take, Turn, Wait
from sample_bus.errors import AddressInUse, BusError
from sample_bus.feed import Feed
from sample_bus.frames import PROTOCOL, Hello
from sample_bus.liveness import Liveness
from sample_bus.messages import Accepted
from sample_bus.quarantine import Quarantine
from sample_bus.topics import TopicBoard
from tests.sample_bus.test_control_over_zmq import accept


def hello(process: int, role: str = "rollouter", name: str = "r") -> Hello:
    return Hello(protocol=PROTOCOL, greeting=1, name=name, role=role, process=process)


def test_silence_is_named_once_until_the_peer_is_heard_again() -> None:
    liveness = Liveness(timeout_s=10, longest_tick_s=2, now=0)
    liveness.track(b"a", 0)
    found = []
    for now in range(1, 15):
        liveness.tick(now)
        found += liveness.expired(now)
    assert found == [(b"a", 11)]
    assert liveness.heard(b"a", 15)
    assert not liveness.heard(b"a", 16)
    assert not liveness.heard(b"unknown", 16)


def test_time_in_which_this_process_did_not_run_is_no_silence_of_others() -> None:
    liveness = Liveness(timeout_s=10, longest_tick_s=2, now=0)
    liveness.track(b"a", 0)
    liveness.tick(1)
    liveness.tick(1001)  # stopped for 1000 s
    assert liveness.expired(1001) == []
    for now in range(1002, 1011):
        liveness.tick(now)
        assert liveness.expired(now) == []
    liveness.tick(1012)
    assert liveness.expired(1012) == [(b"a", 12)]


@given(st.lists(st.floats(0.01, 1.9), min_size=1, max_size=200))
def test_peer_that_is_never_heard_is_found_within_the_timeout_and_one_tick(gaps: list[float]) -> None:
    liveness = Liveness(timeout_s=10, longest_tick_s=2, now=0)
    liveness.track(b"a", 0)
    now = 0.0
    for gap in gaps:
        now += gap
        liveness.tick(now)
        assert bool(liveness.expired(now)) == (now - gap <= 10 < now)


def test_rollouter_of_another_name_is_welcome() -> None:
    clients = Clients()
    for process, name in enumerate(("a", "b")):
        assert isinstance(clients.hello(name.encode(), hello(process, name=name)), Take)
    assert clients.rollouters == [], "none has opened its stream"
    for client in clients.connected:
        client.epoch = 7
    assert [client.name for client in clients.rollouters] == ["a", "b"]
    assert clients.heard(b"a") == []


def test_second_rollouter_of_a_name_waits_for_word_of_the_first() -> None:
    clients = Clients()
    assert isinstance(clients.hello(b"1", hello(1)), Take)
    assert clients.hello(b"2", hello(2)) == Wait(probe=b"1")
    assert clients.is_candidate(b"2")
    assert clients.heard(b"other") == []
    (turn,) = clients.heard(b"1")
    assert isinstance(turn, Turn)
    assert turn.peer == b"2"
    assert not clients.is_candidate(b"2")


@pytest.mark.parametrize("how", ["disconnected", "left"])
def test_waiting_rollouter_takes_the_place_of_one_that_is_gone(how: str) -> None:
    clients = Clients()
    clients.hello(b"1", hello(1))
    clients.hello(b"2", hello(2))
    clients.hello(b"3", hello(3))
    first, second = getattr(clients, how)(b"1")
    assert isinstance(first, Take)
    assert first.replaced is not None
    assert (first.client.process, first.replaced.process) == (2, 1)
    assert second == Wait(probe=b"2")
    assert [client.process for client in clients.connected] == [2]


def test_process_that_reconnects_is_the_same_client() -> None:
    clients = Clients()
    clients.hello(b"1", hello(1))
    again = clients.hello(b"2", hello(1))
    assert isinstance(again, Take)
    assert (again.replaced, again.gone) == (None, (b"1",))
    clients.disconnected(b"1")  # word of the old connection comes late
    present = clients.named("r")
    assert present is not None
    assert present.connected


def test_consoles_come_and_go_without_a_word_to_the_rollouter() -> None:
    clients = Clients()
    clients.hello(b"1", hello(1))
    assert isinstance(clients.hello(b"2", hello(2, role="console")), Take)
    assert isinstance(clients.hello(b"3", hello(3, role="console")), Take)
    assert clients.left(b"2") == []
    assert [client.process for client in clients.connected] == [1, 3]
    assert isinstance(clients.hello(b"4", hello(4, role="visitor")), Turn)


async def test_feed_shows_every_event_to_every_follower() -> None:
    feed: Feed[int] = Feed()
    feed.add(1)
    early, late = feed.follow(), feed.follow(from_newest=True)
    assert await anext(early) == 1
    feed.add(2)
    assert await anext(late) == 2
    feed.add(3)
    feed.close()
    assert [event async for event in early] == [2, 3]
    assert [event async for event in late] == [3]
    assert feed.newest == 3


async def test_cleared_topic_is_gone_and_its_next_value_is_seen() -> None:
    board = TopicBoard()
    board.set("kept", msgpack.packb({}))
    board.set("lost", msgpack.packb({}), revision=9)
    watcher = board.watch("lost", Accepted)
    assert await anext(watcher) == Accepted()
    board.clear(keep=frozenset({"kept"}))
    assert ("lost" in board, "kept" in board, board.revision("lost")) == (False, True, 0)
    waiting = asyncio.ensure_future(anext(watcher))
    await asyncio.sleep(0)
    board.set("lost", msgpack.packb({}), revision=1)
    assert await waiting == Accepted()


def test_request_has_one_handler() -> None:
    answers = Answers()
    answers.handle("x", Accepted, accept)
    with pytest.raises(BusError, match="'x' has a handler already"):
        answers.handle("x", Accepted, accept)


def test_quarantine_is_bounded_in_files_and_bytes(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q", max_files=3, max_bytes=1000)
    paths = [quarantine.keep([b"x" * 100], "broken", "tester") for _ in range(5)]
    assert [path is not None for path in paths] == [True, True, True, False, False]
    again = Quarantine(tmp_path / "q", max_files=10, max_bytes=1000)
    assert again.keep([b"x" * 900], "broken", "tester") is None
    assert again.keep([b"x"], "broken", "tester") is not None
    assert paths[0] is not None
    kept = msgpack.unpackb(paths[0].read_bytes())
    assert (kept["error"], kept["source"], kept["frames"]) == ("broken", "tester", [b"x" * 100])


def test_quarantine_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Quarantine(tmp_path / "file" / "q").keep([b"x"], "broken", "tester") is None


def test_living_socket_of_another_program_is_not_unlinked(address: str) -> None:
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen(1)
        with pytest.raises(AddressInUse, match="another process listens there"), guarded(address):
            pass
        assert Path(path).is_socket()


def test_dead_socket_is_taken_over(address: str) -> None:
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
    with guarded(address):
        assert not Path(path).exists()


def test_path_beyond_what_a_socket_takes_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """B136."""
    long = f"ipc://{tmp_path}/{'x' * 120}"
    with pytest.raises(AddressInUse, match=f"{len(os.fsencode(long)) - 6} bytes, expected at most 107"), guarded(long):
        pass


def test_ordinary_file_is_never_unlinked(address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(AddressInUse), guarded(address):
        pass
    assert path.read_text() == "precious"
