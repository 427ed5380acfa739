"""The journal of live settings keeps whole revisions, whatever happens to its last record."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.messages import SettingChange
from sample_bus.record_log import RecordLog
from sample_bus.settings_log import SettingsLog, read_settings_log


def _change(revision: int, key: str = "staleness_threshold", new: object = 1.0) -> SettingChange:
    return SettingChange(
        revision=revision,
        key=key,
        old=None,
        new=new,
        author="ann",
        changed_at=1.5,
        scope="next step",
        holds_from="step 3",
    )


def test_changes_come_back_in_order_with_everything_that_was_said_of_them(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "settings.log"
    assert read_settings_log(path) == ()
    written = [(_change(1), _change(1, "on_stale", "retry")), (_change(2, "max_staleness", None),)]
    log = SettingsLog(path)
    for changes in written:
        log.write(changes)
    assert read_settings_log(path) == log.read() == (*written[0], *written[1])
    log.close()
    again = SettingsLog(path)
    again.write((_change(3),))
    again.close()
    assert [change.revision for change in read_settings_log(path)] == [1, 1, 2, 3]


@given(st.integers(1, 400))
def test_a_log_cut_anywhere_keeps_whole_revisions(cut: int) -> None:
    """A death while a change is written: all of it is there or none of it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "settings.log"
        log = SettingsLog(path)
        for revision in (1, 2, 3):
            log.write((_change(revision), _change(revision, "on_stale", "wait")))
        log.close()
        os.truncate(path, max(0, path.stat().st_size - cut))
        kept = [change.revision for change in SettingsLog(path).read()]
        assert kept in ([], [1, 1], [1, 1, 2, 2])


def test_damage_in_the_middle_is_told_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "settings.log"
    log = SettingsLog(path)
    for revision in (1, 2):
        log.write((_change(revision),))
    log.close()
    content = bytearray(path.read_bytes())
    content[40] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match=r"settings\.log"):
        SettingsLog(path)


def test_a_record_of_something_else_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "settings.log"
    other = RecordLog(path)
    other.append(b"\x01")
    other.close()
    with pytest.raises(JournalError, match=r"settings\.log at byte 8"):
        read_settings_log(path)


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    log = SettingsLog(tmp_path / "settings.log")
    log.close()
    with pytest.raises(JournalError, match="cannot be written"):
        log.write((_change(1),))
