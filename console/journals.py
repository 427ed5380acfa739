"""Reading the books of a run from its directory: both journals and what the producers keep.

Invariant: nothing is written, and a run that goes on may be read at any moment (`sample_bus.books` says in which order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from configs.command import SETTINGS_FILE
from configs.errors import ConfigError
from configs.loader import load
from console.errors import NoRun
from console.run_dirs import RUN_ID_FILE
from sample_bus.books import Copies, Reading
from sample_bus.errors import JournalDamaged, JournalError
from sample_bus.issued import Issued
from sample_bus.journal import (
    ROLLOUTER_FILE,
    TRAINER_FILE,
    RollouterRecord,
    TrainerRecord,
    journal_dir,
    read_journal,
)
from sample_bus.quarantine import RejectedMessage, rejected_messages
from sample_bus.sample import SampleId
from sample_bus.settlements import Settlements
from sample_bus.spool import Kept, kept

QUARANTINE = "quarantine"
_SPOOL = "spool"
_TRIES = 5
_TRAINER_KINDS = get_args(TrainerRecord)
_ROLLOUTER_KINDS = get_args(RollouterRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journals:
    """Where a run's journals and copies lie."""

    run_dir: Path
    run_id: str

    @classmethod
    def of(cls, run_dir: Path) -> Journals:
        """Of the newest run in `run_dir`. Raises NoRun."""
        try:
            run_id = (run_dir / RUN_ID_FILE).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise NoRun(f"{run_dir}: no run has kept books here ({RUN_ID_FILE}: {error.strerror or error})") from None
        return cls(run_dir=run_dir, run_id=run_id)

    @property
    def directory(self) -> Path:
        return journal_dir(self.run_dir, self.run_id)

    @property
    def num_bytes(self) -> int:
        """Of both journals."""
        paths = (self.directory / name for name in (TRAINER_FILE, ROLLOUTER_FILE))
        return sum(path.stat().st_size for path in paths if path.exists())

    @property
    def spool_dir(self) -> Path:
        return self.run_dir / _SPOOL / self.run_id

    def trainer(self) -> Iterator[TrainerRecord]:
        """Raises JournalError."""
        for record in read_journal(self.directory / TRAINER_FILE):
            if isinstance(record, _TRAINER_KINDS):
                yield record

    def rollouter(self) -> Iterator[RollouterRecord]:
        """Raises JournalError."""
        for record in read_journal(self.directory / ROLLOUTER_FILE):
            if isinstance(record, _ROLLOUTER_KINDS):
                yield record

    def read(self) -> Reading:
        """The books as they stand now. Raises NoRun when there are no journals of that id, JournalError, JournalDamaged."""
        if not self.directory.is_dir():
            raise NoRun(f"{self.run_dir / RUN_ID_FILE}: got {self.run_id[:40]!r}, and there is no {self.directory}")
        before = self.copies()
        settlements = Settlements(self.trainer())
        issued = Issued.of(self.rollouter())
        after = self.copies()
        return Reading(issued, settlements, copies=_both(before, after), rejected=self.rejected())

    def copies(self) -> list[Copies] | None:
        """What the producers keep here; None if they keep it elsewhere. Raises JournalError."""
        if not self._keeps_a_spool():
            return None
        found = []
        for directory in sorted(self.spool_dir.iterdir()) if self.spool_dir.is_dir() else ():
            holds = _kept(directory)
            if holds is not None:
                found.append(Copies(producer=directory.name, epoch=holds.epoch, first=holds.first, next_seq=holds.next_seq))
        return found

    def spool_bytes(self) -> int | None:
        """Size of the producers' copies on this disk; None if they keep them elsewhere."""
        if not self._keeps_a_spool():
            return None
        sizes = []
        for path in self.spool_dir.rglob("*.log"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # committed in between
                continue
        return sum(sizes)

    def rejected(self) -> set[SampleId]:
        """Records that the trainer's end could not decode, as far as they are kept."""
        messages = rejected_messages(self.run_dir / QUARANTINE)
        return {one.id for one in messages if isinstance(one, RejectedMessage) and one.id is not None}

    def _keeps_a_spool(self) -> bool:
        if self.spool_dir.is_dir():
            return True
        file = self.run_dir / SETTINGS_FILE
        try:
            return file.is_file() and load(file, environment={}).bus.transport == "zmq"
        except ConfigError:  # settings of another version
            return False


def _kept(directory: Path) -> Kept | None:
    """A file may be freed while it is read: then it is looked at anew."""
    for _ in range(_TRIES):
        try:
            return kept(directory)
        except JournalDamaged:
            raise
        except JournalError as error:
            problem = error
    raise problem


def _both(before: list[Copies] | None, after: list[Copies] | None) -> list[Copies] | None:
    """What was freed before the journals were read, and what was there after them."""
    if before is None or after is None:
        return after
    firsts = {(one.producer, one.epoch): one.first for one in before}
    return [replace(one, first=firsts.get((one.producer, one.epoch), one.first)) for one in after]
