"""Deltas: exact to the bit, never larger than the tensor, and no bytes get past that are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from weight_sync.delta import BLOCK_WORDS, apply_delta, encode_delta
from weight_sync.errors import ProtocolError

WORD_BYTES = st.sampled_from([1, 2, 4, 8])
Bytes = NDArray[np.uint8]


def change(words: int, word_bytes: int, *, share: float, step: int | None, seed: int) -> tuple[Bytes, Bytes]:
    """Random bytes and the same with a share of the words changed: by +-step, or (None) to anything."""
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, words * word_bytes, dtype=np.uint8)
    new = base.copy()
    view = new.view(f"<u{word_bytes}")
    chosen = np.flatnonzero(random.random(words) < share)
    if step is None:
        view[chosen] = random.integers(0, 256, len(chosen) * word_bytes, dtype=np.uint8).view(view.dtype)
    else:
        view[chosen] += random.choice([step, -step], len(chosen)).astype(view.dtype)
    return base, new


def applied(payload: Bytes, base: Bytes, word_bytes: int) -> Bytes:
    before, target, seen = base.copy(), np.full_like(base, 255), bytearray()
    apply_delta(payload, base, target, word_bytes, on_block=lambda block: seen.extend(block.tobytes()))
    assert seen == target.tobytes()
    assert np.array_equal(base, before)  # only read
    return target


@given(st.data(), WORD_BYTES, st.integers(0, 300))
def test_any_two_arrays_give_a_delta_that_restores_the_second(data: st.DataObject, word_bytes: int, words: int) -> None:
    base, new = (data.draw(arrays.arrays(np.uint8, words * word_bytes)) for _ in range(2))
    delta = encode_delta(base, new, word_bytes)
    if delta.payload is None:
        assert (base != new).any()
    else:
        assert len(delta.payload) < max(1, len(new))
        assert (len(delta.payload) == 0) == np.array_equal(base, new)
        assert np.array_equal(applied(delta.payload, base, word_bytes), new)


@settings(max_examples=60, deadline=None)
@given(
    words=st.integers(0, 20_000),
    word_bytes=WORD_BYTES,
    share=st.sampled_from([0.0, 0.0003, 0.01, 0.1, 0.13, 0.4, 0.9]),
    step=st.sampled_from([None, 1, 127, 128, 32_768]),
    seed=st.integers(0, 1 << 16),
)
def test_deltas_of_every_density_and_step_are_exact(
    words: int, word_bytes: int, share: float, step: int | None, seed: int
) -> None:
    base, new = change(words, word_bytes, share=share, step=None if word_bytes == 1 else step, seed=seed)
    delta = encode_delta(base, new, word_bytes)
    if delta.payload is not None and len(delta.payload):
        assert len(delta.payload) < len(new)
        assert delta.num_changed == np.count_nonzero(base.view(f"<u{word_bytes}") != new.view(f"<u{word_bytes}"))
        assert np.array_equal(applied(delta.payload, base, word_bytes), new)


@pytest.mark.parametrize("words", [BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 2 * BLOCK_WORDS + 77])
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.01, 0.3])
def test_deltas_across_the_ends_of_blocks_are_exact(words: int, share: float) -> None:
    base, new = change(words, 2, share=share, step=1, seed=words)
    new[-2:] ^= 1  # the last word of the last block
    delta = encode_delta(base, new, 2)
    assert delta.payload is not None
    assert len(delta.payload) < len(new)
    assert np.array_equal(applied(delta.payload, base, 2), new)


def test_nan_and_signed_zero_are_compared_by_their_bits() -> None:
    """A comparison of values would send every NaN each time, and lose the sign of a zero."""
    base = torch.tensor([0.0, -0.0, float("nan"), 1.0, float("inf")] * 200, dtype=torch.bfloat16)
    same = encode_delta(base.view(torch.uint8).numpy(), base.clone().view(torch.uint8).numpy(), 2)
    assert same.payload is not None
    assert len(same.payload) == 0
    new = base.clone()
    new[0], new[1] = -0.0, 0.0
    new.view(torch.int16)[2] += 1  # another NaN
    delta = encode_delta(base.view(torch.uint8).numpy(), new.view(torch.uint8).numpy(), 2)
    assert delta.num_changed == 3
    assert delta.payload is not None
    assert np.array_equal(applied(delta.payload, base.view(torch.uint8).numpy(), 2), new.view(torch.uint8).numpy())


def test_a_step_of_one_unit_takes_two_bytes_and_no_more() -> None:
    base, new = change(1 << 18, 2, share=0.05, step=1, seed=5)
    delta = encode_delta(base, new, 2)
    assert delta.payload is not None
    assert len(delta.payload) <= 2 * delta.num_changed + 64


def test_what_changed_nearly_everywhere_is_sent_whole() -> None:
    base, new = change(1 << 16, 2, share=1.0, step=None, seed=6)
    assert encode_delta(base, new, 2).payload is None


def test_arrays_of_different_sizes_give_no_delta() -> None:
    with pytest.raises(ValueError, match="4 and 6 bytes"):
        encode_delta(np.zeros(4, np.uint8), np.zeros(6, np.uint8), 2)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([0.01, 0.3]), st.sampled_from([None, 1]))
def test_altered_or_cut_deltas_are_refused_or_stay_inside_the_tensor(
    data: st.DataObject, share: float, step: int | None
) -> None:
    """The checksum of the result catches altered values; a bad structure must end in an error of ours, not in a crash."""
    base, new = change(3000, 2, share=share, step=step, seed=7)
    payload = encode_delta(base, new, 2).payload
    assert payload is not None
    bad = payload.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, min(len(bad) - 1, 40)) | st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.integers(0, len(bad)) | st.just(len(bad)))]
    try:
        applied(bad, base, 2)
    except ProtocolError:
        return


@given(arrays.arrays(np.uint8, st.integers(0, 64)))
def test_noise_is_refused(noise: Bytes) -> None:
    target = np.zeros(64, np.uint8)
    try:
        apply_delta(noise, np.zeros(64, np.uint8), target, 2)
    except ProtocolError:
        assert len(target) == 64


def test_a_delta_of_a_larger_tensor_is_refused() -> None:
    base, new = change(4000, 2, share=0.1, step=1, seed=8)
    payload = encode_delta(base, new, 2).payload
    assert payload is not None
    with pytest.raises(ProtocolError, match="a delta"):
        apply_delta(payload, np.zeros(4000, np.uint8), np.zeros(4000, np.uint8), 2)
