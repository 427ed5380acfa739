"""Taking and finding run directories."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from configs.command import remember
from configs.errors import ConfigError
from configs.paths import bus_address, socket_dir
from configs.schema import BusSettings, CheckpointSettings, Settings
from console.errors import NoRun, RunIsLive
from console.run_dirs import address_for, address_of, claim, goes_on, is_live, newest_live, reserved
from sample_bus.open import open_hub
from tests.sample_bus.redis_server import redis_server


@pytest.fixture(autouse=True)
def _own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "r"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


@contextmanager
def _answering(settings: Settings) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_dir(settings) / "bus"))
        server.listen()
        yield


def test_a_used_directory_is_passed_over_for_the_next_number(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path / "runs" / "demo")
    first = claim(settings, is_explicit=False)
    assert first == tmp_path / "runs" / "demo"
    assert claim(settings, is_explicit=False) == first, "an empty directory may be used"
    (first / "metrics.jsonl").touch()
    second = claim(settings, is_explicit=False)
    assert second == tmp_path / "runs" / "demo-2"


def test_a_directory_that_was_named_or_is_resumed_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.jsonl").touch()
    assert claim(Settings(run_dir=tmp_path / "demo"), is_explicit=True) == tmp_path / "demo"
    resuming = Settings(run_dir=tmp_path / "demo", checkpoint=CheckpointSettings(resume="auto"))
    assert claim(resuming, is_explicit=False) == tmp_path / "demo"


@pytest.mark.parametrize("is_explicit", [True, False])
def test_a_run_dir_below_a_file_is_refused_in_one_line(tmp_path: Path, *, is_explicit: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run_dir=\S+/file/x: not a directory; expected a directory that can be made"):
        claim(Settings(run_dir=tmp_path / "file" / "x"), is_explicit=is_explicit)


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_dir=.*file: file exists; expected a directory"):
        claim(Settings(run_dir=tmp_path / "file"), is_explicit=True)


def test_a_directory_is_reserved_for_one_up_from_the_start(tmp_path: Path) -> None:
    with reserved(tmp_path), pytest.raises(RunIsLive, match="another `headrace up`"), reserved(tmp_path):
        pass
    with reserved(tmp_path):
        pass


def test_a_run_of_another_version_does_not_hide_the_live_one(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "live").mkdir()
    live = Settings(run_dir=tmp_path / "live")
    with _answering(live):
        (tmp_path / "old" / "settings.yaml").write_text("a_key_of_then: 1\n")
        assert newest_live(tmp_path) == tmp_path / "live"


def test_a_directory_whose_run_goes_on_is_refused(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path / "demo")
    with _answering(settings), pytest.raises(RunIsLive, match="a run goes on"):
        claim(settings, is_explicit=True)


def test_the_newest_live_run_is_found_and_dead_ones_are_not(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for age, name in ((30, "old"), (20, "live"), (10, "dead")):
        (root / name).mkdir(parents=True)
        os.utime(root / name, (1_000_000 - age, 1_000_000 - age))
    live = Settings(run_dir=root / "live")
    with _answering(live):
        assert newest_live(root) == root / "live"
        assert is_live(address_of(root / "live"))
    with pytest.raises(NoRun, match="no run goes on"):
        newest_live(root)
    with pytest.raises(NoRun, match="0 looked at"):
        newest_live(tmp_path / "nowhere")


def test_a_settings_file_leads_to_the_numbered_run_that_goes_on(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path / "demo")
    (tmp_path / "demo").mkdir()
    second = Settings(run_dir=tmp_path / "demo-2")
    (tmp_path / "demo-2").mkdir()
    assert address_for(settings) == bus_address(settings)
    with _answering(second):
        assert address_for(settings) == bus_address(second)


def test_the_address_that_a_run_was_started_with_is_remembered(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path, bus=BusSettings(address="tcp://127.0.0.1:5999"))
    remember(settings)
    assert address_of(tmp_path) == "tcp://127.0.0.1:5999"


def test_liveness_of_tcp_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert is_live(address)
    assert not is_live(address)


async def test_a_run_on_a_redis_server_is_found_while_its_trainer_is_subscribed(tmp_path: Path) -> None:
    """Two runs of one name are told apart by their run ids."""
    with redis_server() as server:
        bus = BusSettings(transport="redis", address=server.address.partition("#")[0])
        for name, run_id in (("run", "r1"), ("run-2", "r2")):
            settings = Settings(run_dir=tmp_path / name, bus=bus)
            settings.run_dir.mkdir()
            remember(settings)
            (settings.run_dir / "run_id").write_text(run_id)
        async with open_hub(
            bus, address=bus_address(settings), run="run", run_id="r1", incarnation="i", quarantine_dir=tmp_path / "q"
        ):
            assert await asyncio.to_thread(newest_live, tmp_path) == tmp_path / "run"
            assert not goes_on(tmp_path / "run-2")
            with pytest.raises(RunIsLive, match="a run goes on here"):
                claim(settings, is_explicit=True)
        assert not goes_on(tmp_path / "run")
