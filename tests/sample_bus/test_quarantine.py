"""Messages that did not decode: kept whole, bounded, and readable again."""

from __future__ import annotations

from pathlib import Path

from sample_bus.errors import WireError
from sample_bus.quarantine import Quarantine, RejectedMessage, rejected_messages
from sample_bus.sample import SampleId

ID = SampleId("rollouter", 3, 7)


def _messages(directory: Path) -> list[RejectedMessage]:
    return [one for one in rejected_messages(directory) if isinstance(one, RejectedMessage)]


def test_a_rejected_message_is_read_again_as_it_came(tmp_path: Path) -> None:
    path = Quarantine(tmp_path / "q").keep([b"a", b"\x00" * 9], "checksum: got 1, expected 2", "rollouter", sample_id=ID)
    (message,) = _messages(tmp_path / "q")
    assert message.path == path
    assert message.name == "rejected-0000"
    assert (message.error, message.source, message.id) == ("checksum: got 1, expected 2", "rollouter", ID)
    assert message.frames == (b"a", b"\x00" * 9)
    assert message.at > 0


def test_a_message_without_a_place_in_a_stream_is_kept_all_the_same(tmp_path: Path) -> None:
    Quarantine(tmp_path).keep([b"x"], "no envelope", "unknown client 00")
    assert _messages(tmp_path)[0].id is None


def test_what_does_not_fit_is_not_kept_until_there_is_room_again(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, max_files=2)
    kept = [quarantine.keep([b"x"], "e", "s") for _ in range(4)]
    assert [path is not None for path in kept] == [True, True, False, False]
    assert kept[0] is not None
    kept[0].unlink()
    assert quarantine.keep([b"y"], "e", "s") is not None
    assert len(_messages(tmp_path)) == 2
    assert Quarantine(tmp_path, max_bytes=10).keep([b"x" * 100], "e", "s") is None


def test_an_unwritable_directory_loses_nothing_but_the_copy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert Quarantine(tmp_path / "file").keep([b"x"], "e", "s") is None


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.msgpack").write_bytes(b"\xc1")
    (tmp_path / "b.msgpack").write_bytes(b"\x80")
    (tmp_path / "c.msgpack").mkdir()
    problems = list(rejected_messages(tmp_path))
    assert all(isinstance(one, WireError) for one in problems)
    assert [str(one).split(":")[0].rsplit("/", 1)[1] for one in problems] == ["a.msgpack", "b.msgpack", "c.msgpack"]
    assert list(rejected_messages(tmp_path / "nowhere")) == []
