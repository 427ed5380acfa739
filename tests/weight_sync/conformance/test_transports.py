"""What every transport owes: all weights or an error, whoever dies, and nothing left behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.weight_sync.peers import open_transfer, weights
from tests.weight_sync.test_server import WAIT_S, assert_same, peer, pull, said, serving
from weight_sync import PeerFailed, StageRequest, Terms, WeightSyncError, open_receiver, receive_weights

BUCKET_BYTES = 1 << 16
TRANSPORTS = ["shared_memory", "file", "tcp", "collective"]

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.mark.parametrize("num_bytes", [0, 1, BUCKET_BYTES - 1, BUCKET_BYTES, BUCKET_BYTES + 1, 4 * BUCKET_BYTES])
def test_a_tensor_of_any_size_arrives(tmp_path: Path, transport: str, num_bytes: int) -> None:
    tensors = {"before": torch.arange(7), "it": torch.arange(num_bytes).to(torch.uint8), "behind": torch.ones(3)}
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(tensors.items(), policy_version=1)
        assert_same(pull(server, 1), tensors)


def test_ties_views_and_buffers_arrive_as_they_are_and_floats_in_the_wire_dtype(tmp_path: Path, transport: str) -> None:
    """B139."""
    matrix = torch.randn(64, 48)
    tensors = [
        ("m", matrix),
        ("tied", matrix),
        ("transposed", matrix.t()),
        ("strided", matrix[::2, ::3]),
        ("n", torch.tensor(5)),
    ]
    with serving(tmp_path, transport=transport, dtype=torch.bfloat16) as (server, _):
        server.publish(tensors, policy_version=1)
        received = pull(server, 1)
    wanted = {"m": matrix, "transposed": matrix.t(), "strided": matrix[::2, ::3]}
    assert_same(received, {**{name: tensor.bfloat16() for name, tensor in wanted.items()}, "n": torch.tensor(5)})


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "bfloat16"), ("bucket_bytes", 2 * BUCKET_BYTES), ("protocol", 1)],
)
def test_terms_that_differ_are_refused_naming_both(tmp_path: Path, transport: str, field: str, value: str | int) -> None:
    """B156: by an answer, long before any deadline, and the next one with the right terms is served."""
    mine: dict[str, str | int] = {"dtype": "float32", "bucket_bytes": BUCKET_BYTES, "protocol": 2}
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        terms = replace(Terms(transport=transport), **{field: value})  # type: ignore[arg-type]
        request = StageRequest(policy_version=1, receiver="e", nonce="n", terms=terms)
        with pytest.raises(WeightSyncError) as refused:
            open_receiver(server.address, request, timeout_s=WAIT_S).receive()
        assert str(value) in str(refused.value)
        assert str(mine[field]) in str(refused.value)
        assert_same(pull(server, 1), weights(1))


def test_a_version_that_is_not_there_is_refused(tmp_path: Path, transport: str) -> None:
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        with pytest.raises(PeerFailed, match="version 2 is not served"):
            pull(server, 2)
        assert_same(pull(server, 1), weights(1))


def test_a_receiver_killed_in_mid_transfer_costs_nobody_else_the_round(tmp_path: Path, transport: str) -> None:
    """B03, B22."""
    with serving(tmp_path, transport=transport, bucket_timeout_s=2.0) as (server, outcomes):
        server.publish(weights(1).items(), policy_version=1)
        with peer("engine", server.address, "1", "stall") as process:
            assert said(process) == "stalled"
            process.kill()
            process.wait(WAIT_S)
            assert outcomes.failed.get(timeout=WAIT_S).engine == "engine-0"
        server.publish(weights(2).items(), policy_version=2)
        assert_same(pull(server, 2), weights(2))


def test_a_server_killed_in_mid_transfer_ends_the_receiver_and_the_next_one_serves(tmp_path: Path, transport: str) -> None:
    """B03, B04."""
    with peer("server", str(tmp_path), transport) as process:
        channel = open_transfer(said(process), 1)
        stream = receive_weights(channel)
        next(stream)
        process.kill()
        process.wait(WAIT_S)
        with pytest.raises(WeightSyncError), channel:
            list(stream)
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(2).items(), policy_version=2)
        assert_same(pull(server, 2), weights(2))


def test_nothing_is_left_when_the_server_closes(tmp_path: Path, transport: str) -> None:
    with serving(tmp_path, transport=transport) as (server, _):
        server.publish(weights(1).items(), policy_version=1)
        pull(server, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_socket() or path.is_file()]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]
