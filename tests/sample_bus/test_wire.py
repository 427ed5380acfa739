from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from configs.limits import MAX_REWARD
from sample_bus import wire
from sample_bus.errors import WireError
from sample_bus.sample import NO_VERSION, Sample, SampleId, StopReason
from tests.fakes.samples import make_sample

ID = SampleId("rollouter", 2**63 + 5, 12)
LIMIT = 1 << 30
COLUMNS = (
    "tokens",
    "loss_mask",
    "behavior_logprobs",
    "version_starts",
    "versions",
    "kept_cache",
    "segment_starts",
    "token_rewards",
)
SCALARS = (
    "task_id",
    "group_id",
    "rollout_id",
    "attempt",
    "seat",
    "group_size",
    "data_source",
    "reward",
    "temperature",
    "stop_reason",
    "num_turns",
    "settings_revision",
    "incarnation",
    "produced_at",
    "reward_parts",
    "counts",
)


def assert_same(got: Sample, expected: Sample) -> None:
    for name in COLUMNS:
        array = getattr(got, name)
        assert array.dtype == getattr(expected, name).dtype
        np.testing.assert_array_equal(array, getattr(expected, name))
    for name in SCALARS:
        assert getattr(got, name) == getattr(expected, name), name
    assert isinstance(got.stop_reason, StopReason)


def sealed(frames: list[bytes | memoryview], **changes: int | bytes) -> list[bytes]:
    """The frames with fields of the prefix changed and a checksum that fits: what a producer of another mind would send."""
    names = ("magic", "version", "kind", "flags", "epoch", "seq", "header_len", "n_frames", "body_len")
    values = dict(zip(names, struct.unpack_from("<4sBBHQQIIQ", frames[0]), strict=True))
    prefix = struct.pack("<4sBBHQQIIQ", *{**values, **changes}.values())
    header, rest = bytes(frames[0][48:]), [bytes(frame) for frame in frames[1:]]
    digest = xxhash.xxh3_64(b"".join((prefix, header, *rest))).intdigest()
    return [prefix + struct.pack("<Q", digest) + header, *rest]


def with_header(frames: list[bytes | memoryview], **changes: Any) -> list[bytes]:
    header = {**msgpack.unpackb(frames[0][48:]), **changes}
    packed = msgpack.packb({name: value for name, value in header.items() if value is not ...})
    return sealed([bytes(frames[0][:48]) + packed, *frames[1:]], header_len=len(packed))


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


NAME = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)


