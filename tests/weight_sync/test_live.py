"""Weights that are streamed from where they are trained: what receivers get, what it takes, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weight_sync.peers import weights
from tests.weight_sync.test_server import WAIT_S, assert_same, open_descriptors, open_transfer, pull, serving
from weight_sync import PeerFailed, PeerLost, WeightSyncError, receive_weights
from weight_sync import server as server_module
from weight_sync.arena import Arena, ArenaPool
from weight_sync.live import has_room, measure
from weight_sync.snapshot import take_snapshot

TRANSPORTS = ("shared_memory", "file", "tcp", "collective")
WHY = "weight_sync.snapshot=never"


def odd_weights() -> dict[str, torch.Tensor]:
    """Of every kind: larger than a bucket, strided, tied, without elements, integers."""
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(300, 70, generator=generator)
    return {
        "embedding": embedding,
        "head": embedding,
        "transposed": torch.randn(40, 90, generator=generator).T,
        "none": torch.zeros(0, 4),
        "buffer": torch.arange(1000),
        "double": torch.randn(333, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(1.5),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_at_live_weights_finds_the_manifest_of_their_copy(dtype: torch.dtype) -> None:
    copied = take_snapshot(Arena(), odd_weights().items(), policy_version=1, dtype=dtype)
    tensors = odd_weights()
    looked = measure(lambda: tensors.items(), policy_version=1, dtype=dtype, bucket_bytes=1 << 12)
    assert looked.manifest.specs == copied.manifest.specs
    assert looked.manifest.checksums == copied.manifest.checksums
    assert looked.manifest.aliases == (("head", "embedding"),)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_live_weights_are_received_over_every_transport_by_any_number(tmp_path: Path, transport: str) -> None:
    tensors = odd_weights()
    with serving(tmp_path, dtype=torch.bfloat16, transport=transport) as (server, outcomes):
        publication = server.publish_live(tensors.items, policy_version=4, why=WHY)
        assert publication.why_live == WHY
        for engine in ("engine-0", "engine-1"):
            got = pull(server, 4, engine=engine)
            assert set(got) == set(tensors) - {"head"}
            for name, tensor in got.items():
                assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name
            assert outcomes.staged.get(timeout=WAIT_S).digest == publication.manifest_digest
        assert server.withdraw_live("done", timeout_s=WAIT_S)


def test_a_version_that_was_live_is_refused_once_withdrawn_and_the_reason_said(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        server.publish_live(weights(2).items, policy_version=2, why=WHY)
        assert list(server.versions) == [1, 2]
        assert server.withdraw_live("done", timeout_s=0.0)
        assert list(server.versions) == [1]
        with pytest.raises(PeerFailed, match=r"version 2 is not served; available: \[1\]; it was served from the live weights"):
            pull(server, 2)
        assert_same(pull(server, 1), weights(1))


def test_a_transfer_under_way_is_waited_for_before_weights_change(tmp_path: Path) -> None:
    tensors = weights(1)
    with serving(tmp_path) as (server, outcomes):
        server.publish_live(tensors.items, policy_version=1, why=WHY)
        undisturbed: list[bool] = []

        def train() -> None:
            undisturbed.append(server.withdraw_live("the weights change", timeout_s=WAIT_S))
            for tensor in tensors.values():
                tensor.zero_()

        with open_transfer(server, 1) as channel:
            stream = receive_weights(channel)
            received = dict([next(stream)])
            training = threading.Thread(target=train)
            training.start()
            received |= dict(stream)
        training.join(WAIT_S)
        assert undisturbed == [True]
        assert outcomes.failed.empty()
        assert_same(received, weights(1))


def test_a_receiver_that_stalls_is_cut_off_and_never_takes_a_mix(tmp_path: Path) -> None:
    """B02, B140: it reads on after the weights have changed, and ends in an error."""
    tensors = weights(1)
    before = open_descriptors()
    with serving(tmp_path) as (server, outcomes):
        server.publish_live(tensors.items, policy_version=1, why=WHY)

        def receive_late() -> None:
            with open_transfer(server, 1) as channel:
                stream = receive_weights(channel)
                next(stream)
                assert not server.withdraw_live("the live weights of version 1 change", timeout_s=0.05)
                for tensor in tensors.values():
                    tensor.zero_()
                dict(stream)

        with pytest.raises((PeerFailed, PeerLost)):
            receive_late()
        assert "the live weights of version 1 change" in outcomes.failed.get(timeout=WAIT_S).reason
        server.publish_live(tensors.items, policy_version=2, why=WHY)
        assert_same(pull(server, 2), tensors)
        server.withdraw_live("done", timeout_s=WAIT_S)
    assert open_descriptors() <= before


def test_weights_that_changed_although_they_were_not_withdrawn_are_refused(tmp_path: Path) -> None:
    """B140."""
    tensors = weights(1)
    with serving(tmp_path) as (server, outcomes):
        server.publish_live(tensors.items, policy_version=1, why=WHY)
        tensors["layer.3.weight"][7] += 1
        with pytest.raises(WeightSyncError, match="checksum"):
            pull(server, 1)
        assert "checksum" in outcomes.failed.get(timeout=WAIT_S).reason


def test_weights_that_cannot_be_sent_leave_the_versions_before(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        with pytest.raises(WeightSyncError):
            server.publish_live(lambda: [("a", torch.empty(2, device="meta"))], policy_version=2, why=WHY)
        assert server.versions == (1,)


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_a_snapshot_leaves_some_memory(num_bytes: int, available: int) -> None:
    assert has_room(num_bytes, available_bytes=available) == (available >= 1.2 * num_bytes)


def test_memory_that_is_held_already_is_not_missing() -> None:
    pool = ArenaPool(max_arenas=1, lendable=False)
    assert pool.missing_bytes(5 << 20) == 5 << 20
    arena = pool.take()
    assert arena is not None
    arena.reserve(5 << 20)
    assert pool.missing_bytes(5 << 20) == 0, "the one that is out is waited for"
    pool.give_back(arena, unread=True)
    assert pool.missing_bytes(6 << 20) == 1 << 20


@pytest.mark.parametrize(
    ("snapshot", "available", "expected"),
    [
        ("always", 0, ""),
        ("never", 1 << 40, "weight_sync.snapshot=never"),
        ("auto", 1 << 40, ""),
        ("auto", 1000, "a snapshot takes 0.00 GB and 0.00 GB are available (weight_sync.snapshot=auto)"),
    ],
)
def test_the_setting_and_the_memory_say_whether_a_copy_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str, available: int, expected: str
) -> None:
    monkeypatch.setattr(server_module, "available_memory", lambda: available)
    with serving(tmp_path, snapshot=snapshot) as (server, _):
        assert server.why_live(weights(1).items) == expected


def test_sending_live_weights_takes_two_buckets_whatever_their_size() -> None:
    program = """
import resource, subprocess, sys, tempfile
from pathlib import Path
import torch
from tests.weight_sync.test_server import serving, pull
torch.set_num_threads(1)
tensors = {f"t{index}": torch.ones(8 << 20) for index in range(6)}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
with tempfile.TemporaryDirectory() as name, serving(Path(name), bucket_bytes=1 << 20) as (server, outcomes):
    engine = [sys.executable, "-m", "tests.weight_sync.peers", "engine", server.address]
    small = {"t": torch.ones(1 << 18)}
    server.publish_live(small.items, policy_version=1, why="test")
    subprocess.run([*engine, "1"], check=True, stdout=subprocess.DEVNULL)
    before = peak()
    server.publish_live(tensors.items, policy_version=2, why="test")
    subprocess.run([*engine, "2"], check=True, stdout=subprocess.DEVNULL)
    print(peak() - before, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stderr.split()[-1]) < 40, "MiB, of 192 MiB of weights"
