"""The stream over any channel: values, ties, cuts, and what is noticed when a bucket goes wrong."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.loopback_channel import LoopbackReceiver, LoopbackSender, altered
from weight_sync.channel import Bucket, StreamEnd
from weight_sync.errors import IntegrityError, ManifestMismatch, ProtocolError
from weight_sync.manifest import DTYPE_CODES, Manifest
from weight_sync.stream import receive_weights, send_weights

MEGABYTE = 1 << 20
Weights = dict[str, torch.Tensor]


def nan_filled(num_bytes: int) -> torch.Tensor:
    """B140: memory in which a byte that never came shows as NaN."""
    return torch.full((num_bytes,), 255, dtype=torch.uint8)


def transfer(weights: Weights, *, bucket_bytes: int = 4096, dtype: torch.dtype | None = None) -> tuple[Weights, LoopbackSender]:
    sender = LoopbackSender(bucket_bytes)
    report = send_weights(sender, weights.items(), policy_version=3, dtype=dtype)
    receiver = LoopbackReceiver(3, list(sender.sent))
    received = dict(receive_weights(receiver, allocate=nan_filled))
    assert receiver.confirmed == report.manifest_digest
    assert report.num_buckets == len(sender.weight_buckets)
    return received, sender


def assert_same(received: Weights, expected: Weights) -> None:
    assert list(received) == list(expected)
    for name, tensor in expected.items():
        assert received[name].dtype is tensor.dtype
        assert received[name].shape == tensor.shape
        assert torch.equal(received[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(sorted(DTYPE_CODES, key=str))), max_size=12),
    st.integers(4096, 9000),
)
def test_what_is_sent_is_received(tensors: list[tuple[list[int], torch.dtype]], bucket_bytes: int) -> None:
    bits = torch.randint(0, 2, (40**3 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weights = {}
    for index, (shape, dtype) in enumerate(tensors):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        weights[f"tensor.{index}"] = bits[:num_bytes].clone().view(dtype).view(shape)
    assert_same(transfer(weights, bucket_bytes=bucket_bytes)[0], weights)


def test_each_tensor_keeps_its_name_whatever_the_order_of_dtypes() -> None:
    """B142: equal sizes in bytes, so that a mix-up would still add up."""
    weights = {
        "a": torch.randn(512).bfloat16(),
        "b": torch.randn(256),
        "c": torch.randn(512).bfloat16(),
        "d": torch.arange(128),
    }
    assert_same(transfer(weights)[0], weights)
    assert_same(transfer(dict(reversed(weights.items())))[0], dict(reversed(weights.items())))


def test_tensors_at_and_around_the_size_of_a_bucket_arrive() -> None:
    """B144."""
    weights = {
        f"t{size}": torch.randint(0, 256, (size,), dtype=torch.uint8)
        for size in (0, 1, MEGABYTE - 1, MEGABYTE, MEGABYTE + 1, 4 * MEGABYTE)
    }
    received, sender = transfer(weights, bucket_bytes=MEGABYTE)
    assert_same(received, weights)
    assert all(len(bucket.payload) + len(bucket.header) <= MEGABYTE for bucket in sender.weight_buckets)


def test_small_tensors_share_buckets_and_fill_them() -> None:
    """B146: 100 tensors of 0.1 MB, 1 MB buckets."""
    weights = {f"t{index}": torch.randn(25_000) for index in range(100)}
    received, sender = transfer(weights, bucket_bytes=MEGABYTE)
    assert_same(received, weights)
    assert 10 <= len(sender.weight_buckets) <= 12


@pytest.mark.parametrize(
    "prepare",
    [
        lambda base: base.t(),
        lambda base: base[::2, 1::3],
        lambda base: torch.nn.Parameter(base),
        lambda base: base.double().requires_grad_().t(),
        lambda base: base[:1].expand(700, 300),
    ],
    ids=["transposed", "strided", "requires_grad", "all at once", "expanded"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_larger_than_a_bucket_takes_the_same_path(
    prepare: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None
) -> None:
    """B145."""
    tensor = prepare(torch.randn(600, 300))
    received, _ = transfer({"a": tensor}, dtype=dtype)
    assert_same(received, {"a": tensor.detach().to(dtype or tensor.dtype)})


def test_floating_tensors_are_cast_on_the_way_and_others_are_not() -> None:
    weights = {"f": torch.randn(3000), "d": torch.randn(3).double(), "steps": torch.arange(5), "mask": torch.tensor([True])}
    received, _ = transfer(weights, dtype=torch.bfloat16)
    expected = {"f": weights["f"].bfloat16(), "d": weights["d"].bfloat16(), "steps": weights["steps"], "mask": weights["mask"]}
    assert_same(received, expected)


def test_tied_tensors_travel_once() -> None:
    """B139."""
    embedding = torch.randn(100, 64)
    received, sender = transfer({"embed.weight": embedding, "lm_head.weight": embedding})
    assert_same(received, {"embed.weight": embedding})
    assert sum(len(bucket.payload) for bucket in sender.weight_buckets) < 1.1 * embedding.nbytes


def test_nothing_at_all_can_be_sent() -> None:
    assert transfer({})[0] == {}


def test_sending_takes_no_memory_of_the_size_of_a_tensor() -> None:
    """B144: beyond the bucket; a transposed tensor is the hard one."""
    tensor = torch.randn(2000, 2000).t()
    peak = torch.zeros(1)
    with torch.profiler.profile(profile_memory=True) as profile:
        sender = LoopbackSender(MEGABYTE)
        send_weights(sender, [("a", tensor)], policy_version=0, dtype=torch.bfloat16)
    allocated = [event.cpu_memory_usage for event in profile.key_averages()]
    assert max(allocated, default=0) <= 2 * MEGABYTE, peak
    assert tensor.nbytes > 10 * MEGABYTE


def test_receiving_takes_no_memory_beyond_the_tensors() -> None:
    """B144."""
    sender = LoopbackSender(MEGABYTE)
    send_weights(sender, [("a", torch.randn(4_000_000))], policy_version=0)
    destination = torch.empty(16_000_000, dtype=torch.uint8)
    tracemalloc.start()
    for _, tensor in receive_weights(LoopbackReceiver(0, sender.sent), allocate=lambda size: destination[:size]):
        assert tensor.data_ptr() == destination.data_ptr()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEGABYTE


def wrong_streams() -> dict[str, Callable[[list[Bucket | StreamEnd]], list[Bucket | StreamEnd]]]:
    return {
        "a bucket is missing": lambda sent: [*sent[:2], *sent[3:]],
        "the last bucket is missing": lambda sent: [*sent[:-2], sent[-1]],
        "a bucket comes twice": lambda sent: [*sent[:2], sent[1], *sent[2:]],
        "two buckets are swapped": lambda sent: [sent[1], sent[0], *sent[2:]],
        "a bit is turned": lambda sent: [*sent[:2], altered(sent[2], 70), *sent[3:]],
        "the stream ends early": lambda sent: [sent[0], sent[-1]],
    }


@pytest.mark.parametrize("case", wrong_streams())
def test_a_stream_that_is_not_what_was_sent_is_noticed(case: str) -> None:
    """B140."""
    sender = LoopbackSender(4096)
    send_weights(sender, [("a", torch.randn(3000)), ("b", torch.randn(3000))], policy_version=3)
    receiver = LoopbackReceiver(3, wrong_streams()[case](sender.sent))
    with pytest.raises((IntegrityError, ProtocolError)):
        list(receive_weights(receiver, allocate=nan_filled))
    assert receiver.confirmed is None


def test_the_receiver_can_refuse_a_manifest_before_any_weight_moves() -> None:
    """B148."""
    weights = {"a": torch.randn(3000)}
    known = LoopbackSender(1 << 16)
    send_weights(known, weights.items(), policy_version=1)
    ((name, tensor),) = receive_weights(LoopbackReceiver(1, known.sent))
    manifest = manifest_of({name: tensor})
    sender = LoopbackSender(4096)
    send_weights(sender, weights.items(), policy_version=1, manifest=manifest)
    allocated: list[int] = []

    def refuse(offered: Manifest) -> None:
        assert offered == manifest
        raise ManifestMismatch("not mine")

    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return nan_filled(size)

    with pytest.raises(ManifestMismatch):
        list(receive_weights(LoopbackReceiver(1, sender.sent), allocate=allocate, check_manifest=refuse))
    assert allocated == []


def manifest_of(weights: Weights) -> Manifest:
    import xxhash

    from weight_sync.manifest import TensorSpec

    return Manifest(
        specs=tuple(TensorSpec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in weights.items()),
        checksums=tuple(xxhash.xxh3_64_intdigest(t.contiguous().view(torch.uint8).numpy().data) for t in weights.values()),
    )


def test_tensors_other_than_the_manifest_says_are_not_sent() -> None:
    manifest = manifest_of({"a": torch.zeros(4)})
    for weights in ({"a": torch.zeros(5)}, {"b": torch.zeros(4)}, {}, {"a": torch.zeros(4), "b": torch.zeros(1)}):
        with pytest.raises(ProtocolError):
            send_weights(LoopbackSender(4096), weights.items(), policy_version=0, manifest=manifest)


def test_bytes_other_than_the_manifest_says_are_noticed() -> None:
    sender = LoopbackSender(4096)
    send_weights(sender, [("a", torch.ones(4))], policy_version=0, manifest=manifest_of({"a": torch.zeros(4)}))
    with pytest.raises(IntegrityError, match="checksum"):
        list(receive_weights(LoopbackReceiver(0, sender.sent)))


def test_a_manifest_larger_than_a_bucket_arrives() -> None:
    weights = {f"model.layers.{index}.self_attn.q_proj.weight": torch.full((3,), float(index)) for index in range(500)}
    sender = LoopbackSender(4096)
    send_weights(sender, weights.items(), policy_version=0, manifest=manifest_of(weights))
    received = dict(receive_weights(LoopbackReceiver(0, sender.sent), check_manifest=lambda manifest: None))
    assert_same(received, weights)


def test_received_tensors_hold_what_numpy_reads() -> None:
    received, _ = transfer({"a": torch.arange(6.0).view(2, 3)})
    assert np.array_equal(received["a"].numpy(), np.arange(6.0).reshape(2, 3))
