"""Long words keep their end, where the reason stands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from configs.shortened import in_a_line, shortened


def test_the_last_line_of_a_traceback_survives() -> None:
    words = "Traceback (most recent call last):\n" + "  File x, line 1, in f\n" * 200 + "KeyError: 'answer'"
    short = in_a_line(words, 120)
    assert short.startswith("Traceback (most recent")
    assert short.endswith("KeyError: 'answer'")
    assert "\n" not in short


@given(words=st.text(max_size=200), limit=st.integers(8, 100))
def test_no_limit_is_exceeded_and_what_fits_is_not_touched(words: str, limit: int) -> None:
    short = shortened(words, limit)
    assert len(short) <= limit
    assert short == words or len(words) > limit
    assert short[-1:] == words[-1:]
    assert short[:1] in (words[:1], " ")
