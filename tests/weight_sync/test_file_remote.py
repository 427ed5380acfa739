"""Files in a directory that two hosts share, asked for over TCP: here both are this host."""

from __future__ import annotations

import gc
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync import peers
from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import WAIT_S, Outcomes, assert_same, open_descriptors, open_transfer, pull
from weight_sync import AddressTaken, PeerFailed, ProtocolError, WeightServer, receive_weights
from weight_sync import file_remote as remote
from weight_sync.cache import HostCache
from weight_sync.cache_link import Event, Stage
from weight_sync.file_transport import WEIGHTS_FILE, FileStore
from weight_sync.transport import Borrowing

LONG_GONE = "0a0b0c0d-v3"


@pytest.fixture(autouse=True)
def _among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take loopback for a network."""
    monkeypatch.setattr(remote, "is_loopback", lambda host: False)


@contextmanager
def sharing(tmp_path: Path) -> Iterator[tuple[WeightServer, Outcomes, Path]]:
    directory, outcomes = tmp_path / "shared", Outcomes()
    settings = WeightSyncSettings(transport="file", directory=directory, bucket_bytes=1 << 16)
    server = WeightServer(
        settings, socket_dir=tmp_path, dtype=torch.float32, on_staged=outcomes.staged.put, on_failed=outcomes.failed.put
    )
    with server:
        yield server, outcomes, directory


def versions(directory: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in directory.iterdir() if path.name != "lock")


@pytest.mark.parametrize(
    ("host", "directory", "expected"),
    [("127.0.0.1", "/shared", False), ("[::1]", "/shared", False), ("0.0.0.0", None, False), ("10.1.2.3", "/shared", True)],
)
def test_other_hosts_are_served_when_a_directory_is_named_and_the_server_listens_for_them(
    monkeypatch: pytest.MonkeyPatch, host: str, directory: str | None, expected: bool
) -> None:
    monkeypatch.undo()
    settings = WeightSyncSettings.model_validate({"transport": "file", "listen_host": host, "directory": directory})
    assert remote.is_remote(settings) == expected


def test_receivers_map_the_file_that_they_are_named(tmp_path: Path) -> None:
    before = open_descriptors()
    with sharing(tmp_path) as (server, outcomes, directory):
        assert server.address.startswith("file://127.0.0.1:")
        publication = server.publish(weights(1).items(), policy_version=1)
        for engine in ("engine-0", "engine-1"):
            assert_same(pull(server, 1, engine=engine), weights(1))
            assert outcomes.staged.get(timeout=WAIT_S).digest == publication.manifest_digest
        assert versions(directory) == ["v1"]
        for version in (2, 3):
            server.publish(weights(version).items(), policy_version=version)
            assert_same(pull(server, version), weights(version))
        assert versions(directory) == ["v2", "v3"]
    assert versions(directory) == []
    gc.collect()
    assert open_descriptors() <= before


def test_a_loan_stays_readable_after_the_transfer_and_the_server(tmp_path: Path) -> None:
    with sharing(tmp_path) as (server, _, _):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1) as channel:
            received = dict(receive_weights(channel))
            assert isinstance(channel, Borrowing)
            loan = channel.take_loan()
        assert loan is not None
    assert_same(received, weights(1))
    loan.end(unread=True)


def test_live_weights_travel_in_buckets_over_the_same_address(tmp_path: Path) -> None:
    tensors = weights(1)
    with sharing(tmp_path) as (server, _, directory):
        server.publish_live(tensors.items, policy_version=1, why="test")
        assert_same(pull(server, 1), tensors)
        assert versions(directory) == []


def test_a_file_that_cannot_be_seen_from_here_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is not mounted at the receiver: both sides say where they looked."""
    monkeypatch.setattr(FileStore, "path_of", lambda self, snapshot: tmp_path / "elsewhere")
    with sharing(tmp_path) as (server, outcomes, _):
        server.publish(weights(1).items(), policy_version=1)
        with pytest.raises(ProtocolError, match=r"version 1 was said to be in .*/elsewhere"):
            pull(server, 1)
        assert "elsewhere" in outcomes.failed.get(timeout=WAIT_S).reason


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    """B140."""
    with sharing(tmp_path) as (server, outcomes, directory):
        server.publish(weights(1).items(), policy_version=1)
        pull(server, 1)
        outcomes.staged.get(timeout=WAIT_S)
        (path,) = directory.glob(f"*-v1/{WEIGHTS_FILE}")
        with path.open("r+b") as stream:
            stream.seek(-5, 2)
            stream.write(b"\xff\xff")
        with pytest.raises(Exception, match="checksum"):
            pull(server, 1)
        assert "checksum" in outcomes.failed.get(timeout=WAIT_S).reason


def test_one_server_has_the_directory_and_what_a_dead_one_left_goes(tmp_path: Path) -> None:
    (tmp_path / "shared" / LONG_GONE).mkdir(parents=True)
    with sharing(tmp_path) as (server, _, directory):
        assert versions(directory) == []
        server.publish(weights(1).items(), policy_version=1)
        pull(server, 1)
        with pytest.raises(AddressTaken, match="another weight server has"), sharing(tmp_path):
            pass
        assert versions(directory) == ["v1"]
        assert_same(pull(server, 1), weights(1))
    with sharing(tmp_path):
        pass


def test_whoever_lacks_the_token_is_told_no_name(tmp_path: Path) -> None:
    with sharing(tmp_path) as (server, _, _):
        server.publish(weights(1).items(), policy_version=1)
        head, _, rest = server.address.partition("token=")
        stranger = f"{head}token={'0' * 32}{rest[32:]}"
        with pytest.raises(PeerFailed, match="token"):
            peers.open_transfer(stranger, 1)


def test_a_host_cache_takes_the_file_and_lends_it_on(tmp_path: Path) -> None:
    events: queue.Queue[Event] = queue.Queue()
    cache = HostCache(
        WeightSyncSettings(), socket_dir=tmp_path / "cache", dtype=torch.float32, on_event=events.put, serves_others=False
    )
    with cache:
        with sharing(tmp_path) as (server, _, _):
            publication = server.publish(weights(1).items(), policy_version=1)
            cache.stage(
                Stage(
                    nonce="n",
                    address=server.address,
                    policy_version=1,
                    manifest_digest=publication.manifest_digest,
                    timeout_s=WAIT_S,
                )
            )
            assert events.get(timeout=WAIT_S).kind == "staged"
        with peers.open_transfer(cache.address, 1) as channel:
            assert_same(dict(receive_weights(channel)), weights(1))
