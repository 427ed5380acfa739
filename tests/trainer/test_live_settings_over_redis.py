"""Live settings outlive the broker: the trainer owns them, a Redis server only carries what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.live import LiveSettings
from configs.schema import Settings
from sample_bus.messages import ChangeSettings, LiveSettingsState, SettingsChanged
from sample_bus.protocols import Link
from sample_bus.settings_log import SettingsLog
from tests.sample_bus.ends import HANG_S, hub_at, link_to, soon
from tests.sample_bus.redis_server import RedisServer, redis_server
from trainer.live_settings import LiveSettingsTopic, Moment


@pytest.fixture(params=[True, False], ids=["durable", "forgets everything"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with redis_server(durable=request.param) as running:
        yield running


async def change(link: Link, threshold: float) -> SettingsChanged:
    return await soon(
        link.request(
            "settings.set",
            ChangeSettings(values={"staleness_threshold": threshold}, author="ann"),
            SettingsChanged,
            timeout_s=HANG_S,
        )
    )


async def threshold_at(link: Link, revision: int) -> float:
    async with asyncio.timeout(HANG_S):
        async for state in link.watch("settings", LiveSettingsState):
            if state.revision >= revision:
                return float(state.values["staleness_threshold"])
    raise AssertionError("the bus closed first")


async def test_what_was_set_before_and_while_the_broker_died_is_in_force_everywhere(
    server: RedisServer, tmp_path: Path
) -> None:
    bus: dict[str, Any] = {"transport": "redis", "on_lost": "wait", "redis_allow_volatile": True}
    live, journal = LiveSettings(Settings()), SettingsLog(tmp_path / "settings.log")
    async with hub_at(server.address, **bus) as hub, link_to(server.address, name="rollouter", **bus) as link:
        topic = LiveSettingsTopic(hub, live, journal, moment=lambda: Moment(next_step=1, next_version=1))
        await topic.publish()
        await link.wait_connected(HANG_S)
        await change(link, 1.0)
        await asyncio.to_thread(server.kill)
        changing = asyncio.create_task(change(link, 2.0))
        await asyncio.to_thread(server.start)
        assert (await changing).revision == 2
        assert await threshold_at(link, 2) == 2.0
        async with link_to(server.address, name="another", **bus) as late:
            await late.wait_connected(HANG_S)
            assert await threshold_at(late, 2) == 2.0
            assert (await change(late, 3.0)).revision == 3
        assert await threshold_at(link, 3) == 3.0
    assert [one.revision for one in journal.read()] == [1, 2, 3]
    journal.close()
