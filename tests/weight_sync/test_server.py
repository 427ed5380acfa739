"""The weight server: versions, engines that come and go, and everything that may come to its socket."""

from __future__ import annotations

import gc
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
import torch

from configs.schema import WeightSyncSettings
from tests.weight_sync import peers
from tests.weight_sync.peers import weights
from weight_sync import (
    AddressTaken,
    IntegrityError,
    PeerFailed,
    PeerLost,
    StageFailure,
    StageReport,
    TransferTimeout,
    WeightServer,
    WeightSyncError,
    receive_weights,
)
from weight_sync.channel import Bucket
from weight_sync.packets import Fail, Hello, decode, encode
from weight_sync.transport import Receiving, StageRequest, Terms, TransportName
from weight_sync.unix_listener import UnixListener

WAIT_S = 60.0


@dataclass
class Outcomes:
    """What the server reported, in order."""

    staged: queue.Queue[StageReport] = field(default_factory=queue.Queue)
    failed: queue.Queue[StageFailure] = field(default_factory=queue.Queue)


@contextmanager
def serving(
    directory: Path, *, dtype: torch.dtype = torch.float32, **settings: float | str | str
) -> Iterator[tuple[WeightServer, Outcomes]]:
    outcomes = Outcomes()
    server = WeightServer(
        WeightSyncSettings.model_validate({"bucket_bytes": 1 << 16, **settings}),
        socket_dir=directory,
        dtype=dtype,
        on_staged=outcomes.staged.put,
        on_failed=outcomes.failed.put,
    )
    with server:
        yield server, outcomes


def open_transfer(
    server: WeightServer, version: int, nonce: str = "n", engine: str = "e", rank: int = 0, num_ranks: int = 1
) -> Receiving:
    return peers.open_transfer(server.address, version, receiver=engine, nonce=nonce, rank=rank, num_ranks=num_ranks)


def pull(server: WeightServer, version: int, nonce: str = "n", engine: str = "e", **ranks: int) -> dict[str, torch.Tensor]:
    with open_transfer(server, version, nonce, engine, **ranks) as channel:
        return dict(receive_weights(channel))


