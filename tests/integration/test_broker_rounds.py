"""The broker dies in any phase of a round of weights: the round, and the one after it, come to their end when it is back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema import WeightSyncSettings
from rollouter.follow import Follower
from rollouter.reports import Reports
from sample_bus.messages import RoundResult, WeightRound
from tests.fakes.fake_engine import FakeEngine
from tests.sample_bus.conformance import brokers
from tests.weight_sync.peers import weights
from trainer.publisher import Publisher
from weight_sync.staging import StagingArea

DEADLINE_S = 120.0
PHASES = ("before the announcement", "announced", "staging", "staged", "committed, not reported")

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class StagingFleet(FakeEngine):
    """A fleet of one engine with the product's staging area; `at` is awaited in each phase of a round."""

    def __init__(self, at: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(on_stage=self._stage)
        self.area = StagingArea(check_manifest=lambda manifest: None)
        self._at = at

    async def sync(self, round: WeightRound, wait_staged: Any) -> list[RoundResult]:
        async def wait_and_load(announced: WeightRound, engine: str, nonce: str) -> None:
            await wait_staged(announced, engine, nonce)
            await self._at("staged")
            self.area.mark_loaded(self.area.get(announced.policy_version, announced.manifest_digest))

        await self._at("announced")
        results = await super().sync(round, wait_and_load)
        await self._at("committed, not reported")
        return results

    async def _stage(self, announced: WeightRound, engine: str, nonce: str) -> None:
        await self._at("staging")
        self.area.stage(announced.address, announced.policy_version, engine=engine, nonce=nonce, timeout_s=DEADLINE_S)


@dataclass
class Rounds:
    publisher: Publisher
    fleet: StagingFleet
    executor: ThreadPoolExecutor

    async def bring(self, version: int) -> dict[str, torch.Tensor]:
        """What the engine holds once the trainer knows that it committed the version."""
        tensors = weights(version)
        await self.publisher.announce(lambda: iter(tensors.items()), policy_version=version, executor=self.executor)
        await self.publisher.wait_committed(version, timeout_s=DEADLINE_S)
        assert self.fleet.area.loaded is not None
        assert self.fleet.area.loaded.policy_version == version
        return self.fleet.area.loaded.tensors


@asynccontextmanager
async def running(broker: brokers.Broker, directory: Path, at: Callable[[str], Awaitable[None]]) -> AsyncIterator[Rounds]:
    fleet = StagingFleet(at)
    with ThreadPoolExecutor(1) as executor:
        async with broker.place.hub() as hub, broker.place.link() as link:
            publisher = Publisher(
                hub,
                WeightSyncSettings(),
                incarnation="first",
                socket_dir=directory,
                dtype=torch.float32,
                loop=asyncio.get_running_loop(),
            )
            follower = Follower(
                engines=fleet, control=link, reports=Reports(link, broker.place.settings()), catch_up_timeout_s=DEADLINE_S
            )
            with publisher:
                following = asyncio.create_task(follower.run())
                yield Rounds(publisher=publisher, fleet=fleet, executor=executor)
                following.cancel()
                await asyncio.wait((following,))
            fleet.area.close()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_broker_killed_in_any_phase_of_a_round_delays_it_and_nothing_else(phase: str) -> None:
    """B02, B134."""
    with tempfile.TemporaryDirectory(prefix="hr-rounds-") as place:
        directory = Path(place)
        async with brokers.running(directory, {"on_lost": "wait"}) as broker:
            pending = [phase]
            back: list[asyncio.Task[None]] = []

            async def at(now: str) -> None:
                if pending == [now]:
                    pending.clear()
                    await broker.kill()
                    back.append(asyncio.create_task(later(broker)))

            async with asyncio.timeout(2 * DEADLINE_S), running(broker, directory, at) as rounds:
                pending.clear()
                await rounds.bring(1)
                pending.append(phase)
                await at("before the announcement")
                held = await rounds.bring(2)
                assert all(torch.equal(held[name], tensor) for name, tensor in weights(2).items())
                assert back, "the broker was not killed"
                await back[0]
                held = await rounds.bring(3)
                assert all(torch.equal(held[name], tensor) for name, tensor in weights(3).items())


async def later(broker: brokers.Broker) -> None:
    """The broker comes back after a while without it."""
    await asyncio.sleep(1.0)
    await broker.restart()
