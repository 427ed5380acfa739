"""Sockets lie in a private directory under a short path; cores are shared without overlap."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.cpu import core_shares
from configs.errors import ConfigError
from configs.paths import bus_address, cache_dir, held_alone, socket_dir, sockets_of
from configs.schema import Settings


def test_socket_path_is_short_under_a_long_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B136: a long TMPDIR and a long run name."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    directory = socket_dir(Settings(run_dir=tmp_path / ("y" * 200)))
    assert len(os.fsencode(directory)) < 80
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.rmdir()


def test_same_run_dir_means_same_socket_and_another_means_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative, absolute = Settings(run_dir=Path("a")), Settings(run_dir=tmp_path / "a")
    assert bus_address(relative) == bus_address(absolute)
    assert bus_address(relative) != bus_address(Settings(run_dir=Path("b")))


def test_a_socket_directory_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", short.name)
    settings = Settings(run_dir=tmp_path / "run")
    socket_dir(settings)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with short, pytest.raises(ConfigError, match="belongs to user"):
        socket_dir(settings)


def test_looking_an_address_up_makes_no_directory(tmp_path: Path) -> None:
    address = bus_address(Settings(run_dir=tmp_path / "run"))
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_the_last_daemon_to_leave_takes_the_socket_directory_away(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path / "run")
    with sockets_of(settings) as directory:
        with sockets_of(settings):
            (directory / "bus").touch()
        assert directory.is_dir()
        (directory / "bus").unlink()
    assert not directory.exists()


def test_given_address_is_kept() -> None:
    settings = Settings.model_validate({"bus": {"address": "tcp://127.0.0.1:6000"}})
    assert bus_address(settings) == "tcp://127.0.0.1:6000"


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "c"))
    assert cache_dir() == tmp_path / "c"
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "headrace"


@given(st.sets(st.integers(0, 255), min_size=1))
def test_core_shares_cover_the_cores_and_are_disjoint_where_they_can_be(cores: set[int]) -> None:
    shares = core_shares(tuple(cores))
    assert set(shares.engine) | set(shares.trainer) == cores
    if len(cores) > 1:
        assert not set(shares.engine) & set(shares.trainer)


def test_a_file_is_held_by_one_process_alone_and_let_go_when_it_dies(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    program = (
        "import sys\nfrom pathlib import Path\nfrom configs.paths import held_alone\n"
        "with held_alone(Path(sys.argv[1])):\n    print('held', flush=True)\n    input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError), held_alone(lock):
        pass
    holder.kill()
    holder.wait(30)
    with held_alone(lock):
        assert lock.exists()
