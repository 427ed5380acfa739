"""Manifests and their digest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import ProtocolError
from weight_sync.manifest import Manifest, TensorSpec

BASE = Manifest(
    specs=(
        TensorSpec(name="a", dtype=torch.bfloat16, shape=(2, 3)),
        TensorSpec(name="b", dtype=torch.int64, shape=()),
        TensorSpec(name="c", dtype=torch.float32, shape=(0, 7)),
    ),
    checksums=(1, 2, 3),
    aliases=(("head", "a"),),
)


def test_totals_count_all_tensors() -> None:
    assert (BASE.num_tensors, BASE.total_bytes) == (3, 2 * 3 * 2 + 8)


def test_the_digest_does_not_depend_on_the_order() -> None:
    assert Manifest(specs=BASE.specs[::-1], checksums=BASE.checksums[::-1]).digest == BASE.digest


@pytest.mark.parametrize(
    "changed",
    [
        replace(BASE, checksums=(1, 2, 4)),
        replace(BASE, specs=(*BASE.specs[:2], replace(BASE.specs[2], name="d"))),
        replace(BASE, specs=(replace(BASE.specs[0], shape=(3, 2)), *BASE.specs[1:])),
        replace(BASE, specs=(replace(BASE.specs[0], dtype=torch.float16), *BASE.specs[1:])),
        Manifest(specs=BASE.specs[:2], checksums=BASE.checksums[:2]),
        replace(BASE, checksums=(2, 1, 3)),
    ],
)
def test_the_digest_tells_every_difference(changed: Manifest) -> None:
    assert changed.digest != BASE.digest


def test_a_manifest_survives_the_wire() -> None:
    assert Manifest.decode(BASE.encode()) == BASE


@given(st.binary(max_size=120), st.integers(0, 80))
def test_garbage_is_no_manifest(garbage: bytes, keep: int) -> None:
    for encoded in (garbage, BASE.encode()[:keep] + garbage):
        try:
            Manifest.decode(encoded)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("", torch.int8, ()), ("x" * 1025, torch.int8, ()), ("a", torch.complex64, ()), ("a", torch.int8, (1,) * 9)],
)
def test_a_tensor_that_cannot_travel_is_refused(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        TensorSpec(name=name, dtype=dtype, shape=shape)
