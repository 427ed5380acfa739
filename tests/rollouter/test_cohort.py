"""How many stage a version together: what a collective waits for before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from sample_bus.messages import RoundResult, WeightRound
from tests.rollouter.test_engine_pool import Setting, opened

COLLECTIVE = "collective://127.0.0.1:6100?token=" + "0" * 32


def announced(setting: Setting, version: int, address: str = COLLECTIVE) -> WeightRound:
    return setting.rounds.round(version).model_copy(update={"address": address})


async def sync(setting: Setting, version: int, address: str = COLLECTIVE) -> list[RoundResult]:
    return await setting.pool.sync(announced(setting, version, address), setting.rounds.wait_staged)


async def test_all_workers_of_all_engines_are_one_cohort_of_a_collective(tmp_path: Path) -> None:
    async with opened(tmp_path, num_engines=3) as s:
        s.servers[1].num_workers = 2
        assert all(result.committed for result in await sync(s, 1))
        assert [server.cohorts for server in s.servers] == [[4], [4], [4]]


@pytest.mark.parametrize("address", ["shared_memory:/nowhere", "tcp://10.0.0.1:6100?token=" + "0" * 32])
async def test_over_other_transports_each_comes_alone(tmp_path: Path, address: str) -> None:
    async with opened(tmp_path, num_engines=2) as s:
        assert all(result.committed for result in await sync(s, 1, address))
        assert [server.cohorts for server in s.servers] == [[1], [1]]


async def test_an_engine_that_has_the_version_is_not_counted(tmp_path: Path) -> None:
    """B153: the others of a round that failed on one of them do not stage again, so nobody waits for them."""
    async with opened(tmp_path, num_engines=2) as s:
        s.rounds.refuses.add("engine-1")
        first = await sync(s, 1)
        assert [result.committed for result in first] == [True, False]
        s.rounds.refuses.clear()
        assert all(result.committed for result in await sync(s, 1))
        assert s.servers[0].cohorts == [2]
        assert s.servers[1].cohorts[-1] == 1
