"""The shipped rewards: right is 1, wrong is 0, and a row that cannot be scored is neither."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.errors import BadGroundTruth
from agent_loop.rewards import (
    choice,
    countdown,
    gsm8k,
    json_schema,
    math_equal,
    reasoning_gym,
    regex_match,
    think_answer_format,
)
from agent_loop.rewards.shaping import length_penalty, overlong_penalty


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("… so 3 * 24 = 72\n#### 72", "72", 1.0),
        ("#### 1,000.", "1000", 1.0),
        ("#### $72", "he has 72 left.\n#### 72", 1.0),
        ("The answer is 72.", "72", 1.0),
        ("72 apples, then 5", "72", 0.0),
        ("#### 5\n#### 72", "72", 1.0),
        ("#### -3", "-3", 1.0),
        ("none", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k_takes_the_final_number(solution: str, truth: str, expected: float) -> None:
    assert gsm8k("gsm8k", solution, truth) == expected


def test_gsm8k_asks_for_its_mark_when_strict_and_for_a_number_to_compare_with() -> None:
    assert gsm8k("gsm8k", "it is 72", "72", strict=True) == 0.0
    with pytest.raises(BadGroundTruth, match="ground truth 'many' from gsm8k"):
        gsm8k("gsm8k", "72", "many")


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("<answer>44 + 19 + 35</answer>", 1.0),
        ("<answer>(44+19)+35 = 98</answer>", 1.0),
        ("<answer>1</answer> no: <answer>35 - -44 + 19</answer>", 1.0),
        ("<answer>44 + 19</answer>", 0.1),
        ("<answer>44 + 19 + 35 + 0</answer>", 0.1),
        ("<answer>44 / (19 - 19)</answer>", 0.1),
        ("<answer>44 ** 9 ** 9</answer>", 0.0),
        ("<answer>__import__('os').getpid()</answer>", 0.0),
        ("<answer>" + "(" * 400 + "</answer>", 0.0),
        ("44 + 19 + 35", 0.0),
    ],
)
def test_countdown_takes_an_equation_of_the_given_numbers(solution: str, expected: float) -> None:
    assert countdown("countdown", solution, {"target": 98, "numbers": [44, 19, 35]}) == expected


@given(st.lists(st.integers(1, 99), min_size=2, max_size=5), st.lists(st.sampled_from("+-*/"), min_size=4, max_size=4))
def test_countdown_is_exact(numbers: list[int], operators: list[str]) -> None:
    text, value = str(numbers[0]), Fraction(numbers[0])
    for number, operator in zip(numbers[1:], operators, strict=False):
        text = f"({text} {operator} {number})"
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[operator]
    assert countdown("c", f"<answer>{text}</answer>", {"target": str(value), "numbers": numbers}) == 1.0
    assert countdown("c", f"<answer>{text}</answer>", {"target": str(value + 1), "numbers": numbers}) == 0.1


def test_countdown_needs_target_and_numbers() -> None:
    with pytest.raises(BadGroundTruth, match="expected target and numbers"):
        countdown("c", "<answer>1</answer>", "98")


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("\\boxed{1/3}", "1/3", 1.0),
        ("\\boxed{\\frac{1}{3}}", "\\frac13", 1.0),
        ("so $x = 0.5$", "1/2", 1.0),
        ("\\boxed{2}", "3", 0.0),
        ("\\boxed{(1, 2]}", "(1, 2]", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math_compares_expressions(solution: str, truth: str, expected: float) -> None:
    assert math_equal("math", solution, truth) == expected


def test_math_gives_the_same_from_any_thread() -> None:
    """B98: nothing in it needs the main thread."""
    got: list[float] = []

    def work() -> None:
        got.append(math_equal("math", "\\boxed{1/3}", "1/3"))

    async def in_a_task() -> None:
        await asyncio.to_thread(work)
        work()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    asyncio.run(in_a_task())
    work()
    assert got == [1.0] * 4


def test_math_says_that_a_gold_is_none_and_keeps_gold_and_answer_apart() -> None:
    """B101: an unparsable gold is the row's fault; an interval and a number are not equal in either order."""
    with pytest.raises(BadGroundTruth, match="expected an expression"):
        math_equal("math", "\\boxed{1}", "")
    assert math_equal("math", "\\boxed{1}", "[1, 2]") == math_equal("math", "\\boxed{[1, 2]}", "1") == 0.0


