"""Control packets: what is written is read, everything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import ProtocolError
from weight_sync.packets import (
    MAX_PACKET_BYTES,
    BucketSent,
    Done,
    End,
    Fail,
    FilePassed,
    Free,
    Hello,
    Packet,
    Returned,
    RingPassed,
    SegmentPassed,
    TablePassed,
    Welcome,
    decode,
    encode,
)
from weight_sync.transport import PROTOCOL_VERSION, StageRequest, Terms

u32 = st.integers(0, 2**32 - 1)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
labels = st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=64)
words = st.text("abcdefgh0123_", max_size=16)
terms = st.builds(Terms, transport=words, protocol=st.just(PROTOCOL_VERSION), bucket_bytes=u32, dtype=words, backend=words)
requests = st.builds(
    StageRequest,
    policy_version=st.integers(-1, 2**62),
    receiver=labels,
    nonce=labels,
    terms=terms,
    rank=st.integers(0, 7),
    num_ranks=st.integers(8, 64),
    cohort=st.integers(1, 64),
    base_version=st.none() | st.integers(-1, 2**62),
    base_digest=st.just("") | digests,
)
packets: st.SearchStrategy[Packet] = st.one_of(
    st.builds(Hello, request=requests),
    st.builds(Welcome, terms=terms),
    st.builds(RingPassed, bucket_bytes=u32),
    st.builds(TablePassed, num_segments=u32, table_bytes=u32, manifest_bytes=u32),
    st.builds(SegmentPassed, index=u32, num_bytes=u32, header_bytes=u32),
    st.builds(Returned),
    st.builds(FilePassed, path=labels),
    st.builds(
        BucketSent, kind=st.integers(0, 255), sequence=u32, slot=u32, payload_bytes=u32, header_bytes=u32, header_checksum=u32
    ),
    st.builds(Free, slot=u32),
    st.builds(
        End, policy_version=st.integers(0, 2**62), manifest_digest=digests, num_tensors=u32, total_bytes=u32, num_buckets=u32
    ),
    st.builds(Done, manifest_digest=digests),
    st.builds(Fail, reason=st.text(max_size=100)),
)


@given(packets)
def test_a_packet_survives_the_wire(packet: Packet) -> None:
    data = encode(packet)
    assert len(data) <= MAX_PACKET_BYTES
    assert decode(data) == packet


@given(st.binary(max_size=300), st.integers(0, 8))
def test_garbage_is_refused_or_is_a_packet(garbage: bytes, keep: int) -> None:
    for data in (garbage, encode(Free(slot=1))[:keep] + garbage):
        try:
            packet = decode(data)
        except ProtocolError:
            continue
        assert isinstance(packet, Packet)


def test_another_protocol_version_is_refused_naming_both() -> None:
    """B156."""
    data = bytearray(encode(Free(slot=1)))
    data[2] = 9
    with pytest.raises(ProtocolError, match="version 9, this side 2"):
        decode(bytes(data))


def test_a_long_reason_is_cut_not_refused() -> None:
    packet = decode(encode(Fail(reason="because " * 1000)))
    assert isinstance(packet, Fail)
    assert packet.reason.startswith("because because")


@pytest.mark.parametrize("engine", ["", "e" * 65, "a\0b"])
def test_an_engine_name_that_does_not_fit_is_refused(engine: str) -> None:
    with pytest.raises(ProtocolError):
        encode(
            Hello(request=StageRequest(policy_version=1, receiver=engine, nonce="n", terms=Terms(transport="shared_memory")))
        )
