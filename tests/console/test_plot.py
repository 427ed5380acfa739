"""Curves as text and as PNG."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.plot import _step_before, chart, moving_mean, write_png
from tests.console.builders import evaluation, picture, step, trainer


@given(
    values=st.lists(st.floats(), max_size=200),
    width=st.integers(1, 60),
    height=st.integers(1, 12),
    braille=st.booleans(),
)
def test_a_chart_fills_exactly_its_rectangle(values: list[float], width: int, height: int, braille: bool) -> None:
    lines = chart(values, width=width, height=height, low=0.0, high=1.0, braille=braille)
    assert [len(line) for line in lines] == [width] * height


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = chart([0.0, 1.0], width=10, height=4, low=0.0, high=1.0, braille=False)
    assert lines[-1][0] == "*"
    assert lines[0][-1] == "*"
    assert lines[0][0] == " "
    assert all(any(line[column] == "*" for line in lines) for column in range(10))


def test_a_chart_leaves_out_what_is_no_number() -> None:
    assert chart([math.nan, math.inf], width=5, height=2, low=0.0, high=1.0) == ["     ", "     "]


def test_a_chart_without_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        chart([1.0], width=5, height=2, low=1.0, high=1.0)


def test_moving_mean_uses_what_there_is() -> None:
    assert moving_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_the_learning_curve_is_a_png(tmp_path: Path) -> None:
    run = picture()
    run.add_steps([step(number) for number in range(1, 8)])
    run.see_trainer(trainer(evaluations=(evaluation(0, 0.3), evaluation(7, 0.9))), 1.0)
    path = write_png(run, tmp_path / "run" / "reward.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_accuracy_is_drawn_after_the_steps_that_its_version_learned_from() -> None:
    run = picture()
    run.add_steps([step(number, policy_version=number - 1) for number in range(1, 5)])
    assert [_step_before(run, version) for version in (0, 1, 3, 4)] == [0, 1, 3, 4]


def test_no_step_no_curve(tmp_path: Path) -> None:
    assert write_png(picture(), tmp_path / "reward.png") is None
    assert not (tmp_path / "reward.png").exists()
