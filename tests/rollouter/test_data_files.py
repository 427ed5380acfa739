"""Files under a run: one that is written to is noticed, one that is no such file is named, a bad row in it is nobody else's."""

from __future__ import annotations

import bz2
import dataclasses
import decimal
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataSettings
from rollouter.codec import Codec
from rollouter.data import tables
from rollouter.data.check import Report, check
from rollouter.data.encoding import Limits, Refusal
from rollouter.data.lazy import Hashed, LazyTasks
from rollouter.data.plain import half_a_pair, plain
from rollouter.data.rows import MAX_NAME_BYTES
from rollouter.data.sources import open_rows, read_all
from rollouter.errors import DataChanged, DataError
from rollouter.prompts import encode
from tests.fakes.fake_engine import FakeTokenizer

HALF = "\ud800"
CODEC = Codec(FakeTokenizer())


def _line(**more: Any) -> bytes:
    return json.dumps({"prompt": "q", "answer": "1", **more}).encode() + b"\n"


def _lazy(path: Path) -> LazyTasks:
    rows = open_rows(DataSettings(source=(str(path),)))
    return LazyTasks(rows, CODEC, Limits(max_prompt_tokens=64), Hashed(fraction=0.0, seed=1))


def _checked(path: Path, content: bytes) -> Report:
    path.write_bytes(content)
    return check(DataSettings(source=(str(path),)))


def _arrow(path: Path, prompts: list[str]) -> None:
    table = pa.table({"prompt": prompts, "answer": ["1"] * len(prompts)})
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_rows_of_a_file_that_is_edited_in_place_are_not_served(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_bytes(b"".join(_line(prompt=f"{n:06}") for n in range(500)))
    else:
        _arrow(path, [f"{n:06}" for n in range(500)])
    rows = open_rows(DataSettings(source=str(path)))
    tasks = LazyTasks(rows, CODEC, Limits(max_prompt_tokens=64), Hashed(fraction=0.0, seed=1))
    written_ns = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b"000400", b"000499"))  # as long as before
    os.utime(path, ns=(written_ns + 1, written_ns + 1))  # whatever the clock's grain is
    with pytest.raises(DataChanged, match=r"rows\.(jsonl|arrow): was changed while a run reads it: got .* bytes"):
        tasks.at(400)
    with pytest.raises(DataChanged):
        read_all(rows)


