"""Everything that is wrong with the data, found in one pass over it and reported by row and column.

Invariant: a row is good here exactly when a run would take it; a prompt's length is that of the ids that would go to the
engine, if a tokenizer is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from configs.schema import DataSettings
from rollouter.data.framing import Framing, PromptCodec
from rollouter.data.measure import prompt_hash
from rollouter.data.rows import Problem, Row, columns_of, read_row
from rollouter.data.sources import Rows, data_cache_dir, open_table
from rollouter.errors import DataError

_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of one row."""

    source: str
    row: int
    """From 1; 0: of the source as a whole."""
    column: str
    """Empty: of the row as a whole."""
    message: str
    is_error: bool = True
    """False: a run takes the row."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What one pass found."""

    num_rows: int = 0
    num_bad: int = 0
    num_overlong: int = 0
    num_repeated: int = 0
    """Rows whose prompt came before."""
    findings: list[Finding] = field(default_factory=list)
    num_findings: dict[tuple[str, str], int] = field(default_factory=dict)
    """By column and kind, those beyond the ones kept included."""
    data_sources: Counter[str] = field(default_factory=Counter)
    agent_names: Counter[str] = field(default_factory=Counter)
    longest_tokens: int | None = None
    """None: not measured."""
    longest_chars: int = 0

    @property
    def is_good(self) -> bool:
        """Whether a run would take the data: no row is bad, some are left, and nothing is wrong with a whole source."""
        return (
            not self.num_bad
            and self.num_rows > self.num_overlong
            and not any(one.row == 0 and one.is_error for one in self.findings)
        )

    @property
    def is_all_overlong(self) -> bool:
        """Whether rows would be left if prompts were not too long."""
        return 0 < self.num_overlong == self.num_rows - self.num_bad

    @property
    def num_findings_in_all(self) -> int:
        return sum(self.num_findings.values())

    def add(self, finding: Finding) -> None:
        """Keep it, unless many like it are kept."""
        kind = (finding.column, finding.message.split("got", 1)[0] + finding.message.rpartition("expected")[2])
        count = self.num_findings[kind] = self.num_findings.get(kind, 0) + 1
        if count <= _EXAMPLES:
            self.findings.append(finding)


def check(data: DataSettings, *, codec: PromptCodec | None = None, framing: Framing | None = None) -> Report:
    """Read every row of every source of `data`; prompts are measured by `codec`, with what `framing` puts around them.

    Raises nothing for what is wrong with them.
    """
    report = Report(longest_tokens=None if codec is None else 0)
    cache = data_cache_dir(data)
    seen = _Seen()
    measure = None if codec is None else partial((framing or Framing()).length_of, codec=codec)
    for source in data.sources:
        try:
            table = open_table(source, cache_dir=cache)
        except DataError as error:
            report.add(Finding(source=source, row=0, column="", message=str(error)))
            continue
        if not len(table):
            report.add(Finding(source=source, row=0, column="", message="no row found"))
        rows = Rows.of(data, (table,))
        for index in range(len(rows)):
            report.num_rows += 1
            for finding in _of_row(rows, index, source, report, seen, data, measure):
                report.add(finding)
    return report


def _of_row(
    rows: Rows,
    index: int,
    source: str,
    report: Report,
    seen: _Seen,
    data: DataSettings,
    measure: Callable[[Row], int] | None,
) -> Iterator[Finding]:
    where = Finding(source=source, row=_number(rows, index), column="", message="")
    try:
        raw = rows.raw(index)
    except DataError as error:
        report.num_bad += 1
        yield replace(where, message=str(error).removeprefix(f"{rows.where(index)}: "))
        return
    found = read_row(raw, rows.tables[0].default_source, rows.keys_at(index))
    if not isinstance(found, Row):
        report.num_bad += 1
        for problem in found:
            is_missing = problem.message == "the column is missing"
            columns = f" (columns found: {columns_of(raw)})" if is_missing else ""
            yield replace(where, column=problem.column, message=problem.message + columns)
        return
    report.data_sources[found.data_source] += 1
    report.agent_names[found.agent_name or "(the run's own)"] += 1
    yield from (replace(where, column=one.column, message=one.message, is_error=False) for one in _doubts(found, report, seen))
    if measure is None:
        return
    try:
        length = measure(found)
    except DataError as error:
        report.num_bad += 1
        yield replace(where, column="prompt", message=str(error))
        return
    report.longest_tokens = max(report.longest_tokens or 0, length)
    if length > data.max_prompt_tokens:
        report.num_overlong += data.on_overlong == "drop"
        report.num_bad += data.on_overlong == "error"
        yield replace(
            where,
            column="prompt",
            message=f"got {length} tokens, expected at most {data.max_prompt_tokens} (data.on_overlong={data.on_overlong})",
            is_error=data.on_overlong == "error",
        )


def _number(rows: Rows, index: int) -> int:
    """As the source numbers it."""
    _, _, number = rows.where(index).rpartition(" row ")
    return int(number)


@dataclass(slots=True)
class _Seen:
    """In the rows so far."""

    prompts: set[int] = field(default_factory=set)
    task_ids: set[str] = field(default_factory=set)


def _doubts(row: Row, report: Report, seen: _Seen) -> Iterator[Problem]:
    """What is allowed and seldom meant."""
    texts = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
    report.longest_chars = max(report.longest_chars, sum(len(text) for text in texts if isinstance(text, str)))
    if any(isinstance(text, str) and "\N{REPLACEMENT CHARACTER}" in text for text in texts):
        yield Problem(column="prompt", message="got text with U+FFFD, which a wrong decoding leaves behind")
    if any(isinstance(text, str) and "\0" in text for text in texts):
        yield Problem(column="prompt", message="got text with a NUL character")
    if not isinstance(row.prompt, str) and row.prompt[-1]["role"] == "assistant":
        yield Problem(column="prompt", message="the last message is the assistant's: its answer stands there already")
    if isinstance(row.prompt, str) and row.prompt.lstrip().startswith(('[{"role"', "[{'role'")):
        yield Problem(column="prompt", message="got text that looks like a list of messages: it is used as it stands")
    if row.ground_truth in ([], {}):
        yield Problem(
            column="ground_truth", message=f"got {row.ground_truth}, expected text or a number: it is handed over as it stands"
        )
    if row.task_id is not None and row.task_id in seen.task_ids:
        yield Problem(
            column="task_id", message=f"got {row.task_id!r} again, expected another in each row: a number is put behind it"
        )
    if row.task_id is not None:
        seen.task_ids.add(row.task_id)
    before = len(seen.prompts)
    seen.prompts.add(prompt_hash(row.prompt))
    report.num_repeated += len(seen.prompts) == before
