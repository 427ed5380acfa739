"""Weights by broadcast: groups of any size, and what happens when a member never joins, dies or is refused."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.weight_sync.net_peers import (
    Serving,
    Weights,
    is_same,
    line_of,
    process,
    receive,
    receive_in_threads,
    request,
    settings_for,
    weights,
)
from weight_sync.collective_group import choose_backend
from weight_sync.errors import PeerFailed, PeerLost, ProtocolError, TransferTimeout, WeightSyncError
from weight_sync.listeners import open_receiver
from weight_sync.stream import receive_weights
from weight_sync.tcp_address import NetAddress
from weight_sync.tcp_link import Link
from weight_sync.transport import Cut


def _names(count: int) -> list[str]:
    return [f"engine-{index}" for index in range(count)]


@pytest.mark.parametrize("num_receivers", [1, 2, 3])
def test_one_broadcast_reaches_all_receivers(num_receivers: int) -> None:
    """B153: worlds 1+1, 1+2, 1+3. Several trainer ranks gather on the first one, which is the sender."""
    with Serving(settings_for("collective")) as serving:
        for _ in range(2):
            results = receive_in_threads(serving.address, _names(num_receivers), cohort=num_receivers)
            assert all(is_same(results[name], weights()) for name in _names(num_receivers))
            assert isinstance(serving.outcome(), int)
        assert serving.outcomes.empty(), "one transfer for all of a cohort"


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 16])
def test_weights_arrive_as_they_were(bucket_bytes: int) -> None:
    """B140, B144: sizes around a bucket, and nothing."""
    sizes = (0, 1, bucket_bytes - 1, bucket_bytes, bucket_bytes + 1, 4 * bucket_bytes)
    tensors: Weights = {f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes}
    with Serving(settings_for("collective", bucket_bytes=bucket_bytes), tensors) as serving:
        assert is_same(receive(serving.address), tensors)
    with Serving(settings_for("collective", bucket_bytes=bucket_bytes), {}) as serving:
        assert is_same(receive(serving.address), {})


def test_two_workers_of_two_engines_are_a_cohort_of_four() -> None:
    """B153: 2+2 on the receivers' side."""
    with Serving(settings_for("collective")) as serving:
        results = receive_in_threads(serving.address, _names(4), cohort=4)
    assert all(is_same(results[name], weights()) for name in _names(4))


def test_a_member_that_asks_and_never_joins_is_named_within_the_deadline() -> None:
    """B01: its rank, the phase and the address; the others learn it too, and the next transfer is served."""
    with Serving(settings_for("collective", connect_timeout_s=2.0)) as serving:
        results: dict[str, object] = {}
        other = threading.Thread(target=lambda: results.update(receive_in_threads(serving.address, ["good"], cohort=2)))
        other.start()
        address = NetAddress.parse(serving.address)
        link = Link(address, timeout_s=60)
        link.open(request(serving.address, name="mute", cohort=2))
        outcome = serving.outcome()
        other.join(60)
        link.end(None)
        assert isinstance(outcome, TransferTimeout)
        for part in ("did not form within 2.0 s", "forming the group as rank", "'mute'", address.host):
            assert part in str(outcome)
        assert "'good'" not in str(outcome)
        assert isinstance(results["good"], WeightSyncError)
        assert is_same(receive(serving.address), weights())


def test_a_cohort_begins_without_those_who_let_the_deadline_pass() -> None:
    with Serving(settings_for("collective", connect_timeout_s=1.0)) as serving:
        results = receive_in_threads(serving.address, _names(2), cohort=3)
        assert all(is_same(results[name], weights()) for name in _names(2))


