"""Where the trainer listens for weights is checked with the settings, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.listening import check_weight_listener
from configs.schema import WeightSyncSettings

LONG = Path("/" + "d" * 99)


def check(**values: Any) -> None:
    check_weight_listener(WeightSyncSettings.model_validate(values))


@pytest.mark.parametrize("transport", ["tcp", "collective"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "lo", "127.0.0.2"])
def test_a_host_of_this_machine_will_do(transport: str, host: str) -> None:
    check(transport=transport, listen_host=host)


@pytest.mark.parametrize(
    "values", [{"transport": "tcp"}, {"transport": "collective"}, {"transport": "file", "directory": "/shared"}]
)
@pytest.mark.parametrize("host", ["203.0.113.7", "300.1.1.1", "a..b", "[a:b]", "eth99"])
def test_a_host_that_is_none_of_this_machine_is_refused_by_name(values: dict[str, str], host: str) -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.listen_host="):
        check(listen_host=host, **values)


@pytest.mark.parametrize("transport", ["shared_memory", "file"])
def test_a_host_is_not_looked_at_where_nobody_listens_at_it(transport: str) -> None:
    check(transport=transport, listen_host="203.0.113.7")


def test_a_directory_too_long_for_its_socket_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.directory=/d+: its socket .* has 108 bytes, expected at most 107"):
        check(transport="file", directory=LONG)


@pytest.mark.parametrize(
    "values",
    [
        {"transport": "file", "directory": LONG.with_name("d" * 98)},
        {"transport": "file", "directory": LONG, "listen_host": "0.0.0.0"},
        {"transport": "tcp", "directory": LONG},
    ],
)
def test_a_long_directory_without_a_socket_in_it_will_do(values: dict[str, Any]) -> None:
    check(**values)
