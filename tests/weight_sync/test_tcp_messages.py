"""The messages of the network transports: what is written is read, anything else is refused."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.channel import StreamEnd
from weight_sync.errors import ProtocolError
from weight_sync.tcp_messages import (
    BucketHead,
    Credit,
    Done,
    Fail,
    FileNamed,
    Group,
    Hello,
    Join,
    Message,
    Ping,
    Welcome,
    decode,
    encode,
)
from weight_sync.transport import PROTOCOL_VERSION, StageRequest, Terms

TERMS = Terms(transport="tcp", bucket_bytes=1 << 20, dtype="bfloat16")
REQUEST = StageRequest(policy_version=7, receiver="engine-0", nonce="n", terms=TERMS, rank=1, num_ranks=2, cohort=3)
TRANSFER = "0f" * 16
MESSAGES: list[Message] = [
    Hello(token=bytes(16), transfer=TRANSFER, num_stripes=4, request=REQUEST, device="GPU-1"),
    Join(token=bytes(16), transfer=TRANSFER, stripe=3),
    Welcome(terms=TERMS, window=8, bucket_bytes=1 << 20),
    Welcome(terms=TERMS, window=0, bucket_bytes=1, group=Group(store_port=5000, name="a", rank=1, size=2, backend="gloo")),
    BucketHead(kind=2, sequence=9, header=b"header"),
    StreamEnd(policy_version=7, manifest_digest="0" * 32, num_tensors=3, total_bytes=12, num_buckets=1),
    Credit(num_released=5),
    Done(manifest_digest="0" * 32),
    Fail(reason="no room"),
    Ping(),
    FileNamed(directory="/shared/0a0b0c0d-v7"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_a_field_of_another_type_or_size_is_refused(message: Message, data: st.DataObject) -> None:
    fields = msgpack.unpackb(encode(message))
    index = data.draw(st.integers(0, len(fields) - 1))
    fields[index] = data.draw(st.sampled_from([None, -1, 1.5, [1], {"a": 1}, 1 << 63, "x" * 5000, b"x" * 5000]))
    try:
        decode(msgpack.packb(fields))
    except ProtocolError:
        pass


def test_releases_with_another_protocol_are_named() -> None:
    other = StageRequest(policy_version=7, receiver="e", nonce="n", terms=Terms(transport="tcp", protocol=99))
    hello = Hello(token=bytes(16), transfer=TRANSFER, num_stripes=1, request=other)
    with pytest.raises(ProtocolError, match=f"protocol version 99, this side {PROTOCOL_VERSION}"):
        decode(encode(hello))


def test_a_reason_of_any_length_can_be_given() -> None:
    assert decode(encode(Fail(reason="x" * 10_000))) == Fail(reason="x" * 2000)


def test_the_token_is_not_shown() -> None:
    assert "ab" * 8 not in repr(Hello(token=bytes.fromhex("ab" * 16), transfer=TRANSFER, num_stripes=1, request=REQUEST))
