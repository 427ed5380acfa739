"""How many requests an engine gets at once: found from its queue and KV cache, within bounds, never none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.concurrency import FIRST, Demand, Limit, Pressure, bound_of, next_limit, read_pressure

CALM = Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.3)
BUSY = Demand(in_flight=8, num_waiting=5, seconds_per_token=0.01)


def demand(in_flight: int, *, waiting: int = 5, seconds: float | None = 0.01) -> Demand:
    return Demand(in_flight=in_flight, num_waiting=waiting, seconds_per_token=seconds)


def test_it_rises_while_all_seats_are_taken_others_wait_and_the_cache_has_room() -> None:
    assert next_limit(Limit(requests=8), CALM, demand(8), bound=100).requests == 9
    assert next_limit(Limit(requests=64), replace(CALM, num_running=60), demand(64), bound=100).requests == 68


def test_an_engine_that_has_not_looked_at_its_requests_yet_says_nothing_of_its_room() -> None:
    empty = Pressure(num_waiting=0, num_running=0, kv_cache_usage=0.0)
    assert next_limit(Limit(requests=8), empty, demand(8), bound=100).requests == 8
    assert next_limit(Limit(requests=8), replace(empty, num_running=4), demand(8), bound=100).requests == 16


def test_before_any_pressure_it_doubles_while_the_cache_is_nearly_empty() -> None:
    empty = Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.05)
    assert next_limit(Limit(requests=8), empty, demand(8), bound=100).requests == 16
    assert next_limit(Limit(requests=64), replace(empty, num_running=64), demand(64), bound=100).requests == 100
    full = Pressure(num_waiting=1, num_running=8, kv_cache_usage=0.95)
    met = next_limit(Limit(requests=16), full, demand(16), bound=100)
    assert not met.is_starting
    assert next_limit(met, empty, demand(12), bound=100).requests == 13


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (CALM, demand(8, waiting=0)),
        (CALM, demand(7)),
        (Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.8), demand(8)),
    ],
)
def test_it_stays_without_demand_and_without_room(seen: Pressure, wanted: Demand) -> None:
    """What admission lets in bounds it: without requests that wait there is nothing to raise it for."""
    assert next_limit(Limit(requests=8), seen, wanted, bound=100).requests == 8


@pytest.mark.parametrize(
    "seen",
    [
        Pressure(num_waiting=1, num_running=8, kv_cache_usage=0.1),
        Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.95),
        Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.1, num_preemptions=3),
    ],
)
def test_a_queue_a_full_cache_and_a_preemption_each_lower_it(seen: Pressure) -> None:
    assert next_limit(Limit(requests=32, num_preemptions=2), seen, demand(32), bound=100).requests == 24


def test_it_is_lowered_from_what_was_in_flight_and_not_from_an_unused_limit() -> None:
    seen = Pressure(num_waiting=2, num_running=8, kv_cache_usage=0.99)
    assert next_limit(Limit(requests=100), seen, demand(8), bound=200).requests == 6


def test_it_is_not_lowered_again_before_the_requests_in_flight_have_come_down_to_it() -> None:
    """Else it falls to one while the requests of before still fill the cache."""
    seen = Pressure(num_waiting=2, num_running=8, kv_cache_usage=0.99)
    limit = next_limit(Limit(requests=16), seen, demand(16), bound=200)
    for in_flight in (16, 15, 13):
        assert next_limit(limit, seen, demand(in_flight), bound=200).requests == 12
    assert next_limit(limit, seen, demand(12), bound=200).requests == 9


def test_one_preemption_counts_once() -> None:
    seen = Pressure(num_waiting=0, num_running=8, kv_cache_usage=0.8, num_preemptions=1)
    limit = next_limit(Limit(requests=32), seen, demand(24), bound=100)
    assert next_limit(limit, seen, demand(18), bound=100).requests == limit.requests == 18


def test_an_engine_that_was_started_again_begins_to_count_anew() -> None:
    limit = next_limit(Limit(requests=8, num_preemptions=50), CALM, demand(8), bound=100)
    assert limit.num_preemptions == 0
    assert limit.requests == 9


def test_without_its_numbers_slow_tokens_are_pressure_and_quick_ones_room() -> None:
    limit = next_limit(Limit(requests=8), None, demand(8, seconds=0.01), bound=100)
    assert limit.best_seconds_per_token == 0.01
    assert limit.requests == 9
    assert next_limit(limit, None, demand(9, seconds=0.03), bound=100).requests == 9
    assert next_limit(limit, None, demand(9, seconds=0.05), bound=100).requests == 6
    assert next_limit(limit, None, demand(9, seconds=None), bound=100).requests == 9


def test_a_bound_that_was_lowered_live_holds_at_once() -> None:
    """B28"""
    assert next_limit(Limit(requests=16), CALM, demand(16), bound=4).requests == 4


@given(
    st.lists(
        st.tuples(
            st.none()
            | st.builds(
                Pressure, num_waiting=st.integers(0, 9), num_running=st.integers(0, 99), kv_cache_usage=st.floats(0, 1)
            ),
            st.builds(
                Demand,
                in_flight=st.integers(0, 99),
                num_waiting=st.integers(0, 9),
                seconds_per_token=st.none() | st.floats(0, 9),
            ),
            st.integers(1, 64),
        )
    )
)
def test_it_is_at_least_one_and_at_most_the_bound(looks: list[tuple[Pressure | None, Demand, int]]) -> None:
    """B28: so no request waits for ever, whatever the bound becomes."""
    limit = Limit()
    for pressure, wanted, bound in looks:
        limit = next_limit(limit, pressure, wanted, bound=bound)
        assert 1 <= limit.requests <= bound


@given(st.none() | st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_the_bound_is_the_least_of_the_three(most: int | None, together: int, in_all: int) -> None:
    bound = bound_of(max_requests=most, max_num_seqs=together, max_concurrent_rollouts=in_all)
    assert bound == min(value for value in (most, together, in_all) if value is not None)


@dataclass(slots=True)
class Cache:
    """An engine whose requests hold one block each look that they live, `lifetime` looks long; the rest queues."""

    blocks: int
    lifetime: int

    def pressure(self, in_flight: int) -> Pressure:
        fits = min(in_flight, self.blocks // ((self.lifetime + 1) // 2))
        usage = min(1.0, in_flight * (self.lifetime + 1) / 2 / self.blocks)
        return Pressure(num_waiting=in_flight - fits, num_running=fits, kv_cache_usage=usage)


@pytest.mark.parametrize(("blocks", "lifetime"), [(1000, 20), (100, 20), (4000, 20), (200, 64)])
def test_it_finds_how_many_requests_fit_and_stays_near(blocks: int, lifetime: int) -> None:
    cache = Cache(blocks, lifetime)
    fits = blocks / ((lifetime + 1) / 2)
    limit, seen = Limit(), []
    for _ in range(400):
        limit = next_limit(limit, cache.pressure(limit.requests), demand(limit.requests), bound=512)
        seen.append(limit.requests)
    assert max(seen[200:]) <= fits
    assert min(seen[200:]) >= 0.5 * fits


def test_when_contexts_grow_it_gives_way_and_when_they_shrink_it_comes_back() -> None:
    limit = Limit()
    levels = []
    for lifetime in (10, 40, 10):
        cache = Cache(1000, lifetime)
        for _ in range(200):
            limit = next_limit(limit, cache.pressure(limit.requests), demand(limit.requests), bound=512)
        levels.append(limit.requests)
    assert levels[1] < levels[0] / 2
    assert levels[2] > levels[1] * 2


TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 7.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.625
vllm:num_preemptions_total{engine="0",model_name="policy"} 3.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
"""


def test_the_numbers_of_vllm_are_read() -> None:
    assert read_pressure(TEXT) == Pressure(num_waiting=2, num_running=7, kv_cache_usage=0.625, num_preemptions=3)


def test_several_engines_behind_one_address_are_taken_together() -> None:
    second = TEXT.replace('engine="0"', 'engine="1"').replace("0.625", "0.75")
    assert read_pressure(TEXT + second) == Pressure(num_waiting=4, num_running=14, kv_cache_usage=0.75, num_preemptions=6)


@pytest.mark.parametrize(
    "text", ["", "python_info 1.0\n", TEXT.replace("kv_cache_usage_perc", "something"), "vllm:num_requests_running{\n"]
)
def test_an_engine_that_keeps_no_statistics_says_nothing(text: str) -> None:
    assert read_pressure(text) is None


@given(st.text(max_size=200))
def test_whatever_comes_is_read_or_refused(text: str) -> None:
    assert read_pressure(text + "\n" + TEXT) is not None
    read_pressure(text)


def test_an_engine_begins_small() -> None:
    assert Limit().requests == FIRST
