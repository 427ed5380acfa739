"""`headrace ledger`: whether the books of a run close, and one rollout's story. From the run's directory alone."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from configs.errors import ConfigError
from console.errors import NoRun
from console.journals import Journals
from console.run_dirs import goes_on
from console.story import Event, Story, matching
from sample_bus.books import Books, Place, Reading
from sample_bus.issued import Rollout
from sample_bus.ledger import by_reason
from sample_bus.settlements import LOST_WITH_TRAINER, PRODUCER_LOST

_TOLD = 16
"""Rollouts told in full; of more, a line each."""
_LISTED = 200
_QUICK_BYTES = 64 << 20
"""Of journals that are read for a summary: some 300,000 samples, in about ten seconds."""


def ledger(run_dir: Path, *, as_json: bool, sample: str | None) -> int:
    """Print the books of the newest run in `run_dir`, or the story of the rollouts that `sample` names.

    Returns 1 if the books do not close. Raises NoRun, JournalError.
    """
    if sample is not None and not sample.strip():
        raise NoRun("--sample: got nothing, expected GROUP/SEAT, a group, a beginning of one, or PRODUCER/EPOCH/SEQ")
    journals = Journals.of(run_dir)
    reading = journals.read()
    if sample is not None:
        return _tell(journals, reading, sample, as_json=as_json)
    books = reading.books()
    if as_json:
        _write_json(books_as_json(journals, books))
    else:
        sys.stdout.write("\n".join([books_as_text(journals, books), *_names_some(reading, books)]) + "\n")
    return 0 if books.closes else 1


def books_line(run_dir: Path) -> str | None:
    """The identity of the newest run in `run_dir` in one line, and a line for each problem; None if it has no journals, or so
    long ones that reading them would keep whoever waits for a summary. Raises JournalError."""
    try:
        journals = Journals.of(run_dir)
    except NoRun:
        return None
    if not 0 < journals.num_bytes <= _QUICK_BYTES:
        return None
    books = journals.read().books()
    return books.line() + "".join(f"\n{problem}" for problem in books.problems)


def books_as_text(journals: Journals, books: Books) -> str:
    rows = [
        ("run", f"{journals.run_dir}, id {journals.run_id}"),
        ("trainer", _trainer(journals.run_dir, books)),
        ("issued", f"{books.issued} rollouts"),
        ("trained", f"{books.trained} by {books.step} steps, newest version {books.policy_version}"),
        ("dropped", by_reason(books.dropped, "by the trainer")),
        ("failed", by_reason(books.failed, "given up by the rollouter")),
        ("queued", f"{books.queued} with the trainer"),
        (books.way, f"{books.on_the_way} kept by the rollouter's side"),
        ("in flight", f"{books.in_flight}"),
        ("restarts", _restarts(books)),
    ]
    if books.lost:
        rows.insert(-1, ("LOST", f"{books.lost}"))
    if books.spare_records:
        rows.append(("spare records", f"{books.spare_records} beside the one that decided (late, refused, lost)"))
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{label:<{width}}{text}" for label, text in rows]
    lines += ["", books.line(), *_verdict(books)]
    return "\n".join(lines)


def books_as_json(journals: Journals, books: Books) -> dict[str, Any]:
    return {
        "run_dir": str(journals.run_dir),
        "run_id": journals.run_id,
        **asdict(books),
        "closes": books.closes,
        "line": books.line(),
    }


def _trainer(run_dir: Path, books: Books) -> str:
    if books.end is not None:
        return f"ended, {books.end}"
    if not books.trainers:
        return "has not begun"
    try:
        return "goes on" if goes_on(run_dir) else "does not answer, and has not said that it ended"
    except ConfigError as error:
        return f"has not said that it ended ({error})"


def _restarts(books: Books) -> str:
    text = f"trainer {max(0, books.trainers - 1)}, rollouter {max(0, books.rollouters - 1)}"
    if books.rolled_back:
        text += f"; the training of {books.rolled_back} samples went with a trainer, those that were kept came again"
    return text


def _names_some(reading: Reading, books: Books) -> Iterator[str]:
    """Ids that can be copied."""
    issued = reading.issued
    admitted = ((group_id, seat) for group_id, size in issued.sizes.items() for seat in range(size))
    handed = list(reversed(issued.handed))
    looked_for: list[tuple[str, Place, object, Iterable[Rollout]]] = [
        ("the oldest in flight", Place.IN_FLIGHT, books.in_flight, admitted),
        ("the last trained", Place.TRAINED, books.trained, handed),
        ("the last given up", Place.FAILED, books.failed, handed),
    ]
    named = [
        (what, next((one for one in rollouts if reading.place(one)[0] is place), None))
        for what, place, count, rollouts in looked_for
        if count
    ]
    if named:
        yield ""
        yield "one rollout's story: headrace ledger --sample ID, where ID is"
    for what, rollout in named:
        if rollout is not None:
            yield f"  {shlex.quote(_name(rollout))}  ({what})"


def _verdict(books: Books) -> list[str]:
    if books.closes:
        return _closing_words(books)
    more = books.num_problems - len(books.problems)
    lines = ["the ledger DOES NOT CLOSE:", *(f"- {problem}" for problem in books.problems)]
    return [*lines, f"- and {more} more"] if more > 0 else lines


def _closing_words(books: Books) -> list[str]:
    lost = {reason: books.dropped[reason] for reason in (LOST_WITH_TRAINER, PRODUCER_LOST) if books.dropped.get(reason)}
    uncertain = books.on_the_way if books.way != "on the way" else 0
    if not lost and not uncertain:
        return ["the ledger closes: no rollout is lost, none was trained twice"]
    lines = ["the ledger closes: every rollout is accounted for, none was trained twice"]
    if lost.get(LOST_WITH_TRAINER):
        lines.append(
            f"- {lost[LOST_WITH_TRAINER]} samples were lost with the checkpoint, or the trainer, that held their effect"
        )
    if lost.get(PRODUCER_LOST):
        lines.append(f"- {lost[PRODUCER_LOST]} samples were lost with the copies of their producer")
    if uncertain:
        lines.append(f"- {uncertain} samples were offered and not taken: only the broker can tell whether they still lie there")
    return lines


# ── one rollout ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _tell(journals: Journals, reading: Reading, wanted: str, *, as_json: bool) -> int:
    rollouts = matching(wanted, reading.issued, reading.settlements)
    if not rollouts:
        raise NoRun(
            f"{wanted}: no rollout of run {journals.run_id} has this id (GROUP/SEAT, a group, a beginning of one, or "
            "PRODUCER/EPOCH/SEQ)"
        )
    if as_json:
        _write_json([_story_as_json(journals, reading, rollout) for rollout in rollouts[:_LISTED]])
    elif len(rollouts) > _TOLD:
        sys.stdout.writelines(f"{_name(rollout)}  {_where(reading, rollout)}\n" for rollout in rollouts[:_LISTED])
        sys.stdout.write(f"{len(rollouts)} rollouts; name one to hear its story\n")
    else:
        sys.stdout.write("\n\n".join("\n".join(_story_as_text(journals, reading, one)) for one in rollouts) + "\n")
    return 0


def _story_as_text(journals: Journals, reading: Reading, rollout: Rollout) -> Iterator[str]:
    yield f"rollout {_name(rollout)}: {_where(reading, rollout)}"
    for event in _events(journals, reading, rollout):
        when = datetime.fromtimestamp(event.at, tz=UTC).astimezone()
        yield f"  {when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}  {event.who:<9}  {event.text}"


def _story_as_json(journals: Journals, reading: Reading, rollout: Rollout) -> dict[str, Any]:
    place, reason = reading.place(rollout)
    return {
        "rollout_id": _name(rollout),
        "group_id": rollout[0],
        "seat": rollout[1],
        "place": place,
        "reason": reason,
        "records": [list(record.id) for record in reading.records.get(rollout, ())],
        "events": [asdict(event) for event in _events(journals, reading, rollout)],
    }


def _events(journals: Journals, reading: Reading, rollout: Rollout) -> list[Event]:
    ids = frozenset(record.id for record in reading.records.get(rollout, ()))
    return Story(rollout, ids).tell(journals.rollouter(), journals.trainer())


def _where(reading: Reading, rollout: Rollout) -> str:
    place, reason = reading.place(rollout)
    return f"{place.upper() if place is Place.LOST else place} ({reason})" if reason else str(place)


def _name(rollout: Rollout) -> str:
    return f"{rollout[0]}/{rollout[1]}"


def _write_json(value: Any) -> None:
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode() + "\n")
