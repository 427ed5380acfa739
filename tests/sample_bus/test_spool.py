from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.spool import Spool, kept


def frames_of(seq: int) -> list[bytes | memoryview]:
    return [b"head %d" % seq, bytes([seq % 251]) * (seq % 90), b""]


def fill(spool: Spool, number: int) -> None:
    for _ in range(number):
        spool.append(spool.next_seq, frames_of(spool.next_seq))


def assert_holds(spool: Spool, first: int, next_seq: int) -> None:
    assert (spool.first, spool.next_seq, len(spool.sizes())) == (first, next_seq, next_seq - first)
    for seq in range(first, next_seq):
        assert [bytes(frame) for frame in spool.read(seq)] == frames_of(seq)


def test_records_survive_their_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "p", segment_bytes=500)
    fill(spool, 40)
    epoch = spool.epoch
    spool.close()
    again = Spool(tmp_path / "p", segment_bytes=500)
    assert again.epoch == epoch
    assert_holds(again, 0, 40)
    again.close()


def test_committed_records_are_freed_file_by_file_and_stay_freed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=500)
    fill(spool, 40)
    files = len(list(tmp_path.glob("*.log")))
    spool.free(33)
    assert len(list(tmp_path.glob("*.log"))) < files
    assert_holds(spool, 33, 40)
    spool.close()
    spool = Spool(tmp_path, segment_bytes=500)
    assert_holds(spool, 33, 40)
    spool.free(1000)
    assert_holds(spool, 40, 40)
    fill(spool, 3)
    assert_holds(spool, 40, 43)
    spool.close()


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 9), st.just("free"), st.just("reopen"), st.just("tear")), max_size=30))
def test_spool_is_dense_from_the_commit_to_the_next_record_whatever_happens(steps: list[int | str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        spool = Spool(path, segment_bytes=300)
        first = next_seq = 0
        for step in steps:
            if isinstance(step, int):
                fill(spool, step)
                next_seq += step
            elif step == "free":
                first = (first + next_seq + 1) // 2
                spool.free(first)
            else:
                spool.close()
                if step == "tear":
                    newest = max(path.glob("*.log"), default=None)
                    if newest is not None:
                        with newest.open("ab") as file:
                            file.write(b"\xf0rec half a record")
                spool = Spool(path, segment_bytes=300)
            assert_holds(spool, first, next_seq)
        found = kept(path)
        assert found is not None
        assert (found.epoch, found.first, found.next_seq) == (spool.epoch, first, next_seq)
        spool.close()


def test_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(JournalError, match="another process offers samples from this spool"):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def test_record_that_does_not_fit_on_the_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    fill(spool, 2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        fill(spool, 1)
    monkeypatch.undo()
    fill(spool, 1)
    assert_holds(spool, 0, 3)
    spool.close()


def test_renewed_spool_begins_a_later_epoch_and_keeps_the_old_files(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    fill(spool, 3)
    before = spool.epoch
    spool.renew()
    assert spool.epoch > before
    fill(spool, 2)
    assert_holds(spool, 0, 2)
    spool.close()
    assert len(list(tmp_path.glob("*.superseded"))) == 1
    again = Spool(tmp_path)
    assert_holds(again, 0, 2)
    again.close()


def test_hole_between_the_files_is_named(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=200)
    fill(spool, 30)
    spool.close()
    sorted(tmp_path.glob("*.log"))[1].unlink()
    with pytest.raises(JournalDamaged, match="expected"):
        Spool(tmp_path)


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JournalError, match="file/p: the spool cannot be written"):
        Spool(tmp_path / "file" / "p")


def test_nothing_is_kept_where_there_is_no_spool(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
