"""How far the rollouts in flight have come: `RUN_DIR/journal/RUN_ID/progress.log`, so that a process after this one continues
them.

Invariant: what is continued of a seat is a beginning of what its attempt recorded, whole pieces in order. The log is worth
nothing but that: when it is damaged or cannot be written, rollouts lose progress and nothing else. It is written anew, under
another name that then takes its place, when most of it tells of rollouts that have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from agent_loop.progress import Piece, Sampled, num_sampled
from rollouter.admission import HeldVersion
from rollouter.progress_records import Asked, Began, Entry, Got, Over, Place, decode_entry, encode_entry
from rollouter.progress_rewrite import Kept, Rewrite, note
from sample_bus.errors import JournalError
from sample_bus.record_log import RecordLog, read_records

log = structlog.get_logger()

PROGRESS_FILE = "progress.log"
PORTION_S = 0.005
"""Of copying in one turn of the event loop."""
COMPACT_BYTES = 1 << 20
"""Of ended rollouts, below which the log is left as it is."""
NOTICE_S = 10.0


@dataclass(slots=True, kw_only=True)
class Progress:
    """What is known of one seat's attempt."""

    began: Began
    pieces: list[Piece] = field(default_factory=list)
    num_asked: int = 0
    """Tokens that were being generated when nothing more was recorded, at most."""

    @property
    def num_tokens(self) -> int:
        """Sampled ones."""
        return num_sampled(self.pieces)


def fold(entries: Iterator[tuple[Place, Entry]]) -> dict[Place, Progress]:
    """Where each seat stands that has not ended. A piece out of order and what follows it does not count."""
    seats: dict[Place, Progress] = {}
    for place, entry in entries:
        match entry:
            case Began():
                seats[place] = Progress(began=entry)
            case Over():
                seats.pop(place, None)
            case Asked() if place in seats:
                seats[place].num_asked = entry.num_tokens
            case Got() if place in seats and entry.index == len(seats[place].pieces):
                seats[place].pieces.append(entry.piece)
                seats[place].num_asked = 0
            case _:
                pass
    return seats


def read_progress(path: Path) -> dict[Place, Progress]:
    """What stands in the log; of a damaged one what stands before the damage, which is logged."""

    def entries() -> Iterator[tuple[Place, Entry]]:
        try:
            for offset, payload in read_records(path):
                yield decode_entry(payload, f"{path} at byte {offset}")
        except JournalError as error:
            log.warning("progress log is damaged: some rollouts lose what they had", error=str(error))

    return fold(entries()) if path.exists() else {}


