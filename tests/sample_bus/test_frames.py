from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_bus.errors import WireError
from sample_bus.frames import (
    MAX_CONTROL_BYTES,
    Ack,
    Bye,
    Control,
    Data,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Refused,
    Rejected,
    Reply,
    Request,
    Reset,
    TopicValue,
    Welcome,
    decode_control,
    encode_control,
)
from sample_bus.packing import pack, unpack

NUMBER = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
ACK = st.builds(Ack, received=NUMBER, settled=NUMBER, committed=NUMBER, limit_samples=NUMBER, room_bytes=NUMBER)
TOPIC = st.builds(TopicValue, name=TEXT, revision=NUMBER, value=st.binary(max_size=50))
MESSAGES: st.SearchStrategy[Control] = st.one_of(
    st.builds(
        Hello,
        protocol=NUMBER,
        greeting=NUMBER,
        name=TEXT,
        role=TEXT,
        process=NUMBER,
    ),
    st.builds(
        Welcome,
        greeting=NUMBER,
        incarnation=TEXT,
        run=TEXT,
        run_id=TEXT,
        max_sample_bytes=NUMBER,
        topics=st.lists(TOPIC, max_size=4),
    ),
    st.builds(Open, greeting=NUMBER, epoch=NUMBER, committed=NUMBER, next_seq=NUMBER),
    st.builds(Opened, greeting=NUMBER, ack=ACK, origin_version=NUMBER, accounted=NUMBER, dropped=NUMBER),
    st.builds(Rejected, seq=NUMBER, error=TEXT, lost=st.booleans()),
    st.builds(Refused, greeting=NUMBER, reason=TEXT),
    st.just(Reset()),
    ACK,
    TOPIC,
    st.builds(Request, id=NUMBER, name=TEXT, body=st.binary(max_size=50)),
    st.builds(Reply, id=NUMBER, ok=st.booleans(), body=st.binary(max_size=50), error=TEXT),
    st.just(Heartbeat()),
    st.builds(Bye, reason=TEXT),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=20,
)


@given(MESSAGES)
def test_every_message_comes_back_as_it_was(message: Control) -> None:
    assert decode_control(encode_control(message)) == message


@given(NUMBER, st.integers(1, 5))
def test_data_is_a_message_only_with_frames_after_it(seq: int, following: int) -> None:
    frame = encode_control(Data(seq=seq))
    assert decode_control(frame, following) == Data(seq=seq)
    with pytest.raises(WireError, match="Data: followed by 0 frames"):
        decode_control(frame)
    with pytest.raises(WireError, match="Heartbeat: followed by"):
        decode_control(encode_control(Heartbeat()), following)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error_or_a_whole_message(frame: bytes) -> None:
    try:
        message = decode_control(frame)
    except WireError:
        return
    assert decode_control(encode_control(message)) == message


@given(st.integers(0, 20), st.lists(PLAIN, max_size=10))
def test_well_formed_nonsense_is_a_wire_error_or_a_whole_message(kind: int, fields: list[object]) -> None:
    frame = pack([kind, *fields])
    try:
        message = decode_control(frame)
    except WireError:
        return
    assert encode_control(message) == frame


@given(PLAIN)
def test_packing_keeps_plain_data(value: object) -> None:
    again = unpack(pack(value), "value")
    assert pack(again) == pack(value)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91\xc0",
        pack([1, 2, 3]),
        pack([9, 1]),
        pack([True]),
        pack({"a": 1}),
        b"\xd4\x01\x00",
        b"\x91" * 5000,
    ],
)
def test_what_is_no_message_is_named(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_control(frame)


def test_message_beyond_the_limit_is_refused_at_both_ends() -> None:
    large = TopicValue(name="t", revision=1, value=bytes(MAX_CONTROL_BYTES))
    with pytest.raises(WireError, match=f"expected at most {MAX_CONTROL_BYTES}"):
        encode_control(large)
    with pytest.raises(WireError, match=f"expected at most {MAX_CONTROL_BYTES}"):
        decode_control(bytes(MAX_CONTROL_BYTES + 1))


def test_what_msgpack_cannot_carry_is_refused() -> None:
    for value in (object(), 2**64, {1, 2}, "\ud800"):
        with pytest.raises(WireError, match="cannot be packed"):
            pack(value)
