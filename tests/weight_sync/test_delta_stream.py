"""Deltas over the stream: the receiver ends with the very bytes of the sender, or with an error, never with something else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.loopback_channel import LoopbackReceiver, LoopbackSender, altered
from weight_sync.arena import Arena
from weight_sync.channel import Bucket
from weight_sync.errors import IntegrityError, ProtocolError
from weight_sync.snapshot import Snapshot, take_snapshot
from weight_sync.stream import SendReport, receive_weights, send_weights
from weight_sync.version_delta import VersionDelta, delta_between

Weights = dict[str, torch.Tensor]


def snapshot(weights: Weights, version: int, dtype: torch.dtype = torch.bfloat16) -> Snapshot:
    return take_snapshot(Arena(), weights.items(), policy_version=version, dtype=dtype)


def send(new: Snapshot, delta: VersionDelta, bucket_bytes: int) -> tuple[LoopbackSender, SendReport]:
    sender = LoopbackSender(bucket_bytes)
    report = send_weights(sender, new, policy_version=new.policy_version, manifest=new.manifest, deltas=delta.deltas)
    return sender, report


def receive(sender: LoopbackSender, new: Snapshot, base: Weights | None) -> Weights:
    return dict(receive_weights(LoopbackReceiver(new.policy_version, list(sender.sent)), base=base))


def assert_is(received: Weights, new: Snapshot) -> None:
    for name, tensor in new:
        assert torch.equal(received[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def stepped(weights: Weights, share: float, seed: int = 0) -> Weights:
    """Floating weights moved a little at a share of the places, integers left alone."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        places = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = torch.where(places, tensor * 1.01, tensor) if tensor.is_floating_point() else tensor.clone()
    return moved


WEIGHTS: Weights = {
    "embed": torch.randn(500, 64, generator=torch.Generator().manual_seed(1)),
    "bias": torch.zeros(64),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
    "transposed": torch.randn(64, 80, generator=torch.Generator().manual_seed(2)).t(),
    "step": torch.arange(10),
    "flags": torch.tensor([True, False, True]),
}


@settings(max_examples=25)
@given(
    share=st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
    bucket_bytes=st.integers(4096, 70_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_base_and_delta_give_the_new_version_bit_by_bit(share: float, bucket_bytes: int, dtype: torch.dtype) -> None:
    base, new = snapshot(WEIGHTS, 1, dtype), snapshot(stepped(WEIGHTS, share), 2, dtype)
    delta = delta_between(base, new)
    sender, report = send(new, delta, bucket_bytes)
    assert report.payload_bytes == delta.payload_bytes <= report.total_bytes
    assert report.manifest_digest == new.manifest.digest
    assert_is(receive(sender, new, dict(base)), new)
    assert_is(dict(base), snapshot(WEIGHTS, 1, dtype))  # only read


def test_unchanged_weights_send_no_bytes() -> None:
    base, new = snapshot(WEIGHTS, 1), snapshot(WEIGHTS, 2)
    delta = delta_between(base, new, num_threads=2)
    sender, report = send(new, delta, 1 << 16)
    assert report.payload_bytes == delta.num_changed == 0
    assert report.num_buckets == 1
    assert_is(receive(sender, new, dict(base)), new)


def test_a_few_changed_weights_send_a_few_bytes() -> None:
    base, new = snapshot(WEIGHTS, 1), snapshot(stepped(WEIGHTS, 0.01), 2)
    delta = delta_between(base, new)
    assert 0 < delta.num_changed < 0.02 * delta.num_elements
    assert send(new, delta, 1 << 16)[1].payload_bytes < 0.05 * new.manifest.total_bytes


def test_tensors_that_the_base_lacks_or_has_otherwise_travel_whole() -> None:
    other = {name: tensor for name, tensor in WEIGHTS.items() if name != "embed"}
    base = snapshot(other | {"bias": torch.zeros(32), "gone": torch.ones(5)}, 1)
    new = snapshot(WEIGHTS, 2)
    delta = delta_between(base, new)
    assert {"embed", "bias"}.isdisjoint(delta.deltas)
    sender, _ = send(new, delta, 1 << 16)
    assert_is(receive(sender, new, dict(base)), new)


def test_another_base_than_the_sender_meant_is_noticed() -> None:
    base, new = snapshot(WEIGHTS, 1), snapshot(stepped(WEIGHTS, 0.01), 2)
    sender, _ = send(new, delta_between(base, new), 1 << 16)
    wrong = dict(snapshot(stepped(WEIGHTS, 0.5, seed=9), 1))
    with pytest.raises(IntegrityError, match="checksum"):
        receive(sender, new, wrong)


@pytest.mark.parametrize("base", [None, {}, {"embed": torch.zeros(3)}])
def test_a_delta_without_its_base_is_refused(base: Weights | None) -> None:
    old, new = snapshot(WEIGHTS, 1), snapshot(stepped(WEIGHTS, 0.01), 2)
    sender, _ = send(new, delta_between(old, new), 1 << 16)
    with pytest.raises(IntegrityError, match="the base has"):
        receive(sender, new, base)


@given(st.data())
def test_an_altered_delta_never_gives_other_weights(data: st.DataObject) -> None:
    base, new = snapshot(WEIGHTS, 1), snapshot(stepped(WEIGHTS, 0.05), 2)
    sender, _ = send(new, delta_between(base, new), 1 << 16)
    at = next(index for index, bucket in enumerate(sender.sent) if bucket in sender.weight_buckets)
    bucket = sender.sent[at]
    assert isinstance(bucket, Bucket)
    sender.sent[at] = altered(bucket, data.draw(st.integers(0, len(bucket.payload) - 1)))
    try:
        received = receive(sender, new, dict(base))
    except (IntegrityError, ProtocolError):
        return
    assert_is(received, new)  # the bit was one of padding