def assert_same(received: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(received) == list(expected)
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


def refuse(name: str) -> None:
    raise RuntimeError(f"no room for {name}")


@contextmanager
def peer(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.weight_sync.peers", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def mappings() -> set[str]:
    """Where shared memory of ours is mapped into this process."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[0] for line in lines if "memfd:headrace" in line}


def leftovers(before: set[str]) -> list[str]:
    """Shared memory of ours that is mapped here and was not `before`, or has a name on this machine. What other tests of this
    process hold is theirs."""
    return [*(mappings() - before), *(file.name for file in Path("/dev/shm").iterdir() if "weights" in file.name)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_engine_gets_the_published_version_and_the_trainer_hears_of_it(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        publication = server.publish(weights(1).items(), policy_version=5)
        assert_same(pull(server, 5, nonce="n5", engine="engine-0"), weights(1))
        report = outcomes.staged.get(timeout=WAIT_S)
    assert (report.engine, report.nonce, report.policy_version) == ("engine-0", "n5", 5)
    assert report.digest == publication.manifest_digest
    assert publication.num_tensors == 8
    assert publication.total_bytes == 8 * 4 << 16


def test_training_on_does_not_change_what_is_served(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        tensors = weights(1)
        server.publish(tensors.items(), policy_version=1)
        for tensor in tensors.values():
            tensor.zero_()
        assert_same(pull(server, 1), weights(1))


def test_floating_tensors_are_served_in_the_wire_dtype_and_tied_ones_once(tmp_path: Path) -> None:
    """B139."""
    embedding = torch.nn.Parameter(torch.randn(50, 30))
    with serving(tmp_path, dtype=torch.bfloat16) as (server, _):
        server.publish([("embed", embedding), ("head", embedding), ("step", torch.tensor(7))], policy_version=1)
        received = pull(server, 1)
    assert_same(received, {"embed": embedding.detach().bfloat16(), "step": torch.tensor(7)})


def test_the_version_before_is_served_until_the_next_but_one(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        for version in (1, 2, 3):
            server.publish(weights(version).items(), policy_version=version)
        assert_same(pull(server, 2), weights(2))
        assert_same(pull(server, 3), weights(3))
        with pytest.raises(PeerFailed, match=r"version 1 is not served; available: \[2, 3\]"):
            pull(server, 1, nonce="late")
        assert outcomes.failed.get(timeout=WAIT_S).nonce == "late"


def test_nothing_is_allocated_after_the_first_three_versions(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        held = []
        for version in range(8):
            server.publish(weights(version).items(), policy_version=version)
            held.append(server._pool.capacity_bytes)
    assert held[2:] == [held[2]] * 6


def test_two_versions_in_a_row_do_not_mix(tmp_path: Path) -> None:
    """The engine still receives the first while the second is published."""
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1) as channel:
            stream = receive_weights(channel)
            first = [next(stream)]
            server.publish(weights(2).items(), policy_version=2)
            assert_same(dict([*first, *stream]), weights(1))
        assert_same(pull(server, 2), weights(2))
        assert [outcomes.staged.get(timeout=WAIT_S).policy_version for _ in range(2)] == [1, 2]


def test_weights_equal_to_the_ones_before_are_remarked_on(tmp_path: Path) -> None:
    """B141."""
    with serving(tmp_path) as (server, _), structlog.testing.capture_logs() as logs:
        server.publish(weights(1).items(), policy_version=1)
        server.publish(weights(1).items(), policy_version=2)
        server.publish(weights(2).items(), policy_version=3)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["event"], entry["policy_version"]) for entry in warnings] == [
        ("published weights equal the version before", 2)
    ]


def test_a_publication_that_fails_leaves_the_version_before(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer.0.weight", torch.zeros(1 << 16)
        raise RuntimeError("gather failed")

    with serving(tmp_path) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        server.publish(weights(2).items(), policy_version=2)
        with pytest.raises(RuntimeError, match="gather failed"):
            server.publish(broken(), policy_version=3)
        assert_same(pull(server, 2), weights(2))
        server.publish(weights(4).items(), policy_version=4)
        assert_same(pull(server, 4), weights(4))
        assert_same(pull(server, 2), weights(2))


def test_an_engine_of_two_workers_is_staged_when_both_are(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        pull(server, 1, rank=0, num_ranks=2)
        assert outcomes.staged.empty()
        pull(server, 1, rank=1, num_ranks=2)
        outcomes.staged.get(timeout=WAIT_S)
        assert outcomes.staged.empty()


def test_a_staging_of_two_workers_that_is_under_way_ends_well_though_its_version_is_retired(tmp_path: Path) -> None:
    """One worker has staged and the other is receiving when two newer versions come."""
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1, rank=1, num_ranks=2) as slower:
            stream = receive_weights(slower)
            received = dict([next(stream)])
            pull(server, 1, rank=0, num_ranks=2)
            for version in (2, 3):
                server.publish(weights(version).items(), policy_version=version)
            received |= dict(stream)
            assert_same(received, weights(1))
            assert outcomes.staged.get(timeout=WAIT_S).policy_version == 1
        assert outcomes.failed.empty()


def test_a_staging_whose_second_worker_comes_too_late_is_told_as_failed(tmp_path: Path) -> None:
    """Nobody waits for the end of a staging that cannot have one."""
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        pull(server, 1, rank=0, num_ranks=2)
        for version in (2, 3):
            server.publish(weights(version).items(), policy_version=version)
        assert "not all workers of e had staged it" in outcomes.failed.get(timeout=WAIT_S).reason
        assert outcomes.staged.empty()


def test_many_engines_receive_at_once(tmp_path: Path) -> None:
    received: dict[int, dict[str, torch.Tensor]] = {}
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)

        def receive(index: int) -> None:
            received[index] = pull(server, 1, engine=f"engine-{index}")

        threads = [threading.Thread(target=receive, args=(index,)) for index in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        engines = {outcomes.staged.get(timeout=WAIT_S).engine for _ in threads}
    assert engines == {f"engine-{index}" for index in range(5)}
    for tensors in received.values():
        assert_same(tensors, weights(1))


# ── engines that fail ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_receiver_that_raises_is_quoted_with_the_bucket_and_can_come_back(tmp_path: Path) -> None:
    """B22."""
    before = mappings()
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with pytest.raises(RuntimeError, match="no room"), open_transfer(server, 1, nonce="first") as channel:
            refuse(next(receive_weights(channel))[0])
        failure = outcomes.failed.get(timeout=WAIT_S)
        assert failure.nonce == "first"
        assert "no room" in failure.reason
        assert "segment" in failure.reason
        assert_same(pull(server, 1, nonce="second"), weights(1))
        assert outcomes.staged.get(timeout=WAIT_S).nonce == "second"
    assert leftovers(before) == []


def test_an_engine_killed_in_mid_stream_is_reported_and_does_not_stop_the_others(tmp_path: Path) -> None:
    """B03, B22: kill -9 of the receiver."""
    before = mappings()
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with peer("engine", server.address, "1", "stall") as process:
            assert said(process) == "stalled"
            process.kill()
            process.wait(WAIT_S)
            failure = outcomes.failed.get(timeout=WAIT_S)
        assert failure.engine == "engine-0"
        assert "closed the connection" in failure.reason
        assert "segment" in failure.reason
        for version in (2, 3, 4):
            server.publish(weights(version).items(), policy_version=version)
        assert_same(pull(server, 4), weights(4))
    assert leftovers(before) == []
    assert list(tmp_path.iterdir()) == []


def test_an_engine_process_receives_everything(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with peer("engine", server.address, "1") as process:
            assert said(process) == "received"
            assert outcomes.staged.get(timeout=WAIT_S).engine == "engine-0"


def test_an_engine_that_stalls_is_given_up_at_the_bucket_deadline(tmp_path: Path) -> None:
    with serving(tmp_path, bucket_timeout_s=0.5) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1, engine="slow") as channel:
            next(receive_weights(channel))
            failure = outcomes.failed.get(timeout=WAIT_S)
            assert failure.engine == "slow"
            assert "silent for 0.5 s" in failure.reason
            assert "segment" in failure.reason


def test_an_engine_that_reads_an_old_version_costs_memory_and_no_waiting(tmp_path: Path) -> None:
    """However far behind it is, what it reads stays as it was."""
    with serving(tmp_path, round_timeout_s=600.0, bucket_timeout_s=600.0) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1, engine="slow") as channel:
            stream = receive_weights(channel)
            received = dict([next(stream)])
            for version in (2, 3, 4, 5):
                server.publish(weights(version).items(), policy_version=version)
            received |= dict(stream)
        assert_same(received, weights(1))
        assert outcomes.staged.get(timeout=WAIT_S).policy_version == 1
        assert_same(pull(server, 5), weights(5))


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.server.available_memory", lambda: 0)


@pytest.mark.usefixtures("short_memory")
def test_where_memory_is_short_publishing_cuts_an_engine_off_that_reads_an_old_version(tmp_path: Path) -> None:
    with serving(tmp_path, round_timeout_s=1.0, bucket_timeout_s=30.0) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1, engine="slow") as channel:
            stream = receive_weights(channel)
            next(stream)
            for version in (2, 3, 4):
                server.publish(weights(version).items(), policy_version=version)
            failure = outcomes.failed.get(timeout=WAIT_S)
            with pytest.raises(WeightSyncError):
                list(stream)
        assert failure.engine == "slow"
        assert "version 4 needs the memory of version 1" in failure.reason
        assert_same(pull(server, 4), weights(4))


def test_closing_ends_transfers_under_way(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        channel = open_transfer(server, 1)
    with channel, pytest.raises((PeerLost, PeerFailed)):
        list(receive_weights(channel))
    assert "the weight server closes" in outcomes.failed.get(timeout=WAIT_S).reason
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]


def test_a_receiver_cannot_write_to_what_it_is_given(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        with open_transfer(server, 1) as channel:
            bucket = channel.receive()
            assert isinstance(bucket, Bucket)
            assert not bucket.payload.flags.writeable


def test_a_byte_that_changes_on_the_way_is_noticed(tmp_path: Path) -> None:
    """B140."""
    with serving(tmp_path) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        server._held[-1].snapshot.tensors[3][7] += 1
        with pytest.raises(IntegrityError, match="checksum"):
            pull(server, 1, nonce="bad")
        assert "IntegrityError" in outcomes.failed.get(timeout=WAIT_S).reason


# ── a trainer that fails ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_killed_in_mid_stream_ends_the_receiver_and_leaves_no_memory(tmp_path: Path) -> None:
    """B03, B04: kill -9 of the sender, three times; the next server takes the same address."""
    before = mappings()
    for _ in range(3):
        with peer("server", str(tmp_path)) as process:
            address = said(process)
            channel = peers.open_transfer(address, 1)
            stream = receive_weights(channel)
            next(stream)
            process.kill()
            process.wait(WAIT_S)
            with pytest.raises(PeerLost, match="at segment"), channel:
                list(stream)
    with serving(tmp_path) as (server, _):
        assert server.address == address
        server.publish(weights(2).items(), policy_version=2)
        assert_same(pull(server, 2), weights(2))
    assert leftovers(before) == []
    assert list(tmp_path.iterdir()) == []


def test_two_live_servers_do_not_share_an_address(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        with pytest.raises(AddressTaken, match="another weight server answers"), serving(tmp_path):
            pass
        server.publish(weights(1).items(), policy_version=1)
        assert_same(pull(server, 1), weights(1))


def test_nobody_at_the_address_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="does not answer"):
        peers.open_transfer(f"shared_memory:{tmp_path}/nobody", 1)


@pytest.mark.parametrize("address", ["unix:/tmp/x", "/tmp/x", "shared_memory:relative", "shared_memory:/" + "x" * 200])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="got weight-sync address"):
        peers.open_transfer(address, 1)


# ── strangers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def strangers() -> dict[str, Callable[[socket.socket], None]]:
    request = StageRequest(policy_version=1, receiver="e", nonce="n", terms=Terms(transport="shared_memory"))
    hello = encode(Hello(request=request))
    return {
        "says nothing and leaves": lambda sock: None,
        "sends garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
        "sends a huge packet": lambda sock: sock.sendall(b"\0" * 100_000),
        "sends an empty packet": lambda sock: sock.sendall(b""),
        "sends half a hello": lambda sock: sock.sendall(hello[:20]),
        "says hello and leaves": lambda sock: sock.sendall(hello),
        "says hello twice": lambda sock: (sock.sendall(hello), sock.sendall(hello))[0],
        "frees what it was not given": lambda sock: (sock.sendall(hello), sock.sendall(encode(Fail(reason="x"))))[0],
        "passes a descriptor": lambda sock: (socket.send_fds(sock, [hello], [0]), None)[1],
    }


@pytest.mark.parametrize("case", strangers())
def test_a_stranger_on_the_socket_does_no_harm(tmp_path: Path, case: str) -> None:
    with serving(tmp_path) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        path = server.address.removeprefix("shared_memory:")
        open_before = open_descriptors()
        for _ in range(10):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(WAIT_S)
                sock.connect(path)
                strangers()[case](sock)
        assert_same(pull(server, 1), weights(1))
        listener = server._listeners[TransportName.SHARED_MEMORY]
        assert isinstance(listener, UnixListener)
        deadline = time.monotonic() + WAIT_S
        while listener._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        # rings are kept for the next transfers: two descriptors each, its own and that of its mapping
        assert open_descriptors() <= open_before + 8


def test_a_stranger_that_never_speaks_is_sent_away_at_the_deadline(tmp_path: Path) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with serving(tmp_path, connect_timeout_s=0.3) as (server, _), stranger as sock:
        sock.settimeout(WAIT_S)
        sock.connect(server.address.removeprefix("shared_memory:"))
        answer = decode(sock.recv(2000))
        assert isinstance(answer, Fail)
        assert "silent for 0.3 s" in answer.reason
        assert sock.recv(2000) == b""


def test_the_socket_is_the_users_alone(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    with serving(directory) as (server, _):
        assert Path(server.address.removeprefix("shared_memory:")).stat().st_mode & 0o777 == 0o600
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_timeout_is_a_weight_sync_error() -> None:
    assert issubclass(TransferTimeout, WeightSyncError)
