"""Groups whose rewards are all alike are dropped and given back to admission, a bounded number of them for each step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import FilterSettings, TrainerSettings
from sample_bus.journal import RecordsDropped
from sample_bus.protocols import Leased
from sample_bus.sample import SampleId
from tests.fakes.fake_consumer import FakeStreams
from tests.fakes.samples import make_sample
from tests.trainer.runs import names, offer_group, records, trainer
from trainer.advantages import group_advantages
from trainer.groups import DropReason, Group
from trainer.signal import SignalFilter, has_signal

DROP = FilterSettings(zero_signal="drop", max_attempts=3)


def _group(rewards: list[float], **columns: Any) -> Group:
    samples = [make_sample(reward=reward, seat=seat, group_size=len(rewards), **columns) for seat, reward in enumerate(rewards)]
    members = [Leased(id=SampleId("r", 1, seat), sample=one, received_at=0.0, nbytes=1) for seat, one in enumerate(samples)]
    return Group(group_id="g", members=tuple(members))


async def test_step_takes_the_groups_with_a_signal_alone_and_the_others_seats_are_given_back(tmp_path: Path) -> None:
    """B77: {1,1} is not in the batch at all, so it counts in no denominator; exactly its seats are refunded."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", signal=SignalFilter(lambda: DROP)) as run:
        offer_group(streams, 0, rewards=(1.0, 1.0))
        offer_group(streams, 1, rewards=(0.0, 1.0))
        offer_group(streams, 2, rewards=(0.0, 0.0))
        offer_group(streams, 3, rewards=(1.0, 0.0))
        batch = await run.take_step()
        assert names(batch) == ["g1", "g3"]
        counts = run.intake.counts()
        assert (counts.dropped, counts.refunded, counts.trained) == ({"zero signal": 4}, 4, 4)
        row = run.intake.signal_row()
        assert (row["groups_seen"], row["groups_without_signal_share"], row["groups_dropped_without_signal"]) == (4, 0.5, 2)
    assert [one.reason for one in records(tmp_path / "log", RecordsDropped)] == ["zero signal"] * 2


async def test_closed_seats_of_a_group_without_signal_are_given_back_with_it(tmp_path: Path) -> None:
    """B76"""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", signal=SignalFilter(lambda: DROP)) as run:
        offer_group(streams, 0, seats=(0, 1, 2), closed=(3,), size=4, rewards=(1.0, 1.0, 1.0))
        await run.rest()
        counts = run.intake.counts()
        assert (counts.refunded, counts.closed, counts.dropped) == (4, 1, {"zero signal": 3})


async def test_after_max_attempts_a_step_fills_all_the_same_and_mixed_rewards_go_on_as_before(tmp_path: Path) -> None:
    """B78: the reward is always 1, then becomes mixed."""
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", signal=SignalFilter(lambda: DROP)) as run:
        step = asyncio.ensure_future(run.take_step())
        for number in range(8):  # 3 attempts of 2 groups are dropped, the next two are kept
            offer_group(streams, number, rewards=(1.0, 1.0))
        assert names(await step) == ["g6", "g7"]
        assert run.intake.counts().dropped == {"zero signal": 12}
        for number, rewards in ((10, (1.0, 1.0)), (11, (0.0, 1.0)), (12, (1.0, 0.0))):
            offer_group(streams, number, rewards=rewards)
        assert names(await run.take_step()) == ["g11", "g12"]
        assert run.intake.counts().dropped == {"zero signal": 14}


async def test_a_live_change_holds_from_the_next_group_on(tmp_path: Path) -> None:
    streams, rule = FakeStreams(), [FilterSettings()]
    async with trainer(streams, tmp_path / "log", signal=SignalFilter(lambda: rule[0])) as run:
        offer_group(streams, 0, rewards=(1.0, 1.0))
        await run.rest()
        rule[0] = DROP
        offer_group(streams, 1, rewards=(1.0, 1.0))
        offer_group(streams, 2, rewards=(1.0, 0.0))
        assert names(await run.take_step()) == ["g0", "g2"]


