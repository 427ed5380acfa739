"""Slices: as long as the interval at the speed that was seen, never a handful of tokens, never a bound where none is wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.slices import BLOCK_TOKENS, FIRST_TOKENS, MIN_TOKENS, Slices
from tests.fakes.fake_clock import FakeClock


def _slices(interval_s: float = 1.0) -> Slices:
    return Slices(lambda: interval_s, clock=FakeClock())


def test_the_first_slice_is_short_and_the_next_ones_follow_the_speed() -> None:
    slices = _slices(interval_s=0.5)
    assert slices.next_size(1) == FIRST_TOKENS
    slices.took(32, seconds=0.04)
    assert slices.next_size(1) == 384


def test_no_interval_means_whole_turns_and_is_asked_for_each_time() -> None:
    interval_s = 0.0
    slices = Slices(lambda: interval_s, clock=FakeClock())
    slices.took(100, seconds=1.0)
    assert slices.next_size(5) is None
    interval_s = 2.0
    assert slices.next_size(5) == 193 - 5


def test_one_long_pause_does_not_shorten_the_slices() -> None:
    """A request that stood still for a weight update says nothing of the next one."""
    slices = _slices()
    for _ in range(5):
        slices.took(100, seconds=1.0)
    slices.took(100, seconds=60.0)
    assert slices.next_size(1) == 96


def test_an_answer_in_no_time_bounds_nothing() -> None:
    slices = _slices()
    slices.took(5, seconds=0.0)
    assert slices.next_size(1) is None


@given(st.lists(st.tuples(st.integers(0, 4096), st.floats(0, 1e4)), max_size=80), st.floats(1e-3, 1e3), st.integers(1, 100_000))
def test_a_slice_is_worth_its_request_and_ends_where_the_cache_does(
    seen: list[tuple[int, float]], interval_s: float, context: int
) -> None:
    slices = _slices(interval_s)
    for num_tokens, seconds in seen:
        slices.took(num_tokens, seconds)
    size = slices.next_size(context)
    assert size is None or (size >= MIN_TOKENS and (context + size) % BLOCK_TOKENS == 1)


@given(st.integers(1, 4096), st.integers(1, 10_000))
def test_a_slice_is_never_longer_than_the_interval_allows_by_more_than_a_block(per_interval: int, context: int) -> None:
    slices = _slices()
    slices.took(per_interval, seconds=1.0)
    size = slices.next_size(context)
    assert size is not None
    assert size <= max(per_interval, MIN_TOKENS + BLOCK_TOKENS)
