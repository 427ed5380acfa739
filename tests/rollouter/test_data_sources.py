"""Whatever form the data has, its rows are the same plain rows; what is wrong with them is named by row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import DataSettings
from rollouter.data import columnar
from rollouter.data.generated import make_dataset
from rollouter.data.plain import plain
from rollouter.data.rows import Keys, Problem, Row, read_row
from rollouter.data.sources import load_rows, open_rows, read_all
from rollouter.errors import DataError

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n}+1=? 你好 🎲"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n, "need_tools_kwargs": True},
        "agent_name": "tool_calling",
        "tools_kwargs": {"calculator": {"create_kwargs": {"limit": n}}},
    }
    for n in range(5)
]


def _write(path: Path, form: str, rows: list[dict[str, Any]]) -> str:
    match form:
        case "jsonl":
            (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "json":
            (path / "data.json").write_text(json.dumps(rows))
        case "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path / "data.parquet", row_group_size=2)
        case "arrow":
            table = pa.Table.from_pylist(rows)
            with ipc.new_file(str(path / "data.arrow"), table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
        case "saved":
            return str(_saved(path / "data", rows))
        case "splits":
            _saved(path / "data" / "train", rows)
            (path / "data" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
            return str(path / "data")
        case "directory":
            (path / "data").mkdir()
            for number, row in enumerate(rows):
                parquet.write_table(pa.Table.from_pylist([row]), path / "data" / f"{number}.parquet")
            return str(path / "data")
    return str(path / f"data.{form}")


def _saved(directory: Path, rows: list[dict[str, Any]]) -> Path:
    """As Hugging Face datasets' save_to_disk lays it out, in two shards."""
    directory.mkdir(parents=True)
    names = []
    for shard, part in enumerate((rows[:3], rows[3:])):
        names.append({"filename": f"data-{shard:05d}-of-00002.arrow"})
        table = pa.Table.from_pylist(part)
        with ipc.new_stream(str(directory / names[-1]["filename"]), table.schema) as writer:
            writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "x"}))
    return directory


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "arrow", "saved", "splits", "directory"])
def test_rows_of_verls_columns_are_alike_in_every_form(tmp_path: Path, form: str) -> None:
    """B110: the same rows, plain through and through."""
    rows = load_rows(_write(tmp_path, form, ROWS))
    assert [row.ground_truth for row in rows] == ["1", "2", "3", "4", "5"]
    for number, row in enumerate(rows):
        assert row.prompt == tuple(ROWS[number]["prompt"])
        assert (row.data_source, row.agent_name) == ("openai/gsm8k", "tool_calling")
        assert row.tools_kwargs == {"calculator": {"create_kwargs": {"limit": number}}}
        assert row.extra_info == ROWS[number]["extra_info"]
        everything = [row.prompt, row.ground_truth, row.extra_info, row.tools_kwargs]
        assert json.loads(json.dumps(everything)) == msgpack.unpackb(msgpack.packb(everything))


def test_a_large_parquet_file_is_converted_once_and_read_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_BYTES_IN_MEMORY", 0)
    source = _write(tmp_path, "parquet", ROWS)
    data = DataSettings(source=source, cache_dir=tmp_path / "cache")
    first = read_all(open_rows(data))
    copies = list((tmp_path / "cache" / "arrow").iterdir())
    assert len(copies) == 1
    before = copies[0].stat()
    assert read_all(open_rows(data)) == first == load_rows(source)
    assert copies[0].stat() == before
    assert [one.name for one in (tmp_path / "cache" / "arrow").iterdir()] == [copies[0].name]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "saved"])
def test_fingerprint_changes_when_rows_are_added_reordered_or_edited_alike_in_number(tmp_path: Path, form: str) -> None:
    """B93"""
    edited = [dict(ROWS[0], ability="logic"), *ROWS[1:]]
    versions = [ROWS, [*ROWS, ROWS[0]], [ROWS[1], ROWS[0], *ROWS[2:]], edited]
    prints = []
    for number, rows in enumerate(versions):
        (tmp_path / str(number)).mkdir()
        source = _write(tmp_path / str(number), form, rows)
        prints.append(open_rows(DataSettings(source=source)).fingerprint())
    assert len(set(prints)) == len(versions)
    (tmp_path / "again").mkdir()
    assert open_rows(DataSettings(source=_write(tmp_path / "again", form, ROWS))).fingerprint() == prints[0]


