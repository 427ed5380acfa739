"""Age at the moment of consumption, and what each setting makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Settings
from sample_bus.sample import NO_VERSION, Sample
from tests.fakes.samples import lease, lease_closed, make_closed, make_sample
from trainer.aged import AgeRule, Awaited, Lineage, OnStale, Weighting, awaited, by_age, drop_reason, oldest_of, weights_of
from trainer.groups import DropReason, Group, make_group

OWN = Lineage(incarnation="first", origin_version=4)
versions = st.integers(0, 30)


def group(*versions: int, group_id: str = "g", **changes: Any) -> Group:
    return make_group(
        group_id,
        [
            lease(make_sample(policy_version=version, seat=seat, group_size=len(versions), group_id=group_id, **changes), seat)
            for seat, version in enumerate(versions)
        ],
    )


def mixed(*runs: tuple[int, int], **changes: Any) -> Sample:
    """A prompt of two tokens, then `length` tokens of each version."""
    lengths = [length for _, length in runs]
    starts = np.cumsum([0, 2, *lengths])[:-1].astype(np.int32)
    return make_sample(
        prompt=[1, 2],
        reply=[3] * sum(lengths),
        version_starts=starts,
        versions=np.array([NO_VERSION, *(version for version, _ in runs)], np.int32),
        **changes,
    )


def rule(on_stale: OnStale, max_staleness: int | None = 2, **changes: Any) -> AgeRule:
    return AgeRule(on_stale=on_stale, max_staleness=max_staleness, **changes)


# ── age ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(versions, versions)
def test_age_counts_from_the_oldest_token_waiting_included(version: int, now: int) -> None:
    """B30"""
    sample = mixed((version, 2), (version + 3, 1))
    assert OWN.age(sample, now) == now - version


def test_what_no_policy_sampled_has_no_age() -> None:
    sample = make_sample(reply=[])
    assert OWN.age(sample, 9) == 0
    assert not OWN.has_lost(sample)
    assert oldest_of(make_group("g", [lease(sample, 0)]), OWN) is None


@given(versions, st.integers(0, 10), st.integers(0, 10))
def test_a_version_that_a_rollback_lost_counts_as_the_one_rolled_back_to(version: int, origin: int, since: int) -> None:
    """B48: the trainer stands at a lower number than the sample's; the sample is kept, and ages from the origin on."""
    own = Lineage(incarnation="second", origin_version=origin)
    sample = make_sample(policy_version=version, incarnation="first")
    now = origin + since
    assert own.age(sample, now) == now - min(version, origin) >= 0
    assert own.has_lost(sample) == (version > origin)
    assert not Lineage(incarnation="first", origin_version=origin).has_lost(sample)


# ── drop and retry ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(versions, min_size=1, max_size=5), versions, st.integers(0, 5), st.sampled_from(OnStale))
def test_a_group_stands_or_falls_with_its_oldest_member(of_members: list[int], now: int, bound: int, on_stale: OnStale) -> None:
    """B32 B33"""
    reason = drop_reason(group(*of_members), rule(on_stale, bound), OWN, policy_version=now)
    too_old = now - min(of_members) > bound
    assert (reason is not None) == (too_old and on_stale is not OnStale.DOWNWEIGHT)


@pytest.mark.parametrize("on_stale", list(OnStale))
def test_without_a_bound_nothing_is_too_old(on_stale: OnStale) -> None:
    assert drop_reason(group(0), rule(on_stale, None), OWN, policy_version=99) is None
    assert Weighting.of(rule(on_stale, None), OWN, policy_version=99) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t#1@p", DropReason.STALE_RETRIED),
        ("t#1@p+1", DropReason.STALE_RETRIED),
        ("t#1@p+2", DropReason.STALE_FOR_GOOD),
        ("t#1@p+9", DropReason.STALE_FOR_GOOD),
    ],
)
def test_a_task_is_issued_again_a_bounded_number_of_times(name: str, reason: DropReason) -> None:
    """B34"""
    assert rule(OnStale.RETRY, max_requeues=2).reason_for(name) is reason
    assert rule(OnStale.DROP, max_requeues=2).reason_for(name) is DropReason.STALE
    assert rule(OnStale.RETRY, max_requeues=2).reason_for("a foreign name") is DropReason.STALE