def test_a_member_that_dies_ends_the_transfer_for_all_and_the_next_group_is_without_it() -> None:
    """B04: the transfer fails by name, within no deadline."""
    settings = settings_for("collective", bucket_timeout_s=60.0, connect_timeout_s=30.0)
    with (
        Serving(settings, weights(num_tensors=16)) as serving,
        process("receive", serving.address, "victim", "2", "stall") as child,
    ):
        results: dict[str, object] = {}
        other = threading.Thread(target=lambda: results.update(receive_in_threads(serving.address, ["survivor"], cohort=2)))
        other.start()
        assert line_of(child) == "stalled"
        child.kill()
        outcome = serving.outcome()
        assert isinstance(outcome, PeerLost)
        assert "'victim'" in str(outcome)
        other.join(60)
        assert isinstance(results["survivor"], PeerFailed)
        assert "'victim'" in str(results["survivor"])
        assert is_same(receive(serving.address, name="survivor"), weights(num_tensors=16))


def test_a_killed_sender_is_noticed() -> None:
    with process("serve", "collective") as child:
        address = line_of(child)
        channel = open_receiver(address, request(address), timeout_s=60)
        channel.receive()
        child.kill()
        with pytest.raises(PeerLost, match="the weight server at"), channel:
            dict(receive_weights(channel))
    with Serving(settings_for("collective")) as serving:
        assert is_same(receive(serving.address), weights())


def test_a_receivers_error_reaches_the_sender_and_the_others() -> None:
    """B22."""
    with Serving(settings_for("collective")) as serving:
        results: dict[str, object] = {}
        other = threading.Thread(target=lambda: results.update(receive_in_threads(serving.address, ["other"], cohort=2)))
        other.start()
        channel = open_receiver(serving.address, request(serving.address, cohort=2), timeout_s=60)
        with pytest.raises(RuntimeError, match="no room"), channel:
            raise RuntimeError("no room for it")
        outcome = serving.outcome()
        other.join(60)
        assert isinstance(outcome, PeerFailed)
        assert "no room for it" in str(outcome)
        assert "no room for it" in str(results["other"])


def test_a_transfer_is_cut_from_another_thread() -> None:
    cuts: list[Cut] = []
    with Serving(settings_for("collective", bucket_timeout_s=60.0)) as serving:
        channel = open_receiver(serving.address, request(serving.address), timeout_s=60, on_open=cuts.append)
        cuts[0]("a newer version takes its place")
        with pytest.raises(TransferTimeout, match="a newer version"), channel:
            dict(receive_weights(channel))
        assert isinstance(serving.outcome(), PeerFailed)


def test_terms_that_differ_are_named_at_once() -> None:
    with Serving(settings_for("collective"), backend="gloo") as serving:
        with pytest.raises(ProtocolError, match="backend: nccl here, gloo"):
            receive(serving.address, backend="nccl")
        assert isinstance(serving.outcome(), WeightSyncError)
        assert is_same(receive(serving.address, backend="gloo"), weights())


def test_a_closed_listener_leaves_nothing_behind() -> None:
    with Serving(settings_for("collective")) as serving:
        receive(serving.address)
    before = _left()
    for _ in range(3):
        with Serving(settings_for("collective")) as serving:
            receive(serving.address)
    deadline = time.monotonic() + 10.0
    while _left() != before and time.monotonic() < deadline:
        time.sleep(0.05)  # torch's own threads end a moment later
    assert _left() == before


def _left() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    gc.collect()  # of what failed in the tests before
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("wanted", "devices", "chosen"),
    [
        ("", ["", ""], "gloo"),
        ("", ["GPU-1", "GPU-2"], "nccl"),
        ("", ["GPU-1", ""], "gloo"),
        ("", ["GPU-1", "GPU-1"], "gloo"),
        ("gloo", ["GPU-1", "GPU-2"], "gloo"),
        ("nccl", ["GPU-1", "GPU-2"], "nccl"),
    ],
)
def test_nccl_is_taken_where_each_member_has_a_device_of_its_own(wanted: str, devices: list[str], chosen: str) -> None:
    assert choose_backend(wanted, devices) == chosen


@pytest.mark.parametrize("devices", [["GPU-1", ""], ["GPU-1", "GPU-1"]])
def test_nccl_that_cannot_be_is_refused(devices: list[str]) -> None:
    with pytest.raises(WeightSyncError, match="a CUDA device of its own"):
        choose_backend("nccl", devices)