@pytest.mark.parametrize(
    ("raw", "settings", "prompt", "truth"),
    [
        ({"question": "why", "answer": "42"}, {}, "why", "42"),
        ({"messages": [{"role": "user", "content": "a"}], "solution": "b"}, {}, ({"role": "user", "content": "a"},), "b"),
        ({"text": "q", "meta": {"label": 3}}, {"prompt_key": "text", "ground_truth_key": "meta.label"}, "q", 3),
        ({"prompt": "q"}, {"needs_ground_truth": False}, "q", None),
        ({"prompt": "q", "answer": "a"}, {"as_chat": True}, ({"role": "user", "content": "q"},), "a"),
        (
            {"prompt": "q", "answer": "a"},
            {"as_chat": True, "system_prompt": "s"},
            ({"role": "system", "content": "s"}, {"role": "user", "content": "q"}),
            "a",
        ),
    ],
)
def test_columns_are_found_by_their_usual_names_or_by_those_that_are_set(
    raw: dict[str, Any], settings: dict[str, Any], prompt: Any, truth: Any
) -> None:
    row = read_row(raw, "here", Keys.of(DataSettings(**settings)))
    assert isinstance(row, Row)
    assert (row.prompt, row.ground_truth, row.data_source) == (prompt, truth, "here")


@pytest.mark.parametrize(
    ("raw", "problems"),
    [
        ({"prompt": 7, "extra_info": []}, {"prompt", "ground_truth", "extra_info"}),
        ({"prompt": [[{"role": "user", "content": "x"}]], "ground_truth": "1"}, {"prompt"}),
        ({"prompt": "\ud800", "ground_truth": "1"}, {"prompt"}),
        ({"prompt": " \n", "ground_truth": "1"}, {"prompt"}),
        ({"prompt": {"role": "user", "content": "x"}, "ground_truth": "1"}, {"prompt"}),
        ({"prompt": "x", "ground_truth": "1", "tools_kwargs": "t", "agent_name": 3}, {"tools_kwargs", "agent_name"}),
        ({"prompt": [{"role": "user", "content": 5}], "ground_truth": "1"}, {"prompt"}),
        ({"prompt": "x", "reward_model": {"style": "rule", "ground_truth": None}}, {"reward_model.ground_truth"}),
    ],
)
def test_every_problem_of_a_row_is_found_at_once(raw: dict[str, Any], problems: set[str]) -> None:
    """B109"""
    found = read_row(raw, "here", Keys())
    assert isinstance(found, list)
    assert {problem.column for problem in found} == problems


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(_PLAIN)
def test_any_row_is_a_row_or_a_list_of_problems(raw: Any) -> None:
    found = read_row(raw, "here", Keys())
    assert isinstance(found, Row) or (found and all(isinstance(problem, Problem) for problem in found))
    for key in ("prompt", "ground_truth", "extra_info", "tools_kwargs", "task_id"):
        again = read_row({"prompt": "x", "ground_truth": "1", key: raw}, "here", Keys())
        assert isinstance(again, (Row, list))


def test_arrow_values_of_pandas_kind_become_plain() -> None:
    """B110"""
    value = {"a": np.array([np.array([1, 2]), np.array([3])], dtype=object), "b": [np.bool_(True), np.int64(3)], "c": b"x"}
    assert plain(value) == {"a": [[1, 2], [3]], "b": [True, 3], "c": "x"}


def test_several_sources_are_read_behind_each_other_and_rows_named_in_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a", "ground_truth": "1"}\n\n  \n{"prompt": "b", "ground_truth": "2"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "c", "ground_truth": "3"}\n{"prompt": "d"}\n')
    rows = open_rows(DataSettings(source=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))))
    assert rows.sizes == (2, 2)
    assert [rows[number].prompt for number in range(3)] == ["a", "b", "c"]
    assert [rows.where(number).rpartition(" ")[2] for number in range(4)] == ["2", "5", "1", "2"]
    with pytest.raises(DataError, match=r"b\.jsonl row 2: ground_truth: the column is missing; columns found: prompt"):
        rows[3]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.parquet", b"PAR1 no", "is no readable Parquet"),
        ("x.arrow", b"nothing", "is no readable Arrow"),
        ("x.jsonl", b'{"prompt": "\xff", "ground_truth": "1"}\n', "is not UTF-8 text"),
        ("x.json", b"[{]", "is not JSON"),
        ("x.jsonl", b"", "no row found"),
    ],
)
def test_file_that_is_no_such_file_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_rows(str(tmp_path / name))


def test_reasoning_gym_rows_follow_from_name_configuration_and_number() -> None:
    source = "reasoning_gym:chain_sum?size=20&seed=3&min_terms=2&max_terms=2"
    rows = load_rows(source)
    assert rows == load_rows(source)
    assert rows != load_rows(source.replace("seed=3", "seed=4"))
    assert len({row.task_id for row in rows}) == len(rows) == 20
    told = rows[7].extra_info["reasoning_gym"]
    entry = make_dataset(told["name"], told["config"])[told["index"]]
    assert (entry["question"], entry["answer"]) == (rows[7].prompt, rows[7].ground_truth)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("reasoning_gym:countdwn", "nearest: countdown"),
        ("reasoning_gym:countdown?terms=3", "takes no parameter 'terms'.*it takes .*min_numbers"),
        ("reasoning_gym:countdown?min_numbers=0", "AssertionError"),
    ],
)
def test_wrong_generator_is_named_with_the_nearest(source: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_rows(source)
