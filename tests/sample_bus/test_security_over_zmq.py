"""Hub and links over TCP: with keys, with wrong ones, with none, and which addresses are refused."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from console.key_files import new_client
from sample_bus.errors import Insecure, PeerLost
from sample_bus.open import open_hub, open_link
from sample_bus.protocols import Hub, Link
from tests.fakes.samples import make_sample
from tests.sample_bus.ends import HANG_S, ROOT, bus_settings, lease, soon, until
from tests.sample_bus.keys import made_keys


def hub_with(
    keys_dir: Path | None, tmp_path: Path, address: str = "tcp://127.0.0.1:0", **changes: Any
) -> AbstractAsyncContextManager[Hub]:
    return open_hub(
        bus_settings(keys_dir=keys_dir, **changes),
        address=address,
        run="run",
        run_id="run-1",
        incarnation="first",
        quarantine_dir=tmp_path / "quarantine",
    )


def link_with(
    keys_dir: Path | None, address: str, tmp_path: Path, *, role: Literal["rollouter", "console"] = "rollouter", **changes: Any
) -> AbstractAsyncContextManager[Link]:
    return open_link(
        bus_settings(keys_dir=keys_dir, **changes), address=address, name=f"a {role}", role=role, spool_dir=tmp_path / "spool"
    )


async def test_samples_and_requests_travel_with_keys(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", clients=("gpu-2",))
    async with hub_with(keys, tmp_path) as hub, link_with(keys / "for-gpu-2", hub.address, tmp_path) as link:
        await link.wait_connected(HANG_S)
        sample_id = await soon(link.offer(make_sample(task_id="secret")))
        leased = await lease(hub)
        assert (leased.id, leased.sample.task_id) == (sample_id, "secret")


@pytest.mark.parametrize(
    ("client", "said_here", "said_there"),
    [
        ("unlisted", "does not list this client's key", "key not listed"),
        ("another trainer's", "is not its key", "it expects a trainer with another key"),
        ("none", "asks for keys", "it has no keys"),
    ],
)
async def test_link_with_the_wrong_keys_is_told_why_within_its_deadline(
    client: str, said_here: str, said_there: str, tmp_path: Path
) -> None:
    """And the trainer's log names the refusal."""
    keys = made_keys(tmp_path / "keys", clients=("gpu-2",))
    (keys / "clients" / "gpu-2.pub").unlink()
    theirs = {"unlisted": keys / "for-gpu-2", "another trainer's": made_keys(tmp_path / "others"), "none": None}[client]
    with capture_logs() as logs:
        async with hub_with(keys, tmp_path) as hub, link_with(theirs, hub.address, tmp_path, connect_timeout_s=4.0) as link:
            await until(lambda: any(line["event"] == "the trainer cannot be reached" for line in logs))
            with pytest.raises(PeerLost) as by_wait:
                await link.wait_connected(0.1)
            with pytest.raises(PeerLost) as by_offer:
                await soon(link.offer(make_sample()))
            assert hub.rollouter is None
    for error in (by_wait, by_offer):
        assert said_here in str(error.value)
        assert "\n" not in str(error.value)
    assert any(said_there in line.get("problem", "") and line["event"].startswith("client ") for line in logs)


async def test_link_that_is_listed_later_connects_by_itself(tmp_path: Path) -> None:
    """libzmq alone would never try again."""
    keys = made_keys(tmp_path / "keys", clients=("gpu-2",))
    listed = keys / "clients" / "gpu-2.pub"
    entry = listed.read_bytes()
    listed.unlink()
    async with hub_with(keys, tmp_path) as hub, link_with(keys / "for-gpu-2", hub.address, tmp_path) as link:
        with pytest.raises(PeerLost):
            await link.wait_connected(1.0)
        listed.write_bytes(entry)
        await link.wait_connected(HANG_S)
        await soon(link.offer(make_sample(task_id="late")))
        assert (await lease(hub)).sample.task_id == "late"


async def test_trainer_that_restarts_with_its_keys_gets_its_rollouter_back(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    address = f"tcp://127.0.0.1:{_free_port()}"
    async with link_with(keys, address, tmp_path, on_lost="wait") as link:
        for _ in range(2):
            async with hub_with(keys, tmp_path, address) as hub:
                await link.wait_connected(HANG_S)
                await soon(hub.wait_rollouter(HANG_S))


async def test_trainer_whose_address_is_taken_leaves_nothing_open(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    async with hub_with(keys, tmp_path) as hub:
        with pytest.raises(Exception, match="cannot listen"):
            async with hub_with(keys, tmp_path, hub.address):
                pass
        async with link_with(keys, hub.address, tmp_path) as link:
            await link.wait_connected(HANG_S)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:6000", "tcp://192.0.2.1:6000", "tcp://[::]:6000", "tcp://trainer.lab:6000"])
async def test_address_beyond_this_host_is_refused_without_keys_at_both_ends(address: str, tmp_path: Path) -> None:
    """Also for an end that was opened without settings having been loaded."""
    for end in (hub_with(None, tmp_path, address), link_with(None, address, tmp_path)):
        with pytest.raises(Insecure, match=r"make keys with `headrace keys new DIR` and set bus.keys_dir=DIR"):
            async with end:
                pass


async def test_address_beyond_this_host_is_used_without_keys_on_request_with_a_warning(tmp_path: Path) -> None:
    address = f"tcp://0.0.0.0:{_free_port()}"
    with capture_logs() as logs:
        async with (
            hub_with(None, tmp_path, address, allow_insecure=True) as hub,
            link_with(None, hub.address, tmp_path, allow_insecure=True) as link,
        ):
            await link.wait_connected(HANG_S)
    assert any(line["event"] == "bus without keys beyond this host" and line["log_level"] == "warning" for line in logs)


async def test_bus_listens_on_ipv6_loopback(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    async with hub_with(keys, tmp_path, "tcp://[::1]:0") as hub, link_with(keys, hub.address, tmp_path) as link:
        assert hub.address.startswith("tcp://[::1]:")
        await link.wait_connected(HANG_S)


async def test_open_key_file_stops_either_end_before_it_speaks(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    for name in ("server.key", "client.key"):
        (keys / name).chmod(0o644)
    for end in (hub_with(keys, tmp_path), link_with(keys, "tcp://127.0.0.1:1", tmp_path)):
        with pytest.raises(Insecure, match=r"others may read it \(mode 0644\)"):
            async with end:
                pass


async def test_commands_reach_a_run_with_keys(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys")
    new_client(keys, "laptop")
    async with hub_with(keys, tmp_path) as hub:
        words = ["status", "--json", "--address", hub.address, "--timeout-s"]
        code, out, _ = await _headrace(*words, str(HANG_S), "--keys-dir", str(keys / "for-laptop"))
        assert code == 0
        assert json.loads(out)["address"] == hub.address
        code, _, err = await _headrace(*words, "1")
        assert code == 1
        assert "asks for keys" in err


async def _headrace(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "console.cli", *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await soon(process.communicate())
    return process.returncode, out.decode(), err.decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
