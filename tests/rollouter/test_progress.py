"""The progress log: what is read again is a beginning of what was recorded, whatever becomes of the file."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import Generation
from agent_loop.progress import Noted, Piece, Sampled, Shown
from rollouter import progress as module
from rollouter.admission import HeldVersion
from rollouter.progress import ProgressLog, Recording, fold, read_progress
from rollouter.progress_records import Asked, Began, Entry, Got, Over, Place, decode_entry, encode_entry
from rollouter.progress_rewrite import Kept, Rewrite, note
from sample_bus.errors import JournalError
from sample_bus.record_log import RecordLog

HELD = HeldVersion(incarnation="first", policy_version=3)
A, B = ("task#0@p", 0), ("task#0@p", 1)


def shown(*tokens: int) -> Shown:
    return Shown(token_ids=np.array(tokens, np.int32))


def sampled(*tokens: int, version: int = 3, ends: Any = None) -> Sampled:
    runs = 1 if tokens else 0
    return Sampled(
        generation=Generation(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -0.25, np.float32),
            version_starts=np.zeros(runs, np.int32),
            versions=np.full(runs, version, np.int32),
            kept_cache=np.zeros(runs, np.uint8),
            stop_reason="length" if tokens else "abort",
        ),
        ends_turn=ends,
    )


def plain(piece: Piece) -> Any:
    """Comparable."""
    match piece:
        case Shown():
            return piece.token_ids.tolist()
        case Noted():
            return piece.value
        case Sampled():
            part = piece.generation
            arrays = (part.token_ids, part.logprobs, part.version_starts, part.versions, part.kept_cache)
            return [*((array.dtype.str, array.tolist()) for array in arrays), part.stop_reason, piece.ends_turn]


def open_log(path: Path) -> ProgressLog:
    progress = ProgressLog(path)
    progress.start(progress.found)
    return progress


def tokens_of(path: Path) -> dict[Place, list[Any]]:
    return {place: [plain(piece) for piece in progress.pieces] for place, progress in read_progress(path).items()}


pieces = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8).map(lambda tokens: shown(*tokens)),
    st.binary(max_size=20).map(lambda value: Noted(value=value)),
    st.builds(
        lambda tokens, version, ends: sampled(*tokens, version=version, ends=ends),
        st.lists(st.integers(0, 2**31 - 1), max_size=8),
        st.integers(0, 9),
        st.sampled_from([None, "stop", "length"]),
    ),
)
entries = st.one_of(
    st.builds(Began, attempt=st.integers(0, 9), incarnation=st.text(max_size=8), policy_version=st.integers(-1, 9)),
    st.builds(Asked, num_tokens=st.integers(1, 999)),
    st.builds(Got, index=st.integers(0, 3), piece=pieces),
    st.just(Over()),
)
places = st.tuples(st.text(max_size=12), st.integers(0, 7))


@given(places, entries)
def test_entries_are_read_as_they_were_written(place: Place, entry: Entry) -> None:
    got_place, got = decode_entry(encode_entry(place, entry), "here")
    assert got_place == place
    if isinstance(entry, Got):
        assert isinstance(got, Got)
        assert (got.index, plain(got.piece)) == (entry.index, plain(entry.piece))
    else:
        assert got == entry


@given(st.one_of(st.binary(max_size=60), st.tuples(places, entries).map(lambda pair: encode_entry(*pair)[:-1])))
def test_rubbish_is_refused_with_its_place(data: bytes) -> None:
    try:
        decode_entry(data, "here")
    except JournalError as error:
        assert str(error).startswith("here")  # noqa: PT017 - what decodes by chance is as good


@given(st.lists(st.tuples(st.sampled_from([A, B]), entries), max_size=40))
def test_what_is_kept_of_a_seat_are_the_first_pieces_of_its_newest_attempt(history: list[tuple[Place, Entry]]) -> None:
    kept = fold(iter(history))
    for place in (A, B):
        mine = [entry for at, entry in history if at == place]
        begins = [number for number, entry in enumerate(mine) if isinstance(entry, (Began, Over))]
        if not begins or isinstance(mine[begins[-1]], Over):
            assert place not in kept
            continue
        assert kept[place].began == mine[begins[-1]]
        after = [entry for entry in mine[begins[-1] :] if isinstance(entry, Got)]
        expected: list[Any] = []
        for entry in after:
            if entry.index == len(expected):
                expected.append(plain(entry.piece))
        assert [plain(piece) for piece in kept[place].pieces] == expected


def test_a_process_that_dies_leaves_what_was_recorded_and_how_much_was_asked_for(tmp_path: Path) -> None:
    log = open_log(tmp_path / "progress.log")
    recording = log.begin(A, 0, HELD)
    recording.add(shown(1, 2))
    recording.asked(16)
    recording.add(sampled(3, 4))
    recording.asked(20)
    log.begin(B, 0, HELD).add(shown(9))
    log.end(B)

    (found,) = ProgressLog(tmp_path / "progress.log").found.values()
    assert (found.began.attempt, found.num_tokens, found.num_asked) == (0, 2, 20)
    assert [plain(piece) for piece in found.pieces] == [plain(shown(1, 2)), plain(sampled(3, 4))]


def test_a_continued_attempt_records_on_and_survives_the_next_death_whole(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    recording = log.begin(A, 0, HELD)
    recording.add(shown(1))
    recording.add(sampled(2))
    log.close()

    log = open_log(path)
    recording = log.begin(A, 1, HeldVersion(incarnation="second", policy_version=9))
    assert [plain(piece) for piece in recording.restored] == [plain(shown(1)), plain(sampled(2))]
    assert recording.held == HELD, "no token is older than what the first attempt's engines held"
    recording.add(sampled(3, version=9, ends="stop"))
    log.close()

    assert tokens_of(path)[A] == [plain(shown(1)), plain(sampled(2)), plain(sampled(3, version=9, ends="stop"))]


def test_only_what_is_continued_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    for place in (A, B):
        log.begin(place, 0, HELD).add(sampled(1))
    log.close()
    log = ProgressLog(path)
    log.start({A: log.found[A]})
    assert set(read_progress(path)) == {A}
    assert log.begin(B, 1, HELD).restored == ()


def test_what_comes_after_the_end_of_an_attempt_is_not_taken(tmp_path: Path) -> None:
    """B40: an agent loop that swallowed its cancellation goes on beside the next attempt."""
    path = tmp_path / "progress.log"
    log = open_log(path)
    late = log.begin(A, 0, HELD)
    late.add(shown(1))
    now = log.begin(A, 1, HELD)
    late.add(sampled(2))
    late.asked(5)
    late.spoil()
    now.add(shown(3))
    assert tokens_of(path) == {A: [plain(shown(3))]}
    log.close()
    now.add(shown(4))
    assert tokens_of(path) == {A: [plain(shown(3))]}


def test_spoiled_attempt_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    recording = log.begin(A, 0, HELD)
    recording.add(sampled(1))
    recording.spoil()
    recording.add(sampled(2))
    assert tokens_of(path) == {}


@pytest.mark.parametrize("where", ["beginning", "middle", "end"])
def test_damage_costs_progress_and_nothing_else(tmp_path: Path, where: str) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    for number in range(20):
        log.begin((f"g{number}", 0), 0, HELD).add(sampled(*range(10)))
    log.close()
    data = bytearray(path.read_bytes())
    at = {"beginning": 3, "middle": len(data) // 2, "end": len(data) - 3}[where]
    data[at] ^= 0xFF
    path.write_bytes(data)

    log = ProgressLog(path)
    whole = sum(bool(progress.pieces) for progress in log.found.values())
    assert {"beginning": whole == 0, "middle": 0 < whole < 20, "end": whole == 19}[where]
    log.start(log.found)
    log.begin(A, 0, HELD).add(sampled(1))
    log.close()
    assert len(read_progress(path)) == len(log.found) + 1


def test_the_file_is_written_anew_when_most_of_it_is_of_ended_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_BYTES", 4096)
    path = tmp_path / "progress.log"
    log = open_log(path)
    long = log.begin(A, 0, HELD)
    long.add(shown(1))
    largest = 0
    for number in range(200):
        recording = log.begin((f"g{number}", 0), 0, HELD)
        recording.asked(50)
        recording.add(sampled(*range(50)))
        long.add(sampled(number))
        log.end((f"g{number}", 0))
        largest = max(largest, path.stat().st_size)
    assert largest < 60_000
    assert tokens_of(path) == {A: [plain(shown(1)), *(plain(sampled(number)) for number in range(200))]}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["progress.log"]
    log.close()
    assert len(open_log(path).begin(A, 1, HELD).restored) == 201


@given(st.lists(st.tuples(st.sampled_from([A, B, ("task#1@p", 0)]), entries), max_size=40), st.integers(0, 40))
def test_a_log_written_anew_in_portions_tells_what_the_one_before_does(history: list[tuple[Place, Entry]], begins: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        old, seats = RecordLog(Path(directory) / "old"), dict[Place, Kept]()
        rewrite: Rewrite | None = None
        done = False
        for number, (place, entry) in enumerate(history):
            if number == begins:
                rewrite = Rewrite(old, seats, Path(directory) / "new", clock=itertools.count().__next__)
            payload = encode_entry(place, entry)
            note(seats, place, entry, offset=old.append(payload), num_bytes=len(payload))
            if rewrite is not None:
                rewrite.take(place, entry, payload)
                done = rewrite.copy(0.0)
        rewrite = rewrite or Rewrite(old, seats, Path(directory) / "new")
        while not done:
            done = rewrite.copy(0.0)
        assert rewrite.seats.keys() == seats.keys()
        assert tokens_of(rewrite.log.path) == tokens_of(old.path)
        before, after = read_progress(old.path), read_progress(rewrite.log.path)
        assert {place: one.began for place, one in after.items()} == {place: one.began for place, one in before.items()}
        old.close()
        rewrite.abandon()
        assert not rewrite.log.path.exists()


async def test_the_file_is_written_anew_in_portions_while_rollouts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B160: many rollouts in flight are not held up while the file is written anew; a death meanwhile finds the one before."""
    monkeypatch.setattr(module, "COMPACT_BYTES", 50_000)
    monkeypatch.setattr(module, "PORTION_S", 0.0)
    path = tmp_path / "progress.log"
    log = open_log(path)
    recordings = [log.begin((f"g{number}", 0), 0, HELD) for number in range(20)]
    for recording in recordings:
        recording.add(sampled(*range(20)))
    for number in range(200):
        log.begin(A, number, HELD).add(sampled(*range(50)))
        if (tmp_path / "progress.new").exists():
            break
    assert tokens_of(path)[("g19", 0)] == [plain(sampled(*range(20)))]
    for turn in range(40):
        recordings[turn % 20].add(sampled(turn))
        await asyncio.sleep(0)
        assert [len(tokens_of(path)[(f"g{number}", 0)]) for number in range(20)] == [
            1 + (turn >= number) + (turn >= 20 + number) for number in range(20)
        ]
    assert not (tmp_path / "progress.new").exists()
    assert path.stat().st_size < 50_000
    log.close()