class ProgressLog:
    """The log of one run; belongs to the event loop."""

    def __init__(self, path: Path) -> None:
        """Read what the process before left; blocking, nothing is written."""
        self.path = path
        self.found = read_progress(path)
        """By seat; those that are continued are taken out."""
        self._log: RecordLog | None = None
        self._kept: dict[Place, Kept] = {}
        self._rewrite: Rewrite | None = None
        self._open: dict[Place, Recording] = {}
        self._put_off: list[tuple[Place, Entry]] = []
        self._flushed: asyncio.Future[None] | None = None
        """Done when what is put off was written, if somebody waits for it."""
        self._noticed_at = -NOTICE_S

    def start(self, continued: Mapping[Place, Progress]) -> None:
        """Write the log anew with what is continued of it, and go on writing; blocking."""
        self.found = dict(continued)
        fresh = self.path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            self._log = RecordLog(fresh)
            for place, progress in continued.items():
                self._append(place, progress.began)
                for index, piece in enumerate(progress.pieces):
                    self._append(place, Got(index=index, piece=piece))
            _take_name(self._log, self.path)
        except (OSError, JournalError) as error:
            self._fail(error)

    def begin(self, place: Place, attempt: int, held: HeldVersion) -> Recording:
        """The recording of a seat's attempt: of one that is continued if there is something to continue."""
        self.end(place)
        before = self.found.pop(place, None)
        if before is None:
            began = Began(attempt=attempt, incarnation=held.incarnation, policy_version=held.policy_version)
            self._put_by(place, began)
            recording = Recording(self, place, began=began, restored=())
        else:
            recording = Recording(self, place, began=before.began, restored=tuple(before.pieces))
        self._open[place] = recording
        return recording

    def end(self, place: Place) -> None:
        """Nothing more of what was begun at `place` counts."""
        recording = self._open.pop(place, None)
        if recording is not None:
            recording.is_over = True
            self._put_by(place, Over())
            self._compact()

    def write(self, place: Place, entry: Entry) -> None:
        """It survives this process once this returns, and so does all that was begun and ended before."""
        self._append(place, entry)

    def write_soon(self, place: Place, entry: Entry) -> None:
        """It is written with the next one, or at the end of this turn of the event loop."""
        self._put_by(place, entry)

    async def written(self) -> None:
        """Return once what was put off so far survives this process, as far as it can be recorded at all."""
        if self._put_off:
            self._flushed = self._flushed or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._flushed)

    def flush(self) -> None:
        """Write what was put off, which goes with the next entry that is not, or at the end of this turn of the event loop: all
        of it at once. A death in between finds an attempt that had nothing, one that the journal knows to be over, or a reply
        as if it had not come."""
        flushed, self._flushed = self._flushed, None
        try:
            self._flush()
        finally:
            if flushed is not None and not flushed.done():
                flushed.set_result(None)

    def _flush(self) -> None:
        entries, self._put_off = self._put_off, []
        if self._log is None or not entries:
            return
        payloads = [encode_entry(place, entry) for place, entry in entries]
        try:
            offsets = self._log.append_all(payloads)
        except OSError as error:
            for seats in (self._kept, self._rewrite.seats if self._rewrite is not None else {}):
                for place, entry in entries:
                    if isinstance(entry, Over):
                        seats.pop(place, None)
            self._fail(error)
            return
        for (place, entry), payload, offset in zip(entries, payloads, offsets, strict=True):
            note(self._kept, place, entry, offset=offset, num_bytes=len(payload))
        if self._rewrite is not None:
            try:
                for (place, entry), payload in zip(entries, payloads, strict=True):
                    self._rewrite.take(place, entry, payload)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write nothing any more; what was begun may be continued by the next process."""
        self.flush()
        for recording in self._open.values():
            recording.is_over = True
        self._open.clear()
        if self._rewrite is not None:
            self._rewrite.abandon()
            self._rewrite = None
        if self._log is not None:
            self._log.close()
            self._log = None

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, place: Place, entry: Entry) -> None:
        """Write the entry, with those that were put off before."""
        self._put_off.append((place, entry))
        self.flush()

    def _put_by(self, place: Place, entry: Entry) -> None:
        """Write the entry with the next one, or at the end of this turn of the event loop."""
        if not self._put_off:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # no loop runs: nothing else would write it
                self._append(place, entry)
                return
        self._put_off.append((place, entry))

    def _compact(self) -> None:
        if self._log is None or self._rewrite is not None or self._log.num_bytes < COMPACT_BYTES:
            return
        wanted = sum(kept.num_bytes for kept in self._kept.values())
        if self._log.num_bytes - wanted < max(COMPACT_BYTES, wanted):
            return
        try:
            self._rewrite = Rewrite(self._log, self._kept, self.path.with_suffix(".new"))
        except (OSError, JournalError) as error:
            self._fail(error)
        else:
            self._copy()

    def _copy(self) -> None:
        """A portion of what is to be copied; the next one follows in the loop's next turn."""
        if self._rewrite is None or self._log is None:
            return
        try:
            if not self._rewrite.copy(PORTION_S):
                asyncio.get_running_loop().call_soon(self._copy)
                return
            _take_name(self._rewrite.log, self.path)
        except (OSError, JournalError) as error:
            self._give_up(error)
        else:
            self._log.close()
            self._log, self._kept, self._rewrite = self._rewrite.log, self._rewrite.seats, None

    def _give_up(self, error: Exception) -> None:
        """The log stays as it is."""
        assert self._rewrite is not None, "nothing is written anew"
        self._rewrite.abandon()
        self._rewrite = None
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Progress is lost if this process dies now; the rollouts go on."""
        if time.monotonic() - self._noticed_at >= NOTICE_S:
            self._noticed_at = time.monotonic()
            log.warning("progress of rollouts cannot be recorded", path=str(self.path), error=str(error))


def _take_name(log: RecordLog, path: Path) -> None:
    log.path.replace(path)
    log.path = path


class Recording:
    """`agent_loop.progress.Recorder` of one attempt."""

    def __init__(self, progress: ProgressLog, place: Place, *, began: Began, restored: tuple[Piece, ...]) -> None:
        self._progress = progress
        self._place = place
        self._began = began
        self._num_pieces = len(restored)
        self.restored = restored
        """Pieces that it goes on from."""
        self.is_over = False
        """Nothing is taken any more."""

    @property
    def held(self) -> HeldVersion:
        """What the engines held when the first of the attempts that continue each other began: no token of it is older."""
        return HeldVersion(incarnation=self._began.incarnation, policy_version=self._began.policy_version)

    def asked(self, num_tokens: int) -> None:
        if not self.is_over:
            self._progress.write_soon(self._place, Asked(num_tokens=num_tokens))

    def add(self, piece: Piece) -> None:
        if not self.is_over:
            self._progress.write(self._place, Got(index=self._num_pieces, piece=piece))
            self._num_pieces += 1

    async def add_sampled(self, piece: Sampled) -> None:
        if not self.is_over:
            self._progress.write_soon(self._place, Got(index=self._num_pieces, piece=piece))
            self._num_pieces += 1
            await self._progress.written()

    def spoil(self) -> None:
        if not self.is_over:
            self._progress.end(self._place)
            self._progress.flush()  # before what cannot be played again
