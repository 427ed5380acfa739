"""A source with a bad row is refused at load, naming file, row, columns and what is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import ConfigError
from rollouter.errors import DataError
from rollouter.tasks import load_rows, plain


def _file(path: Path, rows: list[Any]) -> str:
    file = path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_addition_has_the_81_sums_with_solved_examples_before_them() -> None:
    rows = load_rows("addition")
    assert len(rows) == 81
    assert len({row.task_id for row in rows}) == 81
    assert all(isinstance(row.prompt, str) and row.prompt.startswith("2+3=5\n4+1=5\n6+2=8\n") for row in rows)
    by_id = {row.task_id: row for row in rows}
    assert by_id["addition/9+8"].prompt == "2+3=5\n4+1=5\n6+2=8\n9+8="
    assert by_id["addition/9+8"].ground_truth == "17"


def test_sort_rows_are_distinct_and_the_same_each_time() -> None:
    rows = load_rows("sort")
    assert rows == load_rows("sort")
    assert len({row.prompt for row in rows}) == len(rows)
    for row in rows[:100]:
        assert isinstance(row.prompt, str)
        assert row.ground_truth == "".join(sorted(row.prompt[1:-1]))


def test_json_lines_become_rows(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = _file(
        tmp_path,
        [
            {"prompt": "1+1=", "ground_truth": "2", "data_source": "sums", "extra_info": {"n": [1, 2]}},
            {"prompt": messages, "reward_model": {"style": "rule", "ground_truth": 4}, "ability": "math"},
        ],
    )
    first, second = load_rows(path)
    assert (first.prompt, first.ground_truth, first.data_source, first.extra_info) == ("1+1=", "2", "sums", {"n": [1, 2]})
    assert (second.prompt, second.ground_truth, second.data_source) == (tuple(messages), 4, "tasks")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": "x"}, "ground_truth: the column is missing"),
        ({"ground_truth": "1"}, "prompt: the column is missing"),
        ({"prompt": "x", "reward_model": {"style": "rule"}}, "reward_model: got"),
        ({"prompt": "x", "ground_truth": None}, "ground_truth: got None"),
        ({"prompt": "x", "ground_truth": ""}, "ground_truth: got ''"),
        ({"prompt": "", "ground_truth": "1"}, "prompt: got ''"),
        ({"prompt": 7, "ground_truth": "1"}, "prompt: got 7"),
        ({"prompt": [{"content": "no role"}], "ground_truth": "1"}, "expected a mapping with role and content"),
        ({"prompt": [{"role": "user", "content": None}], "ground_truth": "1"}, "got no content in message 0 (role user)"),
        ({"prompt": "x", "ground_truth": "1", "data_source": ""}, "data_source: got ''"),
        ({"prompt": "x", "ground_truth": "1", "extra_info": [1]}, "extra_info: got list"),
        (["no", "mapping"], "got list, expected a mapping"),
    ],
)
def test_bad_row_is_named_with_file_row_and_columns(tmp_path: Path, bad: Any, says: str) -> None:
    """B109"""
    path = _file(tmp_path, [{"prompt": "x", "ground_truth": "1"}] * 16 + [bad])
    with pytest.raises(DataError) as caught:
        load_rows(path)
    message = str(caught.value)
    assert says in message
    assert f"{path} row 17" in message
    assert "needed: prompt" in message
    if isinstance(bad, dict):
        assert f"columns found: {', '.join(bad)}" in message


def test_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "x", "ground_truth": "1"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"tasks\.jsonl row 2: is not JSON"):
        load_rows(str(file))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row found"):
        load_rows(_file(tmp_path, []))


def test_unknown_source_is_a_setting_error_naming_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"data\.source: got 'additoin', expected one of addition, sort"):
        load_rows("additoin")


def test_dotted_path_gives_rows() -> None:
    rows = load_rows(f"{__name__}:numpy_rows")
    assert rows[0].extra_info == {"shape": [[1, 2], [3, 4]], "flag": True}


def test_dotted_path_that_does_not_import_is_named() -> None:
    with pytest.raises(DataError, match="no_such_module_here:rows"):
        load_rows("no_such_module_here:rows")


def numpy_rows() -> list[dict[str, Any]]:
    extra = {"shape": np.array([[1, 2], [3, 4]]), "flag": np.bool_(True)}
    return [{"prompt": "x", "ground_truth": np.int64(3), "extra_info": extra}]


def test_numpy_values_become_plain_python() -> None:
    """B110"""
    value = {"a": np.array([[1, 2]]), "b": (np.float32(0.5), np.int64(2)), "c": [{"d": np.bool_(False)}]}
    assert plain(value) == {"a": [[1, 2]], "b": [0.5, 2], "c": [{"d": False}]}
    assert json.loads(json.dumps(plain(value))) == plain(value)


def test_value_without_a_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="complex has no plain form"):
        plain({"a": 1j})