@pytest.mark.parametrize("unit", ["(", "a a a ", "\\frac{", "1+", "{"])
def test_math_of_a_very_long_reply_ends(unit: str) -> None:
    """B100"""
    assert math_equal("math", (unit * 200_000)[:200_000], "7") == 0.0


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("The answer is (C).", 1.0),
        ("Answer: C", 1.0),
        ("**Answer:** C", 1.0),
        ("\\boxed{C}", 1.0),
        ("\\boxed{\\text{C}}", 1.0),
        ("<answer>c</answer>", 1.0),
        ("first A\nC.", 1.0),
        ("The answer is A. No: the answer is C", 1.0),
        ("The answer is A.", 0.0),
        ("The answer can't be told", 0.0),
        ("", 0.0),
    ],
)
def test_choice_takes_the_letter_that_the_reply_settles_on(solution: str, expected: float) -> None:
    assert choice("mmlu", solution, "C") == expected


def test_choice_needs_a_letter() -> None:
    with pytest.raises(BadGroundTruth, match="expected one letter"):
        choice("mmlu", "C", "the third")


def test_regex_is_searched_or_matched_whole() -> None:
    assert regex_match("r", "it is 42.", r"\b42\b") == 1.0
    assert regex_match("r", "it is 42.", r"\b42\b", whole=True) == 0.0
    assert regex_match("r", "it is 42.", "ignored", pattern=r"it.*") == 1.0
    with pytest.raises(BadGroundTruth, match="unterminated"):
        regex_match("r", "x", "[")


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("<think>hm</think>\n<answer>7</answer>", 1.0),
        ("hm</think><answer>7</answer>\n", 1.0),
        ("<think>hm</think> so <answer>7</answer>", 0.0),
        ("<think></think><answer>7</answer>", 0.0),
        ("<think>hm</think><answer> </answer>", 0.0),
        ("<think>hm</think><answer>7</answer><answer>8</answer>", 0.0),
        ("<answer>7</answer>", 0.0),
        ("<think>hm</think><answer>7", 0.0),
    ],
)
def test_format_wants_one_thought_and_one_answer(solution: str, expected: float) -> None:
    assert think_answer_format("f", solution, None) == expected


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ('{"name": "x", "age": 3}', 1.0),
        ('Here:\n```json\n{"name": "x"}\n```', 1.0),
        ('{"age": 3}', 0.0),
        ('{"name": "x", "name": "y"}', 0.0),
        ('{"name": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("no JSON", 0.0),
    ],
)
def test_json_schema_judges_the_document(solution: str, expected: float) -> None:
    assert json_schema("j", solution, SCHEMA) == expected
    assert json_schema("j", solution, json.dumps(SCHEMA)) == expected
    assert json_schema("j", solution, None, schema=SCHEMA) == expected


@pytest.mark.parametrize("schema", ["{", {"type": "nothing"}, 3])
def test_a_schema_that_is_none_is_the_rows_fault(schema: Any) -> None:
    with pytest.raises(BadGroundTruth, match="got no schema"):
        json_schema("j", "{}", schema)


def test_reasoning_gym_scores_against_the_entry_that_the_row_was_made_from() -> None:
    from agent_loop.rewards import gym

    config = {"min_terms": 2, "max_terms": 2}
    entry = gym._dataset("basic_arithmetic", json.dumps(config))[3]
    row = {"reasoning_gym": {"name": "basic_arithmetic", "config": config, "index": 3}}
    assert reasoning_gym("rg", f"so <answer>{entry['answer']}</answer>", entry["answer"], row) == 1.0
    assert reasoning_gym("rg", entry["answer"], entry["answer"], row) == 1.0
    assert reasoning_gym("rg", "<answer>no number</answer>", entry["answer"], row) < 1.0
    with pytest.raises(BadGroundTruth, match="another release"):
        reasoning_gym("rg", "1", "something else", row)
    package_row = {"metadata": entry["metadata"], "question": entry["question"]}
    assert reasoning_gym("rg", entry["answer"], entry["answer"], package_row) == 1.0
    with pytest.raises(BadGroundTruth, match=r"got no extra_info\.reasoning_gym"):
        reasoning_gym("rg", "1", "1", {})


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_penalty_is_dapos_equation_13(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096) == pytest.approx(expected)


def test_without_a_buffer_nothing_is_overlong() -> None:
    assert overlong_penalty(10**6, max_tokens=10, buffer_tokens=0) == 0.0


@settings(max_examples=200)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 2000), st.integers(0, 3000), st.floats(0, 10))
def test_length_never_pays(shorter: int, more: int, max_tokens: int, buffer: int, coefficient: float) -> None:
    shapes: tuple[Callable[[int], float], ...] = (
        lambda n: overlong_penalty(n, max_tokens=max_tokens, buffer_tokens=buffer),
        lambda n: length_penalty(n, max_tokens=max_tokens, coefficient=coefficient),
    )
    for shape in shapes:
        assert 0.0 >= shape(shorter) >= shape(shorter + more) >= -max(1.0, coefficient)
