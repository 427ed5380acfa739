"""How many requests an engine is given at once, found from its queue and its KV cache. Pure: no clock, no await.

Invariant: a limit lies within [1, bound], where the bound is the least of engine.max_requests, engine.max_num_seqs and
rollouter.max_concurrent_rollouts. It rises only while requests wait and every seat is taken, so never beyond what admission
lets in; lowering it takes nothing from requests in flight, it only keeps the next one waiting.

    pressure   requests queue inside the engine, some were preempted, or the KV cache is fuller than FULL   limit * 3/4
    room       all seats are taken, others wait, and the KV cache is less full than ROOMY                   limit + 1/16

Before it has met any pressure, a limit is doubled instead as long as the KV cache is nearly empty. What an engine says before
it has looked at half of what it was given counts for nothing: its cache is empty then.
A limit that was lowered is not lowered again before the requests in flight have come down to it. Without the engine's own
numbers, pressure is that a token takes SLOW times as long as in the best interval, and room that it takes less than half of
that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

FULL = 0.92
"""Share of KV blocks in use beyond which the next token of some request may find none."""
ROOMY = 0.75
NEARLY_EMPTY = 0.2
"""Below it a limit that never met any pressure is doubled."""
DECREASE = 0.75
INCREASE = 1 / 16
"""Of the limit, at least one."""
FIRST = 8
"""Where an engine begins."""
SLOW = 4.0
FORGETTING = 1.02
"""By how much the best token time is let rise at each look, since contexts grow over a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What an engine says of itself (vLLM's `/metrics`)."""

    num_waiting: int
    """Requests queued inside the engine."""
    num_running: int
    kv_cache_usage: float
    """0 to 1."""
    num_preemptions: int = 0
    """Since it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the pool knows of the engine at the same moment."""

    in_flight: int
    num_waiting: int
    """Requests that wait for a seat at any engine."""
    seconds_per_token: float | None
    """Median over the requests that ended since the look before; None: none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The limit of one engine and what it was found from."""

    requests: int = FIRST
    is_starting: bool = True
    """No pressure was seen yet."""
    num_preemptions: int = 0
    best_seconds_per_token: float | None = None


def bound_of(*, max_requests: int | None, max_num_seqs: int, max_concurrent_rollouts: int) -> int:
    """Requests that an engine may be given at once under these settings; at least one."""
    return max(1, min(max_requests or max_num_seqs, max_num_seqs, max_concurrent_rollouts))


def next_limit(limit: Limit, pressure: Pressure | None, demand: Demand, *, bound: int) -> Limit:
    """The limit after one look. pressure: None where the engine's own numbers cannot be had."""
    limit = replace(limit, requests=min(limit.requests, bound))
    if pressure is None:
        limit = _with_best(limit, demand.seconds_per_token)
        pressed, roomy = _by_latency(limit, demand.seconds_per_token)
    else:
        pressed = pressure.num_waiting > 0 or pressure.num_preemptions > limit.num_preemptions or pressure.kv_cache_usage > FULL
        has_seen = pressure.num_running + pressure.num_waiting >= demand.in_flight / 2
        roomy = pressure.kv_cache_usage < ROOMY and has_seen
        limit = replace(limit, num_preemptions=pressure.num_preemptions)
    if pressed and demand.in_flight > limit.requests:
        return limit  # the decrease before has not taken effect yet
    if pressed:
        requests = max(1, math.floor(min(limit.requests, max(demand.in_flight, 1)) * DECREASE))
        return replace(limit, requests=requests, is_starting=False)
    if roomy and demand.num_waiting and demand.in_flight >= limit.requests:
        doubles = limit.is_starting and pressure is not None and pressure.kv_cache_usage < NEARLY_EMPTY
        more = limit.requests if doubles else max(1, math.floor(limit.requests * INCREASE))
        return replace(limit, requests=min(bound, limit.requests + more))
    return limit


def _by_latency(limit: Limit, seconds_per_token: float | None) -> tuple[bool, bool]:
    """(pressure, room) from how long a token takes; neither where no request ended."""
    best = limit.best_seconds_per_token
    if seconds_per_token is None or best is None:
        return False, False
    return seconds_per_token > SLOW * best, seconds_per_token < SLOW / 2 * best


def _with_best(limit: Limit, seconds_per_token: float | None) -> Limit:
    if seconds_per_token is None:
        return limit
    before = limit.best_seconds_per_token
    return replace(
        limit, best_seconds_per_token=seconds_per_token if before is None else min(seconds_per_token, before * FORGETTING)
    )


# ── vLLM's own words ─────────────────────────────────────────────────────────────────────────────────────────────────

_WAITING = "vllm:num_requests_waiting"
_RUNNING = "vllm:num_requests_running"
_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTED = "vllm:num_preemptions_total"
_LINE = re.compile(r"^(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(?P<value>\S+)(?:\s+\S+)?$")


def read_pressure(metrics: str) -> Pressure | None:
    """What a Prometheus text says; None when a number is missing, as with an engine that keeps no statistics.

    Several engines behind one address (data parallel) are taken together: sums, and the fullest cache.
    """
    found: dict[str, list[float]] = {name: [] for name in (_WAITING, _RUNNING, _USAGE, _PREEMPTED)}
    for name, value in _values(metrics.splitlines()):
        if name in found:
            found[name].append(value)
    if not (found[_WAITING] and found[_RUNNING] and found[_USAGE]):
        return None
    return Pressure(
        num_waiting=int(sum(found[_WAITING])),
        num_running=int(sum(found[_RUNNING])),
        kv_cache_usage=max(found[_USAGE]),
        num_preemptions=int(sum(found[_PREEMPTED])),
    )


def _values(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value) and value >= 0:
            yield match["name"], value
