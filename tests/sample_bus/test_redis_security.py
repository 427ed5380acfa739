"""Users, passwords and TLS of a real redis-server; the rules are those of docs/redis.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from sample_bus.errors import BusError, Insecure, NotDurable
from sample_bus.redis_open import is_served
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import HANG_S, ROOT, bus_settings, hub_at, link_to, soon
from tests.sample_bus.redis_server import Certificates, RedisServer, redis_server

USERS = ("trainer", "rollouter", "console")


def _documented_rules() -> list[list[str]]:
    lines = (ROOT / "docs" / "redis.md").read_text().splitlines()
    rules = [line.replace("headrace:mine:", "headrace:run:").split() for line in lines if line.startswith("ACL SETUSER")]
    assert [rule[2] for rule in rules] == [*USERS, "default"]
    return rules


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    """A server with the documented users; each one's password is its name."""
    with redis_server() as server:
        for rule in _documented_rules():
            server.command(*(f">{rule[2]}" if word == ">PASSWORD" else word for word in rule))
        yield server


def _as(user: str, directory: Path, *, password: str | None = None) -> dict[str, Any]:
    file = directory / f"{user}.password"
    file.write_text(user if password is None else password)
    file.chmod(0o600)
    return {"transport": "redis", "redis_username": user, "redis_password_file": file}


async def test_the_documented_rules_are_enough(guarded: RedisServer, tmp_path: Path) -> None:
    address = guarded.address
    as_trainer, as_rollouter = _as("trainer", tmp_path), _as("rollouter", tmp_path)
    async with (
        hub_at(address, **as_trainer) as hub,
        link_to(address, **as_rollouter) as link,
        link_to(address, name="watcher", role="console", **_as("console", tmp_path)) as console,
    ):
        await soon(link.wait_connected(HANG_S))
        await soon(console.wait_connected(HANG_S))
        ids = [await soon(link.offer(make_sample(task_id=f"task-{number}"))) for number in range(3)]
        assert [(await soon(hub.lease())).id for _ in range(3)] == ids
        hub.acknowledge(ids[:2])
        position = hub.position()
    async with hub_at(address, incarnation="second", **as_trainer) as hub, link_to(address, **as_rollouter) as link:
        hub.seek(position)
        await soon(link.wait_connected(HANG_S))
        assert (await soon(hub.lease())).id == ids[2]
        hub.acknowledge([ids[2]])
        hub.commit(hub.position())
        assert is_served(bus_settings(**_as("console", tmp_path)), address, timeout_s=HANG_S)
    assert not is_served(bus_settings(**_as("console", tmp_path)), address, timeout_s=HANG_S)


@pytest.mark.parametrize("user", ["rollouter", "console"])
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("DEL", "headrace:run:run-1:s:rollouter"),
        ("SET", "headrace:run:lock", "mine"),
        ("XADD", "headrace:other:run-1:s:rollouter", "*", "f0", "x"),
        ("XREADGROUP", "GROUP", "trainer", "trainer", "STREAMS", "headrace:run:run-1:s:rollouter", ">"),
        ("CONFIG", "GET", "*"),
        ("PUBLISH", "another", "x"),
    ],
)
def test_the_documented_rules_are_no_more_than_that(guarded: RedisServer, user: str, command: tuple[str, ...]) -> None:
    with (
        guarded.client(username=user, password=user) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)


async def test_wrong_credentials_are_one_line_at_each_end(guarded: RedisServer, tmp_path: Path) -> None:
    wrong = _as("trainer", tmp_path, password="guess")
    expected = rf"redis at 127\.0\.0\.1:{guarded.port} does not take the credentials \(bus\.redis_username"
    with pytest.raises(Insecure, match=expected):
        async with hub_at(guarded.address, **wrong):
            pass
    with pytest.raises(Insecure, match=expected):
        async with link_to(guarded.address, **wrong):
            pass
    with pytest.raises(Insecure, match=expected):
        async with hub_at(guarded.address, transport="redis"):
            pass


async def test_a_user_that_may_not_do_enough_is_told(guarded: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(NotDurable, match=r"\+info"):
        async with hub_at(guarded.address, **_as("rollouter", tmp_path)):
            pass
    with pytest.raises(BusError, match=r"cannot carry the bus: .*permissions"):
        async with hub_at(guarded.address, redis_allow_volatile=True, **_as("console", tmp_path)):
            pass


async def test_samples_travel_over_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with redis_server(*certificates.options(), tls=certificates) as server:
        changes: dict[str, Any] = {"transport": "redis", "redis_ca_file": certificates.authority}
        async with hub_at(server.address, **changes) as hub, link_to(server.address, **changes) as link:
            await soon(link.wait_connected(HANG_S))
            sizes = (3, 20_000, 400_000, 5)  # beyond a record of TLS, and a column in a frame of its own
            ids = [await soon(link.offer(make_sample(reply=[1] * size))) for size in sizes]
            leases = [await soon(hub.lease()) for _ in sizes]
            assert [lease.id for lease in leases] == ids


async def test_a_server_with_another_authority_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificates, other = Certificates(tmp_path), Certificates(tmp_path / "other")
    with redis_server(*certificates.options(), tls=certificates) as server:
        changes: dict[str, Any] = {"transport": "redis", "redis_ca_file": other.authority}
        expected = r"certificate is not trusted \(bus\.redis_ca_file\): .*certificate verify failed"
        with pytest.raises(Insecure, match=expected):
            async with hub_at(server.address, **changes):
                pass
        with pytest.raises(Insecure, match=expected):
            async with link_to(server.address, **changes):
                pass
