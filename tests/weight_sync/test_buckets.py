"""Buckets: what goes where, and the header that says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import (
    ALIGNMENT,
    MIN_BUCKET_BYTES,
    BucketLayout,
    Piece,
    decode_header,
    encode_header,
    entry_bytes,
)
from weight_sync.errors import ProtocolError
from weight_sync.manifest import DTYPE_CODES, TensorSpec

names = st.text(min_size=1, max_size=60).filter(lambda name: len(name.encode(errors="replace")) < 200)
dtypes = st.sampled_from(sorted(DTYPE_CODES, key=str))
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
specs = st.builds(lambda name, dtype, shape: TensorSpec(name=name, dtype=dtype, shape=shape), names, dtypes, shapes)


def lay_out(sizes: list[int], bucket_bytes: int) -> list[list[tuple[int, int, int, int]]]:
    """Buckets of (tensor, offset, position, length)."""
    buckets: list[list[tuple[int, int, int, int]]] = [[]]
    layout = BucketLayout(bucket_bytes)
    for index, size in enumerate(sizes):
        spec, offset = TensorSpec(name=f"tensor.{index}", dtype=torch.uint8, shape=(size,)), 0
        while True:
            placed = layout.place(spec, size - offset)
            if placed is None:
                layout = BucketLayout(bucket_bytes)
                buckets.append([])
                continue
            position, length = placed
            assert layout.payload_end + layout.header_bytes <= bucket_bytes
            buckets[-1].append((index, offset, position, length))
            offset += length
            if offset == size:
                break
    return buckets


@given(st.lists(st.integers(0, 20_000), max_size=30), st.integers(MIN_BUCKET_BYTES, 16_384))
def test_every_byte_of_every_tensor_is_placed_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    """B144: sizes of 0, below, equal to and beyond a bucket."""
    placed = [0] * len(sizes)
    seen = []
    for bucket in lay_out(sizes, bucket_bytes):
        end = 0
        for index, offset, position, length in bucket:
            assert position % ALIGNMENT == 0
            assert position >= end
            assert offset == placed[index]
            end = position + length
            placed[index] += length
            seen.append(index)
    assert placed == sizes
    assert seen == sorted(seen)
    assert set(seen) == set(range(len(sizes)))


@given(st.lists(st.integers(1, 9_000), min_size=1, max_size=30))
def test_buckets_are_filled_before_the_next_one_is_begun(sizes: list[int]) -> None:
    """B146: neither one bucket for all, nor one for each."""
    buckets = lay_out(sizes, 8192)
    for bucket in buckets[:-1]:
        assert sum(length for *_, length in bucket) > 8192 - 64 * len(bucket) - 96 * len(bucket) - 1024 - 256


def test_hundred_tensors_of_a_tenth_bucket_take_at_least_ten_buckets() -> None:
    """B146."""
    assert 10 <= len(lay_out([100_000] * 100, 1 << 20)) <= 12


def test_a_name_that_fills_the_smallest_bucket_is_still_placed() -> None:
    spec = TensorSpec(name="x" * 1024, dtype=torch.float32, shape=(1,) * 8)
    assert BucketLayout(MIN_BUCKET_BYTES).place(spec, 1 << 20) is not None


def test_buckets_below_the_least_size_are_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=4095"):
        BucketLayout(4095)


@given(st.lists(specs, max_size=6), st.integers(0, 2**32 - 1), st.integers(-1, 2**40))
def test_a_header_says_what_was_put_in(specs: list[TensorSpec], sequence: int, version: int) -> None:
    pieces, at = [], 0
    for index, spec in enumerate(specs):
        pieces.append(Piece(index=index, spec=spec, offset=0, length=spec.num_bytes, position=at, checksum=index))
        at += spec.num_bytes
    header = encode_header(pieces, sequence=sequence, policy_version=version)
    assert len(header) == BucketLayout(1 << 20).header_bytes + sum(map(entry_bytes, specs))
    assert decode_header(header, payload_bytes=at, sequence=sequence, policy_version=version) == pieces


@given(st.binary(max_size=200), st.integers(0, 150))
def test_garbage_is_no_header(garbage: bytes, keep: int) -> None:
    spec = TensorSpec(name="a", dtype=torch.bfloat16, shape=(2, 3))
    piece = Piece(index=0, spec=spec, offset=0, length=12, position=0, checksum=7)
    good = encode_header([piece], sequence=0, policy_version=1)
    for header in (garbage, good[:keep] + garbage):
        if header == good:
            continue
        try:
            pieces = decode_header(header, payload_bytes=12, sequence=0, policy_version=1)
        except ProtocolError:
            continue
        assert all(piece.position + piece.length <= 12 for piece in pieces)


@pytest.mark.parametrize(("sequence", "version"), [(1, 5), (0, 6)])
def test_a_bucket_of_another_place_or_version_is_refused(sequence: int, version: int) -> None:
    header = encode_header([], sequence=0, policy_version=5)
    with pytest.raises(ProtocolError, match="got bucket 0 of version 5"):
        decode_header(header, payload_bytes=0, sequence=sequence, policy_version=version)


def test_a_piece_outside_its_bucket_is_refused() -> None:
    spec = TensorSpec(name="a", dtype=torch.uint8, shape=(100,))
    piece = Piece(index=0, spec=spec, offset=0, length=100, position=64, checksum=0)
    header = encode_header([piece], sequence=0, policy_version=0)
    with pytest.raises(ProtocolError, match="lie outside"):
        decode_header(header, payload_bytes=163, sequence=0, policy_version=0)
