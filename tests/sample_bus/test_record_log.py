from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.record_log import HEAD_BYTES, MAGIC, RecordLog, read_records


def written(path: Path, payloads: list[bytes]) -> list[int]:
    log = RecordLog(path)
    offsets = [log.append(payload) for payload in payloads]
    log.close()
    return offsets


def payloads_of(path: Path) -> list[bytes]:
    return [payload for _, payload in read_records(path)]


def test_records_come_back_in_order_and_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log"
    payloads = [b"", b"a", bytes(100_000), b"last"]
    offsets = written(path, payloads)
    assert payloads_of(path) == payloads
    log = RecordLog(path)
    assert [log.read(offset) for offset in offsets] == payloads
    log.append(b"in ", b"parts")
    log.close()
    assert payloads_of(path)[-1] == b"in parts"


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8), st.integers(1, 400))
def test_log_that_is_cut_anywhere_keeps_the_whole_records_before(payloads: list[bytes], cut: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        ends = [offset + HEAD_BYTES + len(one) for offset, one in zip(written(path, payloads), payloads, strict=True)]
        size = max(0, path.stat().st_size - cut)
        os.truncate(path, size)
        kept = payloads[: sum(end <= size for end in ends)]
        assert payloads_of(path) == kept if size else True
        log = RecordLog(path)
        log.append(b"next")
        log.close()
        assert payloads_of(path) == [*kept, b"next"]


@pytest.mark.parametrize("tail", [b"x", b"\x00" * 500, os.urandom(300), b"\xf0rec", b"\xf0rec\xff\xff\xff\xff" + bytes(40)])
def test_garbage_at_the_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log"
    written(path, [b"one", b"two"])
    with path.open("ab") as file:
        file.write(tail)
    assert payloads_of(path) == [b"one", b"two"]
    written(path, [b"three"])
    assert payloads_of(path) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("where", range(HEAD_BYTES + 3))
def test_damage_before_the_last_record_is_never_taken_for_a_torn_tail(tmp_path: Path, where: int) -> None:
    path = tmp_path / "log"
    offsets = written(path, [b"one", b"two", b"three"])
    data = bytearray(path.read_bytes())
    data[offsets[1] + where] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(JournalDamaged, match=rf"byte {offsets[1]} is damaged"):
        payloads_of(path)
    with pytest.raises(JournalDamaged, match=str(path)):
        RecordLog(path)
    assert path.read_bytes() == data, "nothing was cut"


def test_write_that_fails_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log = RecordLog(path)
    log.append(b"before")
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: whole(file, [parts[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        log.append(b"does not fit")
    monkeypatch.undo()
    log.append(b"after")
    log.close()
    assert payloads_of(path) == [b"before", b"after"]


def test_what_is_no_log_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, this is no log")
    with pytest.raises(JournalError, match=r"notes\.txt: got b'dear dia'"):
        RecordLog(path)
    assert path.read_text().startswith("dear diary")
    with pytest.raises(JournalError, match="cannot be opened"):
        RecordLog(tmp_path)


def test_empty_file_becomes_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(MAGIC[:3])
    written(path, [b"one"])
    assert payloads_of(path) == [b"one"]


def test_log_that_is_used_again_is_read_while_it_is_written(tmp_path: Path) -> None:
    """What a reader has in its buffer may be of the earlier use by now."""
    log = RecordLog(tmp_path / "old")
    for number in range(50):
        log.append(b"%03d" % number * 100)
    log.renew(tmp_path / "new")
    log.append(b"first")
    reader = read_records(tmp_path / "new")
    assert next(reader)[1] == b"first"
    log.append(b"second")
    log.append(b"third")
    assert [payload for _, payload in reader] == [b"second", b"third"]
    log.close()


@given(st.lists(st.binary(max_size=40), max_size=700))
@settings(max_examples=30)
def test_records_written_together_stand_as_those_written_one_by_one(payloads: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        together, apart = RecordLog(Path(directory) / "together"), RecordLog(Path(directory) / "apart")
        assert together.append_all(payloads) == [apart.append(payload) for payload in payloads]
        assert together.append(b"next") == apart.append(b"next")
        assert together.path.read_bytes() == apart.path.read_bytes()
        together.close()
        apart.close()
