"""Whatever a tool returned is text in the end, and no more of it is rendered than is looked at."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tool_text import cut, text_of
from tests.agent_loop.scripted import Letters


class Colour(enum.Enum):
    RED = "red"


class Place(pydantic.BaseModel):
    city: str


class Mute:
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ("a\ud800", "a\\ud800"),
        ({"k": "a\ud800", "é": 1.5}, '{"k":"a\\ud800","é":1.5}'),
        (float("nan"), "NaN"),
        (10**30, "1" + "0" * 30),
        ({"a": 10**30}, '{"a":1' + "0" * 30 + "}"),
        ([True, None, (1, 2)], "[true,null,[1,2]]"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (b"bytes", "b'bytes'"),
        ({1}, "{1}"),
        (Colour.RED, '"red"'),
        (Place(city="Bern"), '{"city":"Bern"}'),
        ({"at": datetime.date(2024, 1, 2)}, '{"at":"2024-01-02"}'),
        (np.arange(3), "[0,1,2]"),
        (np.float64(0.5), "0.5"),
        (10**5000, "something of type int that cannot be shown: ValueError"),
        (Mute(), "something of type Mute that cannot be shown: SystemExit"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_a_tool_returned_is_shown(value: Any, text: str) -> None:
    shown = text_of(value, max_characters=100)
    assert shown == text
    orjson.dumps(shown)


def test_a_large_result_is_rendered_no_further_than_it_is_shown() -> None:
    num_looked_at = 0

    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal num_looked_at
            for number in range(10**9):
                num_looked_at += 1
                yield number

    assert text_of(Long([1]), max_characters=20) == "[0,1,2,3,4,5,6,7,8,9"
    assert num_looked_at < 50


class Counting(Letters):
    """Says how much it was given."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode(self, text: str) -> list[int]:
        self.num_characters += len(text)
        return super().encode(text)


@given(st.integers(0, 5000), st.sampled_from([8, 100, 500]))
def test_a_long_text_is_cut_without_encoding_all_of_it(length: int, limit: int) -> None:
    codec = Counting()
    shown = cut("x" * length, limit, codec)
    assert shown == ("x" * length if length <= limit else "x" * (len(shown) - 6) + "\n[cut]")
    assert limit - limit // 128 <= len(shown) <= limit or length <= limit
    assert codec.num_characters < 20 * limit + 200
