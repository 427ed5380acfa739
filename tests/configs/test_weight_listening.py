"""Where the weights may listen: what would send them in plain to other hosts is refused with the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loader import load
from configs.paths import make_run_dir

COLLECTIVE = "weight_sync.transport=collective"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "trainer.lab", "2001:db8::1"])
def test_a_collective_beyond_this_host_has_to_be_asked_for(host: str) -> None:
    with pytest.raises(ConfigError, match=r"in plain .* weight_sync\.transport=tcp \(or set bus\.allow_insecure=true\)"):
        load(None, [COLLECTIVE, f"weight_sync.listen_host={host}"], environment={})
    settings = load(None, [COLLECTIVE, f"weight_sync.listen_host={host}", "bus.allow_insecure=true"], environment={})
    assert settings.weight_sync.listen_host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_a_collective_of_this_host_is_taken(host: str) -> None:
    assert load(None, [COLLECTIVE, f"weight_sync.listen_host={host}"], environment={}).weight_sync.listen_host == host


def test_tcp_beyond_this_host_is_taken_since_it_is_encrypted() -> None:
    settings = load(None, ["weight_sync.transport=tcp", "weight_sync.listen_host=0.0.0.0"], environment={})
    assert settings.weight_sync.transport == "tcp"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_an_address_that_leads_nowhere_is_not_given_to_other_hosts(host: str) -> None:
    """B177"""
    with pytest.raises(ConfigError, match=r"weight_sync\.advertised_host=.* leads nowhere from other hosts"):
        load(None, ["weight_sync.listen_host=0.0.0.0", f"weight_sync.advertised_host={host}"], environment={})


def test_a_directory_that_cannot_be_written_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.directory=/proc/nowhere: "):
        make_run_dir(Path("/proc/nowhere"), "weight_sync.directory")