async def test_beginnings_and_ends_go_with_the_next_piece_or_at_the_end_of_the_turn(tmp_path: Path) -> None:
    """B160: five hundred rollouts that begin at once are one write; what is asked for and what came is written at once."""
    path = tmp_path / "progress.log"
    log = open_log(path)
    size = path.stat().st_size
    first = log.begin(A, 0, HELD)
    for number in range(500):
        log.begin((f"g{number}", 0), 0, HELD)
    assert path.stat().st_size == size
    first.add(shown(1))
    assert len(read_progress(path)) == 501
    assert tokens_of(path)[A] == [plain(shown(1))]
    log.end(A)
    assert A in read_progress(path)
    await asyncio.sleep(0)
    assert A not in read_progress(path)
    second = log.begin(A, 1, HELD)
    second.asked(7)
    await asyncio.sleep(0)
    assert read_progress(path)[A].num_asked == 7
    second.spoil()
    assert A not in read_progress(path)
    log.begin(A, 2, HELD)
    log.close()
    assert read_progress(path)[A].began.attempt == 2
    await asyncio.sleep(0)


async def test_replies_that_come_together_are_written_together_before_anything_follows(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    recordings = [log.begin((f"g{number}", 0), 0, HELD) for number in range(300)]
    found: list[int] = []

    async def go_on(recording: Recording) -> None:
        await recording.add_sampled(sampled(1))
        found.append(sum(len(pieces) for pieces in tokens_of(path).values()))

    await asyncio.gather(*(go_on(recording) for recording in recordings))
    assert found == [300] * 300
    cut_off = asyncio.create_task(recordings[0].add_sampled(sampled(1)))
    await asyncio.sleep(0)
    cut_off.cancel()
    await asyncio.gather(cut_off, return_exceptions=True)
    log.close()
    assert len(tokens_of(path)["g0", 0]) == 2


def test_a_death_while_the_file_is_written_anew_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    log = open_log(path)
    log.begin(A, 0, HELD).add(sampled(1))
    log.close()
    (tmp_path / "progress.new").write_bytes(b"HDRLOG1\nhalf of")
    assert tokens_of(path) == {A: [plain(sampled(1))]}
    log = open_log(path)
    assert log.begin(A, 1, HELD).restored
    assert not (tmp_path / "progress.new").exists()


def test_full_disk_costs_what_could_not_be_written_and_what_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.log"
    write, is_full = os.pwritev, False

    def pwritev(descriptor: int, parts: Any, at: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, parts, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    log = open_log(path)
    recording = log.begin(A, 0, HELD)
    recording.add(shown(1))
    is_full = True
    recording.add(sampled(2))
    is_full = False
    recording.add(sampled(3))
    other = log.begin(B, 0, HELD)
    other.add(sampled(4))
    assert tokens_of(path) == {A: [plain(shown(1))], B: [plain(sampled(4))]}


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = ProgressLog(tmp_path / "file" / "progress.log")
    log.start({})
    recording = log.begin(A, 0, HELD)
    recording.add(shown(1))
    log.end(A)
    log.close()
    assert recording.is_over
