"""Cache provenance: a run is called clean only if it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.engine import Generation
from rollouter.engine_member import Held
from rollouter.provenance import with_provenance


def held(version: int, incarnation: str = "a") -> Held:
    return Held(incarnation=incarnation, policy_version=version)


def generated(*versions: int) -> Generation:
    """One token a version, marked as the decoder marks it."""
    n = len(versions)
    return Generation(
        token_ids=np.ones(n, np.int32),
        logprobs=np.zeros(n, np.float32),
        version_starts=np.arange(n, dtype=np.int32),
        versions=np.array(versions, np.int32),
        kept_cache=(np.arange(n) > 0).astype(np.uint8),
        stop_reason="length" if n else "abort",
    )


@pytest.mark.parametrize(
    ("versions", "asked", "now", "fresh", "expected"),
    [
        ((3,), held(3), held(3), None, [0]),
        ((3, 4), held(3), held(4), None, [0, 1]),
        ((4,), held(3), held(4), None, [1]),  # on its way at a pause that kept the caches
        ((4, 5), held(3), held(5), held(4), [0, 1]),  # on its way at a pause that emptied the prefix cache
        ((4,), held(3), held(4), held(2), [1]),
        ((3,), held(3), held(3, "b"), None, [1]),  # the same number of another trainer: nobody can tell
        ((4,), held(3), held(4, "b"), held(4, "b"), [1]),
        ((), held(3), held(4), None, []),
    ],
)
def test_the_first_run_is_clean_only_for_its_own_version_or_after_an_emptied_cache(
    versions: tuple[int, ...], asked: Held, now: Held, fresh: Held | None, expected: list[int]
) -> None:
    assert with_provenance(generated(*versions), asked=asked, held=now, fresh=fresh).kept_cache.tolist() == expected


@dataclass
class Request:
    """What it was asked with, the weights that sampled it, and whether each of these found another's work in the cache."""

    asked: Held
    runs: list[tuple[Held, bool]] = field(default_factory=list)


@dataclass
class Engine:
    """Its prefix cache by cache salt: whose weights computed what lies there."""

    now: Held
    fresh: Held | None = None
    cached: dict[str, set[Held]] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)

    def sample(self) -> None:
        """Every running request samples a token, and leaves keys and values under its salt."""
        for request in self.running:
            if not request.runs or request.runs[-1][0] != self.now:
                found = self.cached.setdefault(request.asked.cache_salt, set())
                request.runs.append((self.now, bool(found - {self.now})))
                found.add(self.now)

    def commit(self, to: Held, *, empties: bool) -> list[Request]:
        """New weights; returns the requests that this ended."""
        ended, self.now = (self.running if empties else []), to
        if empties:
            self.running, self.cached, self.fresh = [], {}, to
        return ended


STEPS = ["keep", "keep", "empty", "other trainer", "go on", *["send", "arrive", "sample", "end"] * 2]


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), min_size=20, max_size=60))
def test_no_run_is_called_clean_that_read_what_other_weights_computed(steps: list[tuple[str, int]]) -> None:
    """Requests are sent, arrive any number of commits later, and go on under whatever is loaded.

    Those with one cache salt share what they find; a turn may go on under the salt that it began with. Two trainers may give
    the same number to different weights.
    """
    engine = Engine(held(0))
    on_their_way: list[Request] = []
    asked_before: list[Held] = []
    for step, choice in steps:
        ended: list[Request] = []
        before, fresh_before = engine.now, engine.fresh
        match step:
            case "keep" | "empty":
                ended = engine.commit(held(before.policy_version + 1, before.incarnation), empties=step == "empty")
            case "other trainer":
                version = max(before.policy_version - choice, 0)
                ended = engine.commit(held(version, before.incarnation + "b"), empties=choice % 2 == 0)
            case "send":
                on_their_way.append(Request(engine.now))
            case "go on" if asked_before:
                asked = asked_before[choice % len(asked_before)]
                on_their_way.append(Request(asked if asked.incarnation == engine.now.incarnation else engine.now))
            case "arrive" if on_their_way:
                engine.running.append(on_their_way.pop(choice % len(on_their_way)))
            case "sample":
                engine.sample()
            case "end" if engine.running:
                ended = [engine.running.pop(choice % len(engine.running))]
        asked_before += [request.asked for request in ended]
        for request in ended:  # the answer is read before the commit has ended, or after
            assert_honest(request, held_then=before, fresh=fresh_before)
            assert_honest(request, held_then=engine.now, fresh=engine.fresh)


def assert_honest(request: Request, *, held_then: Held, fresh: Held | None) -> None:
    labels: list[int] = []
    stale: list[bool] = []
    for weights, found in request.runs:  # the engine knows numbers only
        if labels and labels[-1] == weights.policy_version:
            stale[-1] = True
        else:
            labels.append(weights.policy_version)
            stale.append(found)
    marked = with_provenance(generated(*labels), asked=request.asked, held=held_then, fresh=fresh)
    for is_stale, kept in zip(stale, marked.kept_cache.tolist(), strict=True):
        assert kept or not is_stale, (request, held_then, fresh)
