"""The journal of live settings: a record for each revision, in a file of its own beside the trainer's journal.

Invariant: a revision whose `write` returned is on the disk itself and is read again by every later process of the run.
"""

from __future__ import annotations

from pathlib import Path

from sample_bus.errors import JournalError, WireError
from sample_bus.messages import SettingChange, SettingsHistory
from sample_bus.record_log import RecordLog, read_records
from sample_bus.topics import decode_body, encode_body

SETTINGS_FILE = "settings.log"


class SettingsLog:
    """Open for writing by the one trainer of the run."""

    def __init__(self, path: Path) -> None:
        """Open or make it; a torn tail is cut off. Raises JournalError, JournalDamaged."""
        self._log = RecordLog(path)

    @property
    def path(self) -> Path:
        return self._log.path

    def write(self, changes: tuple[SettingChange, ...]) -> None:
        """Keep the changes of one revision. Raises JournalError; nothing is kept then."""
        try:
            self._log.append(encode_body(SettingsHistory(changes=changes)))
            self._log.sync()
        except OSError as error:
            raise JournalError(f"{self._log.path}: cannot be written: {error.strerror or error}") from error

    def read(self) -> tuple[SettingChange, ...]:
        """Every change, oldest first. Raises JournalError, JournalDamaged."""
        return read_settings_log(self._log.path)

    def close(self) -> None:
        self._log.close()


def read_settings_log(path: Path) -> tuple[SettingChange, ...]:
    """Every change, oldest first; none if there is no such file. It may be in use. Raises JournalError, JournalDamaged."""
    if not path.exists():
        return ()
    changes: list[SettingChange] = []
    for offset, payload in read_records(path):
        try:
            changes += decode_body(payload, SettingsHistory, f"{path} at byte {offset}").changes
        except WireError as error:
            raise JournalError(str(error)) from error
    return tuple(changes)
