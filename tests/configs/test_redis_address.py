from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.paths import bus_address
from configs.redis_address import parse, problem_of_redis, redis_insecurity
from configs.schema import Settings


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://localhost", "redis://localhost:6379/0"),
        ("rediss://db.example:6380/3#mine", "rediss://db.example:6380/3#mine"),
        ("redis://[::1]:6379/1", "redis://[::1]:6379/1"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?db=2#mine", "unix:///run/redis.sock?db=2#mine"),
    ],
)
def test_an_address_is_read_and_written_alike(address: str, text: str) -> None:
    assert problem_of_redis(address) is None
    assert str(parse(address)) == text
    assert parse(text) == parse(address)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("redis://user:secret@127.0.0.1/0", "bus.redis_username and bus.redis_password_file"),
        ("redis://:secret@127.0.0.1/0", "bus.redis_password_file"),
        ("redis://127.0.0.1/first", "database 'first'"),
        ("redis://127.0.0.1/-1", "database '-1'"),
        ("redis://127.0.0.1:0/0", "expected redis://HOST:PORT/DB"),
        ("redis://127.0.0.1:99999/0", "expected redis://HOST:PORT/DB"),
        ("redis:///0", "expected redis://HOST:PORT/DB"),
        ("redis://127.0.0.1/0?ssl=no", "?ssl=no is not understood"),
        ("unix://run/redis.sock", "absolute path"),
        ("redis://127.0.0.1/0#a name", "run 'a name' after #"),
    ],
)
def test_an_address_that_cannot_work_is_refused_in_words(address: str, expected: str) -> None:
    problem = problem_of_redis(address)
    assert problem is not None
    assert expected in problem


def test_a_secret_in_an_address_is_not_repeated_by_the_message() -> None:
    assert "hunter2" not in (problem_of_redis("redis://u:hunter2@127.0.0.1/0") or "")


@pytest.mark.parametrize(
    ("address", "has_password", "lacking"),
    [
        ("redis://127.0.0.1:6379/0", False, ()),
        ("redis://[::1]:6379/0", False, ()),
        ("unix:///run/redis.sock", False, ()),
        ("rediss://db.example:6379/0", True, ()),
        ("rediss://db.example:6379/0", False, ("bus.redis_password_file",)),
        ("redis://db.example:6379/0", True, ("rediss://",)),
        ("redis://10.0.0.7:6379/0", False, ("bus.redis_password_file", "rediss://")),
    ],
)
def test_beyond_this_host_a_server_needs_password_and_tls(address: str, has_password: bool, lacking: tuple[str, ...]) -> None:
    problem = redis_insecurity(address, has_password=has_password)
    assert (problem is None) == (not lacking)
    for word in lacking:
        assert word in (problem or "")


def _settings(**bus: object) -> Settings:
    return Settings.model_validate({"name": "mine", "bus": {"transport": "redis", **bus}})


def test_settings_refuse_an_insecure_server_unless_told() -> None:
    with pytest.raises(ValidationError, match=r"redis_password_file.*allow_insecure"):
        _settings(address="redis://10.0.0.7:6379/0")
    assert _settings(address="redis://10.0.0.7:6379/0", allow_insecure=True)


def test_transport_and_address_must_go_together() -> None:
    with pytest.raises(ValidationError, match=r"does not go with bus\.transport=redis"):
        _settings(address="tcp://127.0.0.1:6000")
    with pytest.raises(ValidationError, match=r"does not go with bus\.transport=zmq"):
        Settings.model_validate({"bus": {"address": "redis://127.0.0.1:6379/0"}})


def test_a_run_stands_under_its_name_on_the_server() -> None:
    assert bus_address(_settings()) == "redis://127.0.0.1:6379/0#mine"
    assert bus_address(_settings(address="unix:///run/redis.sock")) == "unix:///run/redis.sock#mine"
    elsewhere = _settings().model_copy(update={"run_dir": Path("elsewhere")})
    assert bus_address(elsewhere) == bus_address(_settings())