@st.composite
def samples(draw: st.DrawFn, *, longest: int = 2000) -> Sample:
    """Valid samples: the scalars by Hypothesis, the columns by a generator that it seeds."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(1, longest))
    starts = np.unique([0, *random.integers(0, length, draw(st.integers(0, 6)))])
    versions = random.choice([NO_VERSION, 0, 1, 7, 2**31 - 1], len(starts))
    expanded = np.repeat(versions, np.diff([*starts, length]))
    mask = (random.random(length) < 0.7) & (expanded != NO_VERSION)
    segments = np.unique([0, *random.integers(0, length, draw(st.integers(0, 3)))])
    mask[segments] = False
    group_size = draw(st.integers(1, 64))
    return make_sample(
        task_id=draw(TEXT),
        group_id=draw(TEXT),
        rollout_id=draw(TEXT),
        attempt=draw(st.integers(0, 9)),
        group_size=group_size,
        seat=group_size - 1,
        tokens=random.integers(0, 2**31, length).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        behavior_logprobs=np.where(mask, -random.exponential(5, length), 0).astype(np.float32),
        version_starts=starts.astype(np.int32),
        versions=versions.astype(np.int32),
        kept_cache=((random.random(len(versions)) < 0.5) & (versions != NO_VERSION)).astype(np.uint8),
        reward=draw(st.floats(-MAX_REWARD, MAX_REWARD)),
        temperature=draw(st.floats(1e-3, 10)),
        stop_reason=draw(st.sampled_from(StopReason)),
        num_turns=draw(st.integers(0, 1000)),
        settings_revision=draw(st.integers(0, 2**31 - 1)),
        produced_at=draw(st.floats(0, 1e10)),
        segment_starts=segments.astype(np.int32),
        token_rewards=random.normal(size=length * draw(st.integers(0, 1))).astype(np.float32),
        reward_parts=draw(st.dictionaries(NAME, st.floats(-1e9, 1e9), max_size=3)),
        counts=draw(st.dictionaries(NAME, st.integers(0, 10**9), max_size=3)),
    )


FRAMES = [wire.encode(make_sample(reply=[1] * length), ID) for length in (1, 100, 3000)]


@given(samples(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_every_valid_sample_comes_back_as_it_was(sample: Sample, epoch: int, seq: int) -> None:
    sample.validate()
    sample_id = SampleId("rollouter", epoch, seq)
    got_id, got = wire.decode(wire.encode(sample, sample_id), max_bytes=LIMIT)
    assert got_id == sample_id
    assert_same(got, sample)


def test_decoded_columns_are_read_only_views_on_the_frames() -> None:
    frames = [bytes(frame) for frame in wire.encode(make_sample(reply=[1] * 200_000), ID)]
    _, sample = wire.decode(frames, max_bytes=LIMIT)
    for name in COLUMNS[:-1]:  # no token rewards
        array = getattr(sample, name)
        assert not array.flags.writeable
        assert any(np.shares_memory(array, np.frombuffer(frame, np.uint8)) for frame in frames)


def test_columns_of_64_kib_and_more_travel_uncopied_in_frames_of_their_own() -> None:
    sample = make_sample(reply=[1] * (16_384 - 3))
    frames = wire.encode(sample, ID)
    assert [len(frame) for frame in frames[2:]] == [1 << 16, 1 << 16]  # tokens and logprobs; the mask is 16 KiB
    assert np.shares_memory(sample.tokens, np.frombuffer(frames[2], np.int32))
    smaller = wire.encode(make_sample(reply=[1] * (16_383 - 3)), ID)
    assert len(smaller) == 2
    for encoded in (frames, smaller):
        wire.decode(encoded, max_bytes=LIMIT)


def test_columns_in_the_body_are_aligned_to_64_bytes() -> None:
    frames = wire.encode(make_sample(reply=[1] * 10), ID)
    _, got = wire.decode(frames, max_bytes=LIMIT)
    assert isinstance(got, Sample)
    start = np.frombuffer(frames[1], np.uint8).ctypes.data
    columns = [getattr(got, name) for name in COLUMNS]
    assert [(column.ctypes.data - start) % 64 for column in columns[:7]] == [0] * 7


def test_non_contiguous_columns_are_encoded_by_value() -> None:
    sample = make_sample(tokens=np.arange(10, dtype=np.int32)[::2], reply=[8, 9])
    _, got = wire.decode(wire.encode(sample, ID), max_bytes=LIMIT)
    np.testing.assert_array_equal(got.tokens, [0, 2, 4, 6, 8])


@given(st.sampled_from(FRAMES), st.integers(0, 1), st.integers(0, 2**16), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(encoded: list[bytes], which: int, at: int, flip: int) -> None:
    frames = [bytearray(frame) for frame in encoded]
    frames[which][at % len(frames[which])] ^= flip
    with pytest.raises(WireError):
        wire.decode([bytes(frame) for frame in frames], max_bytes=LIMIT)


@given(st.lists(st.binary(max_size=400), max_size=5))
def test_random_bytes_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(frames, max_bytes=LIMIT)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=5)


@given(
    st.sampled_from(FRAMES),
    st.sampled_from([*SCALARS, "producer", "num_tokens", "num_runs", "num_segments", "num_rewards", "surplus"]),
    PLAIN | st.lists(PLAIN, max_size=6) | st.lists(st.lists(PLAIN, max_size=7), min_size=5, max_size=5),
)
def test_well_sealed_nonsense_in_the_header_is_a_wire_error_or_a_valid_sample(
    frames: list[bytes | memoryview], name: str, value: object
) -> None:
    """The checksum does not protect from a producer that means it: every header is checked for itself."""
    try:
        _, got = wire.decode(with_header(frames, **{name: value}), max_bytes=LIMIT)
    except WireError:
        return
    got.validate()
    assert getattr(got, name, None) == value or name == "producer"


@given(
    st.sampled_from(FRAMES),
    st.sampled_from(["num_tokens", "num_runs", "num_segments"]),
    st.integers(-(2**40), 2**40) | st.integers(-8, 2000),
)
def test_lengths_that_lie_are_refused_or_stay_within_the_frames(
    frames: list[bytes | memoryview], name: str, value: int
) -> None:
    """A length may reach into the zeros that fill a column up to the next one, and no further."""
    true = msgpack.unpackb(frames[0][48:])[name]
    try:
        _, got = wire.decode(with_header(frames, **{name: value}), max_bytes=LIMIT)
    except WireError:
        return
    got.validate()
    assert abs(value - true) < 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"RLS1"}, "magic: got b'RLS1', expected b'HDR1'"),
        ({"version": 1}, "version: got 1, expected 3"),
        ({"kind": 9}, "kind: got 9, expected 1"),
        ({"flags": 1}, "flags: got 1, expected 0"),
        ({"n_frames": 3}, "frames: got 3, expected 2"),
        ({"header_len": 10}, "header bytes: got 10, expected"),
        ({"body_len": 10}, "body bytes: got 10, expected"),
    ],
)
def test_prefix_of_another_format_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.decode(sealed(wire.encode(make_sample(), ID), **change), max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attempt": True}, "attempt: got bool, expected int"),
        ({"attempt": -1}, "attempt: got -1"),
        ({"reward": float("nan")}, "reward: got nan"),
        ({"reward": 1}, "reward: got int, expected float"),
        ({"stop_reason": "tired"}, "stop_reason: got 'tired', expected one of"),
        ({"task_id": b"x"}, "task_id: got bytes, expected str"),
        ({"task_id": ...}, "header: got other keys"),
        ({"surplus": 1}, "header: got other keys than expected: .*surplus"),
        ({"seat": 7}, "seat: got 7"),
        ({"num_runs": 0}, "columns: got 5 tokens in 0 runs"),
        ({"num_tokens": 600}, "do not fit|hold more"),
    ],
)
def test_header_field_of_the_wrong_type_or_range_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.decode(with_header(wire.encode(make_sample(), ID), **change), max_bytes=LIMIT)


def test_inconsistent_columns_are_refused_on_decode() -> None:
    """B55: a logprob that is no number never reaches a loss."""
    for sample, message in (
        (make_sample(logprobs=[-1.0, float("nan")]), "behavior_logprobs"),
        (make_sample(logprobs=[-1.0, float("-inf")]), "behavior_logprobs"),
        (make_sample(loss_mask=np.array([0, 0, 0, 2, 1], np.uint8)), "loss_mask: got 2"),
        (make_sample(tokens=np.array([1, 2, 3, 4, -5], np.int32)), "tokens: got -5"),
        (make_sample(version_starts=np.array([0, 5], np.int32)), "version_starts"),
    ):
        with pytest.raises(WireError, match=message):
            wire.decode(wire.encode(sample, ID), max_bytes=LIMIT)


def test_sizes_beyond_the_limits_are_refused_with_both_numbers() -> None:
    frames = wire.encode(make_sample(reply=[1] * 1000), ID)
    size = wire.num_bytes(frames)
    wire.decode(frames, max_bytes=size)
    with pytest.raises(WireError, match=f"sample: {size} bytes, expected at most {size - 1}"):
        wire.decode(frames, max_bytes=size - 1)
    with pytest.raises(WireError, match=r"header: .* expected at most 65536"):
        wire.encode(make_sample(task_id="x" * 70_000), ID)


def test_text_that_is_no_utf8_is_refused_at_both_ends() -> None:
    with pytest.raises(WireError, match="cannot be packed"):
        wire.encode(make_sample(task_id="\ud800"), ID)
    frames = wire.encode(make_sample(task_id="abc"), ID)
    broken = bytes(frames[0][48:]).replace(b"abc", b"\xff\xfe\xfd")
    with pytest.raises(WireError, match=r"header: .* not valid msgpack"):
        wire.decode(sealed([bytes(frames[0][:48]) + broken, *frames[1:]]), max_bytes=LIMIT)
