"""Versions that come faster than an engine stages one: it gets on at its own speed, and is not sent from one to the next."""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from configs.schema import BusSettings, WeightSyncSettings
from rollouter.admission import HeldVersion
from rollouter.follow import Follower, TrainerReplaced
from rollouter.reports import Reports
from sample_bus.messages import WeightRound
from sample_bus.open import open_hub, open_link
from tests.fakes.fake_control import FakeControl
from tests.fakes.fake_engine import FakeEngine
from tests.weight_sync.peers import open_transfer, weights
from trainer.publisher import Publisher
from weight_sync import receive_weights

DEADLINE_S = 60.0
NEWEST = 8


class SlowNetwork:
    """Receives what an engine stages; the first transfer ends when `goes_on` is set."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.staged: list[int] = []

    async def stage(self, announced: WeightRound, engine: str, nonce: str) -> None:
        with open_transfer(announced.address, announced.policy_version, receiver=engine, nonce=nonce) as channel:
            stream = receive_weights(channel)
            received = dict([await asyncio.to_thread(next, stream)])
            self.begun.set()
            await self.goes_on.wait()
            received |= await asyncio.to_thread(dict, stream)
        expected = weights(announced.policy_version)
        assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        self.staged.append(announced.policy_version)


async def test_a_transfer_under_way_is_finished_and_committed_and_the_newest_version_is_next() -> None:
    network = SlowNetwork()
    engine = FakeEngine(on_stage=network.stage)
    held: list[HeldVersion | None] = []
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-fast-")))
        address = f"ipc://{directory}/bus"
        names = {"run": "test", "run_id": "run-1", "incarnation": "first"}
        bus = BusSettings()
        hub = await stack.enter_async_context(open_hub(bus, address=address, quarantine_dir=directory, **names))
        link = await stack.enter_async_context(
            open_link(bus, address=address, name="rollouter", role="rollouter", spool_dir=directory / "spool")
        )
        executor = stack.enter_context(ThreadPoolExecutor(1))
        publisher = stack.enter_context(
            Publisher(
                hub,
                WeightSyncSettings(bucket_bytes=1 << 16),
                incarnation="first",
                socket_dir=directory,
                dtype=torch.float32,
                loop=asyncio.get_running_loop(),
            )
        )
        follower = Follower(
            engines=engine, control=link, reports=Reports(link, bus), catch_up_timeout_s=DEADLINE_S, on_held=held.append
        )
        following = asyncio.create_task(follower.run())
        stack.callback(following.cancel)
        for version in range(1, NEWEST + 1):
            tensors = weights(version)
            await publisher.announce(lambda tensors=tensors: iter(tensors.items()), policy_version=version, executor=executor)  # type: ignore[misc]
            await network.begun.wait()
        network.goes_on.set()
        await publisher.wait_committed(NEWEST, timeout_s=DEADLINE_S)
    assert network.staged == [1, NEWEST]
    assert [version.policy_version for version in held if version is not None] == [1, NEWEST]


async def test_a_wait_for_a_staging_ends_when_another_trainer_announces() -> None:
    control = FakeControl()
    follower = Follower(engines=FakeEngine(), control=control, reports=None, catch_up_timeout_s=1.0)  # type: ignore[arg-type]
    announced = WeightRound(
        policy_version=1, incarnation="a", address="", manifest_digest="", num_tensors=0, total_bytes=0, announced_at=0.0
    )
    await control.publish("round", announced)
    await control.publish("round", announced.model_copy(update={"policy_version": 2}))
    await control.publish("round", announced.model_copy(update={"incarnation": "b"}))
    with pytest.raises(TrainerReplaced):
        await follower.wait_staged(announced, "engine-0", "n")