_TRUNCATED = """
import os, sys
from pathlib import Path
from tests.rollouter.test_data_files import _lazy
tasks = _lazy(Path(sys.argv[1]))
tasks.at(0)
os.truncate(sys.argv[1], 100)
try:
    tasks.at(499)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_a_file_that_becomes_shorter_ends_the_run_by_name_and_not_the_process(tmp_path: Path, form: str) -> None:
    """Reading a mapped page that is gone is SIGBUS."""
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_bytes(b"".join(_line(prompt="word " * 10) for _ in range(500)))
    else:
        _arrow(path, ["word " * 10] * 500)
    got = subprocess.run([sys.executable, "-c", _TRUNCATED, str(path)], capture_output=True, text=True, timeout=100)
    assert (got.returncode, got.stdout) == (0, "DataChanged\n"), got.stderr[-500:]


def test_a_file_that_is_replaced_by_another_is_read_on_as_it_was(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(b"".join(_line(prompt=f"{n}") for n in range(100)))
    tasks = _lazy(path)
    other.write_bytes(_line(prompt="another"))
    other.replace(path)
    found = tasks.at(99)
    assert not isinstance(found, Refusal)
    assert found.prompt_text == "99"


_SURROGATES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": HALF},
    "task_id": {"task_id": HALF},
    "data_source": {"data_source": HALF},
    "agent_name": {"agent_name": HALF},
    "answer": {"answer": ["1", {"a": HALF}]},
    "extra_info": {"extra_info": {HALF: 1}},
    "tools_kwargs": {"tools_kwargs": {"t": {"a": HALF}}},
    "role": {"prompt": [{"role": HALF, "content": "x"}]},
    "part": {"prompt": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
}
BAD_LINES = {
    "garbage": b"garbage\n",
    "integer": b'{"prompt":"q","answer":' + b"9" * 6000 + b"}\n",
    "long integer": b'{"prompt":"q","answer":' + b"9" * 4000 + b"}\n",
    "deep": b'{"prompt":"q","answer":' + b"[" * 300 + b"]" * 300 + b"}\n",
    "too deep": b'{"prompt":"q","answer":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "long id": _line(task_id="t" * (MAX_NAME_BYTES + 1)),
    "long source": _line(data_source="é" * (MAX_NAME_BYTES // 2 + 1)),
    "long agent": _line(agent_name="t" * 100_000),
    **{f"surrogate in {name}": _line(**more) for name, more in _SURROGATES.items()},
    **{f"answer {text!r}": b'{"prompt":"q","answer":' + text + b"}\n" for text in (b"NaN", b"1e999", b'" "', b"null")},
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_row_is_reported_and_left_out_and_refused_at_the_start(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    report = _checked(path, _line() + BAD_LINES[bad] + _line())
    assert (report.num_rows, report.num_bad) == (3, 1)
    assert [finding.row for finding in report.findings] == [2]
    tasks = _lazy(path)
    assert tasks.at(1) is Refusal.BAD_ROW
    assert not isinstance(tasks.at(2), Refusal)
    with pytest.raises(DataError, match=r"rows\.jsonl row 2: "):
        read_all(open_rows(DataSettings(source=str(path))))


def test_rows_that_came_by_another_way_are_left_out_too() -> None:
    rows = read_all(open_rows(DataSettings(source="addition")), at_most=4)
    odd = [dataclasses.replace(rows[0], task_id=HALF), dataclasses.replace(rows[1], data_source="x" * 100_000), *rows[2:]]
    assert [task.task_id for task in encode(odd, CODEC, max_prompt_tokens=64)] == [row.task_id for row in rows[2:]]


class _Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class _OddMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


ODD: list[Any] = []
"""A row that a function gives and that is none."""


def odd_rows() -> list[Any]:
    return [{"prompt": "q", "answer": "1"}, *ODD, {"prompt": "r", "answer": "2"}]


@pytest.mark.parametrize(
    "odd",
    [
        _Odd(),
        {"prompt": "q", "answer": _Odd()},
        _OddMapping(prompt="q", answer="1"),
        {"prompt": "q", "answer": 1 << 100_000},
        {"prompt": "q", "answer": decimal.Decimal("1e999999999")},
        {"prompt": "q", "answer": decimal.Decimal("Infinity")},
        {"prompt": "q", "answer": decimal.Decimal("sNaN")},
    ],
    ids=["row", "value", "mapping", "integer", "decimal", "infinite", "signalling"],
)
def test_an_odd_row_of_a_function_is_reported_and_left_out(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ODD", [odd])
    source = f"{__name__}:odd_rows"
    report = check(DataSettings(source=source))
    assert (report.num_rows, report.num_bad, [finding.row for finding in report.findings]) == (3, 1, [2])
    rows = open_rows(DataSettings(source=source))
    tasks = LazyTasks(rows, CODEC, Limits(max_prompt_tokens=64), Hashed(fraction=0.0, seed=1))
    assert tasks.at(1) is Refusal.BAD_ROW


def test_a_missing_value_of_a_column_of_numbers_is_no_ground_truth(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["a", "b"], "answer": [float("nan"), 1.0]}), path)
    assert check(DataSettings(source=str(path))).num_bad == 1
    assert open_rows(DataSettings(source=str(path), needs_ground_truth=False))[0].ground_truth is None


def test_what_is_seldom_meant_is_a_note(tmp_path: Path) -> None:
    report = _checked(tmp_path / "rows.jsonl", _line(answer=[]) + _line(answer={}) + _line(task_id="t") + _line(task_id="t"))
    assert report.is_good
    assert [(finding.row, finding.column) for finding in report.findings] == [
        (1, "ground_truth"),
        (2, "ground_truth"),
        (4, "task_id"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"x"), "compressed by gzip"),
        (bz2.compress(b"x"), "compressed by bzip2"),
        (lzma.compress(b"x"), "compressed by xz"),
        (b"PK\x03\x04...", "a zip archive"),
        (b"PAR1....", "name it .parquet"),
    ],
    ids=["gzip", "bzip2", "xz", "zip", "parquet"],
)
def test_a_file_that_has_no_lines_is_refused_with_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    (found,) = _checked(tmp_path / "rows.jsonl", content).findings
    assert says in found.message


@pytest.mark.parametrize(
    ("content", "is_good"),
    [
        (b"\xef\xbb\xbf" + b'[{"prompt":"q","answer":"1"}]', True),
        (b"\xef\xbb\xbf" + _line(), True),
        (b"[" * 100_000 + b"]" * 100_000, False),
        (b'[{"prompt":"q","answer":' + b"9" * 6000 + b"}]", False),
    ],
    ids=["list behind a mark", "lines behind a mark", "deep", "integer"],
)
def test_a_json_file_is_read_or_refused(tmp_path: Path, content: bytes, is_good: bool) -> None:
    assert _checked(tmp_path / "rows.json", content).is_good is is_good


def test_a_line_beyond_its_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the gigabytes of NUL that a sparse file ends with."""
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 100)
    report = _checked(tmp_path / "rows.jsonl", _line() + b"\0" * 200 + b"\n" + b" " * 200 + b"\n" + _line())
    assert [finding.message for finding in report.findings] == [
        "got a line of 200 bytes, expected at most 100",
        "got a line of 200 bytes, expected at most 100",
    ]
    assert report.num_rows == 4


@given(lines=st.lists(st.sampled_from([b"", b" ", b"\t\r", b"1", b"22", b" 3", b"[4]\r"]), max_size=12), ends=st.booleans())
def test_lines_are_found_whatever_pieces_the_file_is_read_in(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    for size in (1, 2, 3, 8 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rollouter.data.open_file.PIECE_BYTES", size)
            table = tables.JsonLinesTable(path)
        found = [(int(table.where(at).rpartition(" ")[2]), table.raw(at)) for at in range(len(table))]
        assert found == expected


@given(
    st.recursive(
        st.text(st.characters(codec=None)) | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_half_a_pair_is_found_exactly_where_text_is_no_unicode(value: Any) -> None:
    found = half_a_pair(plain(value))
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False))
    assert (found is None) is is_unicode
