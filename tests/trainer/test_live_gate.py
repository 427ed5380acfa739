"""Weights change only after those who need them have them: whom a trainer waits for without a snapshot."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import WeightSyncSettings
from sample_bus.messages import EngineStatus, RollouterState, RollouterStatus, WeightRound
from tests.fakes.fake_control import FakeControl
from tests.weight_sync.peers import open_transfer
from trainer.live_gate import LiveGate, awaited_of
from trainer.publisher import Publisher
from weight_sync import PeerFailed, receive_weights
from weight_sync.cache import RECEIVER

ENGINES = ("engine-0", "engine-1")
names = st.frozensets(st.sampled_from([*ENGINES, "engine-2"]))


@given(names, names)
def test_with_a_host_cache_it_alone_is_awaited_unless_all_engines_have_the_version(
    staged: frozenset[str], engines: frozenset[str]
) -> None:
    held = awaited_of(staged=staged, engines=engines, has_rollouter=True, has_cache=True)
    assert held == (frozenset() if engines and engines <= staged else {RECEIVER})
    assert not awaited_of(staged=staged | {RECEIVER}, engines=engines, has_rollouter=True, has_cache=True)


@given(names, names)
def test_without_one_each_living_engine_is_awaited(staged: frozenset[str], engines: frozenset[str]) -> None:
    assert awaited_of(staged=staged, engines=engines, has_rollouter=True, has_cache=False) == engines - staged


@given(names, names, st.booleans())
def test_nobody_is_awaited_while_there_is_no_rollouter(
    staged: frozenset[str], engines: frozenset[str], has_cache: bool
) -> None:
    assert not awaited_of(staged=staged, engines=engines, has_rollouter=False, has_cache=has_cache)


def test_a_gate_that_nobody_opens_opens_at_its_deadline() -> None:
    gate = LiveGate(policy_version=1, why="test", due_at=0.0)
    gate.look(engines=set(), has_rollouter=True, has_cache=True)
    assert not gate.wait()
    assert not gate.is_open
    assert "host-cache to stage policy version 1" in str(gate)


# ── the publisher ────────────────────────────────────────────────────────────────────────────────────────────────────


def publisher_of(control: FakeControl, directory: Path, said: asyncio.Queue[str], **settings: Any) -> Publisher:
    return Publisher(
        control,
        WeightSyncSettings.model_validate({"snapshot": "never", **settings}),
        incarnation="first",
        socket_dir=directory,
        dtype=torch.float32,
        loop=asyncio.get_running_loop(),
        on_wait=said.put_nowait,
    )


async def connect(control: FakeControl) -> None:
    engines = tuple(EngineStatus(name=name, state="serving", policy_version=0) for name in ENGINES)
    await control.publish("rollouter", RollouterStatus(state=RollouterState.GENERATING, engines=engines))


def address_of(control: FakeControl) -> str:
    announced = control.get("round", WeightRound)
    assert announced is not None
    return announced.address


def pull(address: str, version: int, receiver: str) -> dict[str, torch.Tensor]:
    with open_transfer(address, version, receiver=receiver) as channel:
        return dict(receive_weights(channel))


async def test_a_change_waits_until_the_host_cache_holds_the_version(tmp_path: Path) -> None:
    """The trainer says what it waits for, and why; what the cache received is what was announced."""
    control, said, loop = FakeControl(), asyncio.Queue[str](), asyncio.get_running_loop()
    await connect(control)
    weights = {"a": torch.arange(1000.0)}
    with publisher_of(control, tmp_path, said) as publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await publisher.announce(weights.items, policy_version=1, executor=executor)

            def step() -> None:
                publisher.before_change()
                weights["a"].zero_()

            stepping = loop.run_in_executor(executor, step)
            waits_for = await said.get()
            assert not stepping.done()
            received = await asyncio.to_thread(pull, address_of(control), 1, RECEIVER)
            await stepping
            assert torch.equal(received["a"], torch.arange(1000.0))
            assert not weights["a"].any()
            assert await said.get() == ""
    assert "host-cache to stage policy version 1" in waits_for
    assert "weight_sync.snapshot=never" in waits_for


async def test_without_a_cache_a_change_waits_for_every_living_engine(tmp_path: Path) -> None:
    control, said, loop = FakeControl(), asyncio.Queue[str](), asyncio.get_running_loop()
    await connect(control)
    weights = {"a": torch.arange(1000.0)}
    with publisher_of(control, tmp_path, said, host_cache=False) as publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await publisher.announce(weights.items, policy_version=1, executor=executor)
            stepping = loop.run_in_executor(executor, publisher.before_change)
            await asyncio.to_thread(pull, address_of(control), 1, "engine-0")
            assert not stepping.done()
            await asyncio.to_thread(pull, address_of(control), 1, "engine-1")
            await stepping


async def test_a_change_goes_on_at_the_stage_deadline_and_the_version_is_withdrawn(tmp_path: Path) -> None:
    """B02: nobody stages; who comes later is refused with the reason, and gets the next version."""
    control, said, loop = FakeControl(), asyncio.Queue[str](), asyncio.get_running_loop()
    await connect(control)
    weights = {"a": torch.arange(1000.0)}
    with publisher_of(control, tmp_path, said, stage_timeout_s=0.2) as publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await publisher.announce(weights.items, policy_version=1, executor=executor)
            await loop.run_in_executor(executor, publisher.before_change)
            with pytest.raises(PeerFailed, match="served from the live weights, which have changed"):
                await asyncio.to_thread(pull, address_of(control), 1, RECEIVER)
            await publisher.announce(weights.items, policy_version=2, executor=executor)
            received = await asyncio.to_thread(pull, address_of(control), 2, RECEIVER)
            assert torch.equal(received["a"], weights["a"])
            await loop.run_in_executor(executor, publisher.before_change)


async def test_a_copy_holds_nobody_up_and_neither_does_a_version_that_nobody_waits_for(tmp_path: Path) -> None:
    control, said, loop = FakeControl(), asyncio.Queue[str](), asyncio.get_running_loop()
    with publisher_of(control, tmp_path, said) as publisher, ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            await loop.run_in_executor(executor, publisher.before_change)
            await publisher.announce(lambda: [("a", torch.ones(3))], policy_version=1, executor=executor)
            await loop.run_in_executor(executor, publisher.before_change)
    assert said.empty()


async def test_a_publisher_that_closes_lets_the_training_thread_go(tmp_path: Path) -> None:
    control, said, loop = FakeControl(), asyncio.Queue[str](), asyncio.get_running_loop()
    await connect(control)
    with ThreadPoolExecutor(1) as executor:
        async with asyncio.timeout(60):
            with publisher_of(control, tmp_path, said) as publisher:
                await publisher.announce(lambda: [("a", torch.ones(3))], policy_version=1, executor=executor)
                stepping = loop.run_in_executor(executor, publisher.before_change)
                await said.get()
            await stepping