async def test_what_was_dropped_before_a_restart_is_dropped_again_whatever_is_set_now(tmp_path: Path) -> None:
    streams = FakeStreams()
    async with trainer(streams, tmp_path / "log", signal=SignalFilter(lambda: DROP)) as run:
        offer_group(streams, 0, rewards=(1.0, 1.0))
        offer_group(streams, 1, rewards=(0.0, 1.0))
        await run.rest()
    async with trainer(streams, tmp_path / "log") as run:
        offer_group(streams, 2, rewards=(0.0, 1.0))
        assert names(await run.take_step()) == ["g1", "g2"]
        assert run.intake.counts().dropped == {"zero signal": 2}


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-12]), min_size=1, max_size=6))
def test_a_group_has_a_signal_exactly_when_some_advantage_is_not_zero(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, ["g"] * len(rewards), normalize_by_std=True)
    assert has_signal(_group(rewards), TrainerSettings()) == bool(advantages.any())


def _dense(*rewards: float) -> Group:
    """Rewards all alike, and rewards of the one turn that differ as given."""
    members = []
    for seat, reward in enumerate(rewards):
        column = np.zeros(5, np.float32)
        column[-1] = reward
        sample = make_sample(reward=1.0, seat=seat, group_size=len(rewards), token_rewards=column)
        members.append(Leased(id=SampleId("r", 1, seat), sample=sample, received_at=0.0, nbytes=1))
    return Group(group_id="g", members=tuple(members))


def test_rewards_of_turns_that_differ_are_a_signal_where_those_of_samples_are_alike() -> None:
    assert has_signal(_dense(0.5, 0.0), TrainerSettings())
    assert not has_signal(_dense(0.0, 0.0), TrainerSettings())
    assert not has_signal(_dense(0.5, 0.5), TrainerSettings())  # relative to its siblings no turn stands out


def test_rewards_of_turns_that_do_not_count_are_no_signal() -> None:
    assert not has_signal(_dense(0.5, 0.0), TrainerSettings(dense_weight=0.0))
    trainer = [TrainerSettings(dense_weight=0.0)]
    signal = SignalFilter(lambda: DROP, lambda: trainer[0])
    assert signal.drop_reason(_dense(0.5, 0.0), groups_per_step=1) is DropReason.ZERO_SIGNAL
    trainer[0] = TrainerSettings()  # live
    assert signal.drop_reason(_dense(0.5, 0.0), groups_per_step=1) is None


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=80),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_never_more_is_dropped_for_one_step_than_max_attempts_allow(
    events: list[tuple[bool, bool]], max_attempts: int, groups_per_step: int
) -> None:
    rule = FilterSettings(zero_signal="drop", max_attempts=max_attempts)
    signal = SignalFilter(lambda: rule)
    dropped = 0
    for is_mixed, ends_step in events:
        reason = signal.drop_reason(_group([0.0, float(is_mixed)]), groups_per_step=groups_per_step)
        assert reason is None or (reason is DropReason.ZERO_SIGNAL and not is_mixed)
        assert reason is not None or is_mixed or dropped == max_attempts * groups_per_step
        dropped += reason is not None
        assert dropped <= max_attempts * groups_per_step
        if ends_step:
            signal.taken()
            dropped = 0


@pytest.mark.parametrize("zero_signal", ["keep", "drop"])
def test_the_share_without_a_signal_is_reported_whatever_becomes_of_it(zero_signal: Literal["keep", "drop"]) -> None:
    signal = SignalFilter(lambda: FilterSettings(zero_signal=zero_signal))
    for rewards in ([0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]):
        signal.drop_reason(_group(rewards), groups_per_step=2)
    signal.taken()
    assert signal.row()["groups_without_signal_share"] == 0.75
