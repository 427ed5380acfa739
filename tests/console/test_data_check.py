"""`headrace data check` names every problem by row and column in one pass, and says whether a run would take the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console.cli import main
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer

LINES = [
    '{"prompt": "1+1=", "ground_truth": "2"}',
    '{"prompt": "", "ground_truth": ""}',
    '{"question": "1+2=", "answer": "3"}',
    '{"promt": "x", "ground_truth": "1"}',
    '{"prompt": [[{"role": "user", "content": "a"}]], "ground_truth": "1", "extra_info": 3}',
    "no json",
    '{"prompt": "\\ud800", "ground_truth": "1"}',
    '{"prompt": [{"role": "user", "content": "a"}], "reward_model": {"style": "rule"}}',
    '{"prompt": "1+1=", "ground_truth": "2"}',
]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(LINES))
    return file


def test_every_problem_stands_in_a_line_of_its_own(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B109: one pass, file, row, column, what was found and what is needed."""
    assert main(["data", "check", str(bad)]) == 1
    text = capsys.readouterr().out
    for row, column in (
        (2, "prompt"),
        (2, "ground_truth"),
        (4, "prompt"),
        (5, "prompt"),
        (5, "extra_info"),
        (8, "reward_model"),
    ):
        assert f"error: {bad} row {row}: {column}: " in text
    assert "row 4: prompt: the column is missing (columns found: promt, ground_truth)" in text
    assert "row 6: is not JSON" in text
    assert "row 7: prompt: got text with half a surrogate pair" in text
    assert "9 rows: 3 good, 6 bad, 0 too long, 1 with a prompt seen before" in text
    assert "a run would refuse this data" in text


def test_as_json_it_says_the_same(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "--json", str(bad)]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["is_good"], facts["rows"], facts["bad"]) == (False, 9, 6)
    places = {(one["row"], one["column"]) for one in facts["findings"]}
    assert {(2, "prompt"), (2, "ground_truth"), (5, "extra_info"), (6, "")} <= places


def test_prompts_are_measured_with_the_models_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B112"""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * n, "ground_truth": "x"}) + "\n" for n in (8, 9, 40)))
    model = str(write_tiny_tokenizer(tmp_path / "model"))
    assert main(["data", "check", str(file), "data.max_prompt_tokens=8", "--tokenizer", model]) == 0
    text = capsys.readouterr().out
    assert "row 2: prompt: got 9 tokens, expected at most 8" in text
    assert "3 rows: 1 good, 0 bad, 2 too long" in text
    assert "40 tokens (at most 8)" in text
    strict = ["data.max_prompt_tokens=8", "data.on_overlong=error"]
    assert main(["data", "check", str(file), *strict, "--tokenizer", model]) == 1


def test_without_a_file_the_settings_sources_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data: {source: [addition, 'reasoning_gym:chain_sum?size=4'], weights: [1, 2]}\n")
    assert main(["data", "check", "--config", str(config)]) == 0
    assert "85 rows: 85 good" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["no/such.jsonl", "reasoning_gym:countdwn", "additoin"])
def test_source_that_is_none_is_an_answer_too(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", source, "addition"]) == 1
    text = capsys.readouterr().out
    assert f"error: {source}: " in text
    assert "81 rows" in text


def test_wrong_setting_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "addition", "data.max_promt_tokens=3"]) == 2
    assert "data.max_prompt_tokens" in capsys.readouterr().err
    assert main(["data", "check", "addition", "--tokenizer", "/no/such"]) == 2


def test_where_every_prompt_is_too_long_the_limit_that_cut_them_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_tokenizer(tmp_path / "model")
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * n, "ground_truth": "x"}) + "\n" for n in (30, 40)))
    for overrides, limit in (
        (["data.max_prompt_tokens=9"], "data.max_prompt_tokens=9"),
        (
            ["engine.max_model_len=24", "sampling.max_tokens=16", "data.max_prompt_tokens=20"],
            "8 tokens, which engine.max_model_len=24 leaves beside sampling.max_tokens=16 (data.max_prompt_tokens=20 would",
        ),
    ):
        assert main(["data", "check", str(file), *overrides, "--tokenizer", str(tmp_path / "model")]) == 1
        assert f"refuse this data: no row is left, since every prompt is longer than {limit}" in capsys.readouterr().out