# ── downweight ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.tuples(versions, st.integers(1, 4)), min_size=1, max_size=4),
    versions,
    st.integers(0, 4),
    st.one_of(st.floats(0.01, 0.99), st.just(1.0)),
)
def test_weights_are_those_of_the_formula(runs: list[tuple[int, int]], now: int, bound: int, base: float) -> None:
    runs = [run for at, run in enumerate(runs) if not at or run[0] != runs[at - 1][0]]
    sample = mixed(*runs)
    weighting = Weighting.of(rule(OnStale.DOWNWEIGHT, bound, weight_base=base), OWN, policy_version=now)
    assert weighting is not None
    expected = [1.0, 1.0]
    for version, length in runs:
        expected += [base ** max(0, now - version - bound)] * length
    np.testing.assert_allclose(weighting.weights(sample), np.array(expected, np.float32), rtol=1e-6)
    assert weighting.is_down(sample) == (base < 1 and min(version for version, _ in runs) < now - bound)
    assert Weighting.from_plain(weighting.as_plain()) == weighting


def test_tokens_of_a_lost_version_are_weighted_from_the_origin_on() -> None:
    weighting = Weighting(base=0.5, max_staleness=1, policy_version=7, incarnation="second", origin_version=4)
    assert weighting.weights(make_sample(policy_version=9, incarnation="first", prompt=[1], reply=[2])).tolist() == [1.0, 0.25]


def test_all_count_whole_under_every_other_setting() -> None:
    assert all(
        Weighting.of(rule(on_stale), OWN, policy_version=9) is None
        for on_stale in OnStale
        if on_stale is not OnStale.DOWNWEIGHT
    )
    assert weights_of(None, [make_sample()]) is None
    assert Weighting.from_plain({}) is None


# ── wait ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def wait(on_stale: OnStale = OnStale.WAIT, **changes: Any) -> Awaited | None:
    """At version 6 with bound 2: version 7 makes what is older than version 5 too old."""
    around: dict[str, Any] = {"ready": [], "open_groups": [], "oldest_in_flight": None, "groups_per_step": 2}
    return awaited(rule(on_stale), policy_version=6, **(around | changes))


def test_a_version_is_held_for_rollouts_that_it_would_make_too_old() -> None:
    assert wait(oldest_in_flight=5) is None
    held = wait(oldest_in_flight=4)
    assert held is not None
    assert str(held) == "version 7 is held (on_stale=wait) for rollouts in flight since version 4"


def test_a_version_is_held_for_the_siblings_of_what_it_would_make_too_old() -> None:
    held = wait(open_groups=[4, 4, 5, None], oldest_in_flight=6)
    assert held is not None
    assert str(held).endswith("for the missing seats of 2 groups")


def test_nothing_is_awaited_that_is_too_old_already() -> None:
    assert wait(open_groups=[3], oldest_in_flight=3) is None


def test_nothing_is_awaited_that_the_step_could_not_take() -> None:
    assert wait(ready=[4, 4], oldest_in_flight=4) is None
    assert wait(ready=[4, 5, None], oldest_in_flight=4) is not None


@pytest.mark.parametrize("on_stale", [one for one in OnStale if one is not OnStale.WAIT])
def test_no_other_setting_holds_a_version(on_stale: OnStale) -> None:
    assert wait(on_stale, oldest_in_flight=4, open_groups=[4]) is None


@given(st.lists(st.one_of(st.none(), versions), max_size=6))
def test_the_oldest_groups_go_first_and_equals_keep_their_order(of_groups: list[int | None]) -> None:
    groups = [
        group(version, group_id=f"g{at}") if version is not None else make_group(f"g{at}", [lease_closed(make_closed(), at)])
        for at, version in enumerate(of_groups)
    ]
    keys = [(99 if version is None else version, at) for at, version in enumerate(of_groups)]
    assert [one.group_id for one in by_age(groups, OWN)] == [f"g{at}" for _, at in sorted(keys)]


def test_the_rule_is_that_of_the_settings() -> None:
    settings = Settings(max_staleness=3, on_stale="retry")
    assert AgeRule.of(settings) == AgeRule(max_staleness=3, on_stale=OnStale.RETRY, wait_s=120.0)
