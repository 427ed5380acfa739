"""The directory of the file transport: one server's at a time, of whichever kind, and no place to lose files of others."""

from __future__ import annotations

import fcntl
import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import assert_same, open_descriptors, pull
from weight_sync import AddressTaken, WeightServer, file_remote
from weight_sync.file_transport import MANIFEST_FILE, WEIGHTS_FILE

LOCAL = {"listen_host": "127.0.0.1"}
REMOTE = {"listen_host": "127.0.0.2"}
Hosts = dict[str, str]


@pytest.fixture(autouse=True)
def _among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the loopback's addresses for a network."""
    monkeypatch.setattr(file_remote, "is_remote", lambda settings: settings.listen_host == REMOTE["listen_host"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


@contextmanager
def serving(directory: Path, hosts: Hosts) -> Iterator[WeightServer]:
    values = {"transport": "file", "directory": directory, "bucket_bytes": 1 << 16, **hosts}
    with WeightServer(
        WeightSyncSettings.model_validate(values),
        socket_dir=directory.parent,
        dtype=torch.float32,
        on_staged=lambda report: None,
        on_failed=lambda failure: None,
    ) as server:
        yield server


@pytest.mark.parametrize("second", [LOCAL, REMOTE])
@pytest.mark.parametrize("first", [LOCAL, REMOTE])
def test_a_second_server_is_refused_and_takes_nothing_of_the_first(directory: Path, first: Hosts, second: Hosts) -> None:
    before = open_descriptors()
    with serving(directory, first) as server:
        server.publish(weights(1).items(), policy_version=1)
        assert_same(pull(server, 1, "a"), weights(1))
        with pytest.raises(AddressTaken), serving(directory, second):
            pass
        assert_same(pull(server, 1, "b"), weights(1))
    gc.collect()
    assert open_descriptors() == before
    with serving(directory, second) as server:
        server.publish(weights(2).items(), policy_version=2)
        assert_same(pull(server, 2), weights(2))


def remove(version: Path) -> None:
    shutil.rmtree(version)


def remove_weights(version: Path) -> None:
    (version / WEIGHTS_FILE).unlink()


def remove_manifest(version: Path) -> None:
    (version / MANIFEST_FILE).unlink()


def truncate(version: Path) -> None:
    (version / WEIGHTS_FILE).write_bytes(b"")


@pytest.mark.parametrize("spoil", [remove, remove_weights, remove_manifest, truncate])
@pytest.mark.parametrize("hosts", [LOCAL, REMOTE])
def test_a_version_that_somebody_removed_is_written_again(directory: Path, hosts: Hosts, spoil: Callable[[Path], None]) -> None:
    with serving(directory, hosts) as server:
        server.publish(weights(1).items(), policy_version=1)
        assert_same(pull(server, 1, "a"), weights(1))
        (version,) = directory.glob("*-v1")
        spoil(version)
        assert_same(pull(server, 1, "b"), weights(1))


def test_a_users_file_in_the_place_of_the_socket_is_left_as_it_is(directory: Path) -> None:
    (directory / "control").write_text("the user's own")
    with pytest.raises(AddressTaken, match="control is there and is no socket"), serving(directory, LOCAL):
        pass
    assert (directory / "control").read_text() == "the user's own"


def test_a_users_file_in_the_place_of_the_lock_is_left_as_it_is(directory: Path) -> None:
    (directory / "lock").write_text("the user's own")
    with serving(directory, LOCAL):
        pass
    assert (directory / "lock").read_text() == "the user's own"


def test_a_server_leaves_an_empty_directory(directory: Path) -> None:
    for hosts in (LOCAL, REMOTE):
        with serving(directory, hosts) as server:
            server.publish(weights(1).items(), policy_version=1)
            assert_same(pull(server, 1), weights(1))
            with pytest.raises(AddressTaken), serving(directory, hosts):
                pass
            assert (directory / "lock").exists()
        assert not list(directory.iterdir())


def test_a_server_removes_only_its_own_socket(tmp_path: Path, directory: Path) -> None:
    with serving(directory, LOCAL):
        (directory / "control").unlink()
        (directory / "control").write_text("the user's own")
    assert (directory / "control").read_text() == "the user's own"


def test_a_file_system_that_cannot_lock_will_do_within_a_host_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with serving(directory, LOCAL) as server:
        server.publish(weights(1).items(), policy_version=1)
        assert_same(pull(server, 1), weights(1))
    with pytest.raises(AddressTaken, match="No locks available"), serving(directory, REMOTE):
        pass
